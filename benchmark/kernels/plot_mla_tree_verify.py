# SPDX-License-Identifier: Apache-2.0
"""Plot a result file: time against context, and the roofline.

    python benchmark/kernels/plot_mla_tree_verify.py benchmark/results/h200/mla_tree_verify.json [--out FOLDER]

Writes mla_tree_verify_context.png and mla_tree_verify_roofline.png beside the result file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from verify_bench import counters, results  # noqa: E402
from verify_bench.arms import ARMS  # noqa: E402

OURS_STYLE = {"color": "#c0392b", "linewidth": 2.4, "marker": "o", "zorder": 5}
COLORS = dict(zip([a for a in ARMS if a != "ours"], plt.get_cmap("tab10").colors, strict=False))


def style(arm: str) -> dict:
    return (
        OURS_STYLE
        if arm == "ours"
        else {"color": COLORS.get(arm, "gray"), "linewidth": 1.2, "marker": ".", "zorder": 3}
    )


def is_context_row(r: dict, kv_dtype: str = "bf16") -> bool:
    return (r["bs"], r["s_q"], r["h_q"], r["page_size"], r["kv_dtype"]) == (1, 9, 8, 1, kv_dtype)


def subtitle(data: dict) -> str:
    h = data["header"]
    card = h["gpu"]["name"] if h["gpu"] else h["device"]
    return f"{card}, commit {h['commit'][:12]}, {h['date'][:10]}; * without the tree mask"


def plot_context(data: dict, path: Path) -> None:
    rows = [r for r in data["rows"] if is_context_row(r)]
    fp8 = sorted(
        (r for r in data["rows"] if is_context_row(r, "fp8") and r["arm"] == "ours"), key=lambda r: r["prefix"]
    )
    if not rows:
        raise SystemExit("plot: the result file has no row of bs=1, q=9, h=8, bf16, page 1")
    fig, ax = plt.subplots(figsize=(8.5, 5.2))
    for arm in dict.fromkeys(r["arm"] for r in rows):
        line = sorted((r for r in rows if r["arm"] == arm), key=lambda r: r["prefix"])
        x = [r["prefix"] for r in line]
        ax.plot(x, [r["us_p50"] for r in line], label=ARMS[arm].label, **style(arm))
        ax.fill_between(
            x,
            [r["us_p20"] for r in line],
            [r["us_p80"] for r in line],
            color=style(arm)["color"],
            alpha=0.15,
            linewidth=0,
        )
    if fp8:
        ax.plot(
            [r["prefix"] for r in fp8],
            [r["us_p50"] for r in fp8],
            label="ours, fp8 KV",
            **{**OURS_STYLE, "linestyle": "--", "marker": "s"},
        )
    ceilings = data["header"]["ceilings"]
    contexts = sorted({r["prefix"] for r in rows})
    shapes = {r["prefix"]: results.shape_of(r) for r in rows}
    if ceilings.get("copy_gbps") and ceilings.get("mma_tflops"):
        floors = [counters.floors_us(shapes[p], ceilings["copy_gbps"], ceilings["mma_tflops"]) for p in contexts]
        ax.plot(contexts, [max(f) for f in floors], "k:", linewidth=1, label="floor: KV read once, or the MMAs")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(contexts, [f"{p // 1024}k" if p >= 1024 else str(p) for p in contexts])
    ax.set_xlabel("prefix tokens")
    ax.set_ylabel("us per call")
    ax.set_title(f"MLA tree verify, 9 nodes x 8 heads, batch 1\n{subtitle(data)}", fontsize=10)
    ax.grid(True, which="both", alpha=0.25)
    ax.legend(fontsize=8, ncols=2)
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def plot_roofline(data: dict, path: Path) -> None:
    fig, ax = plt.subplots(figsize=(8.5, 5.2))
    intensity = {}
    for arm in dict.fromkeys(r["arm"] for r in data["rows"]):
        line = [r for r in data["rows"] if r["arm"] == arm]
        x = [counters.flops(results.shape_of(r)) / counters.kv_bytes(results.shape_of(r)) for r in line]
        intensity[arm] = x
        ax.plot(
            x, [r["tflops"] for r in line], label=ARMS[arm].label, **{**style(arm), "linewidth": 0, "linestyle": "none"}
        )
    ceilings = data["header"]["ceilings"]
    low, high = min(map(min, intensity.values())) / 2, max(map(max, intensity.values())) * 2
    copy, mma = ceilings.get("copy_gbps"), ceilings.get("mma_tflops")
    if copy:
        top = min(high, mma * 1e3 / copy) if mma else high
        ax.plot(
            [low, top], [low * copy * 1e-3, top * copy * 1e-3], "k-", linewidth=1, label=f"copy rate {copy:,.0f} GB/s"
        )
    if mma:
        start = max(low, mma * 1e3 / copy) if copy else low
        ax.plot([start, high], [mma, mma], "k--", linewidth=1, label=f"mma.sync {mma:,.0f} TFLOP/s")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("FLOP per unique KV byte")
    ax.set_ylabel("useful TFLOP/s")
    ax.set_title(f"MLA tree verify, all shapes\n{subtitle(data)}", fontsize=10)
    ax.grid(True, which="both", alpha=0.25)
    ax.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the images (default: the result file's)")
    args = parser.parse_args(argv)
    try:
        data = results.load(args.result)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    if not data["rows"]:
        parser.error(f"{args.result} has no rows")
    folder = args.out or args.result.parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in (("context", plot_context), ("roofline", plot_roofline)):
        path = folder / f"mla_tree_verify_{name}.png"
        plot(data, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
