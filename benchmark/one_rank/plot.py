# SPDX-License-Identifier: Apache-2.0
"""python -m one_rank.plot RESULT.json: step time against context, and where it goes, as PNG files beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import results, table
from .shapes import ARMS

COLORS = {
    "plain_triton": "#777777", "plain_kdtree": "#1b6ca8", "dflash_triton": "#c9a227", "dflash_kdtree": "#7a9e3b",
    "tree_triton": "#c0392b", "tree_kdtree_eager": "#8e6bbf", "tree_kdtree": "#0b8457", "eagle_triton": "#d98880",
    "eagle_kdtree": "#48a999",
}  # fmt: skip


def draw_steps(data: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for arm, color in COLORS.items():
        found = table.by_context(data)
        points = [(c, of[arm]["ms_per_step_p50"]) for c, of in found.items() if arm in of]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=ARMS[arm].label)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms a step", title=title_of(data))
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def draw_kernels(data: dict, path: Path) -> bool:
    from matplotlib.figure import Figure

    columns, rows = table.kernels(data)
    if not rows:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(rows)
    for i, kind in enumerate(columns[1:], start=1):
        heights = [float(row[i].replace(",", "")) / 1e3 for row in rows]
        axes.bar([row[0] for row in rows], heights, bottom=below, label=kind)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set(xlabel="context, tokens", ylabel="ms a step", title=f"{ARMS['tree_kdtree'].label}: kernels, profiled")
    axes.legend(fontsize=8, ncols=2, loc="upper left")  # the bars grow to the right
    axes.set_ylim(top=1.25 * max(below))
    figure.savefig(path, dpi=110)
    return True


def title_of(data: dict) -> str:
    header = data["header"]
    where = (header["gpu"] or {}).get("name", header["device"])
    model = header["model"]
    return f"One rank, {model['num_hidden_layers']} layers, {model['num_attention_heads']} heads, 1 request; {where}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    args = parser.parse_args(argv)
    data = results.load(args.result)
    steps = args.result.with_name(f"{args.result.stem}_context.png")
    draw_steps(data, steps)
    print(f"wrote {steps}")
    kernels = args.result.with_name(f"{args.result.stem}_kernels.png")
    if draw_kernels(data, kernels):
        print(f"wrote {kernels}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
