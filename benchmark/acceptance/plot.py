# SPDX-License-Identifier: Apache-2.0
"""Picture of the acceptance study: tokens a step against rows verified for a token.

python -m acceptance.plot FILE...     of Engines, from their result files
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import WIDTHS, results


def draw(data: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(data["walks"]), figsize=(11, 4.5), sharey=True)
    for axis, (temperature, kinds) in zip(axes, data["walks"].items(), strict=True):
        for color, (kind, ways) in enumerate(kinds.items()):
            for style, name in (("-", "tree"), (":", "seeded")):
                points = [ways[f"{name} {w}"] for w in WIDTHS]
                axis.plot(
                    [p["rows_per_token"] for p in points],
                    [p["accept_length"] for p in points],
                    style,
                    marker=".",
                    color=f"C{color}",
                    label=f"{kind}, {'best-first' if name == 'tree' else 'chain-seeded'} 8, 16, 32, 64",
                )
            chain = ways["chain"]
            at = chain["rows_per_token"], chain["accept_length"]
            axis.plot(*at, "x", color=f"C{color}", label=f"{kind}, chain of 8")
        axis.set_xscale("log")
        axis.set_title(f"temperature {temperature}")
        axis.set_xlabel("rows verified for a token")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens a verify step commits")
    axes[0].legend(fontsize=6)
    figure.suptitle("Small model of test/models, offline walk: tree against chain on the same scores")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_engine(data: dict, path: Path) -> None:
    """The same of real Engines, one request at a time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from .table import engine_columns, engine_rows

    rows = engine_rows(data, batch=1)
    columns = engine_columns(rows)
    temperatures = list(dict.fromkeys(t for t, _ in columns))
    figure, axes = pyplot.subplots(1, len(temperatures), figsize=(11, 4.5), sharey=True, squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for color, kind in enumerate(kind for t, kind in columns if t == temperature):
            found = {arm: cells[temperature, kind] for arm, cells in rows.items() if (temperature, kind) in cells}
            trees = [row for arm, row in found.items() if arm.startswith("tree ")]
            for marker, style, label, some in (
                (".", "-", "trees of 8, 16, 32, 64", trees),
                ("x", "", "chain of 8", [found[arm] for arm in ("chain",) if arm in found]),
                ("o", "", "auto", [found[arm] for arm in ("auto",) if arm in found]),
            ):
                if some:
                    points = [row["rows_per_token"] for row in some], [row["accept_length"] for row in some]
                    axis.plot(*points, linestyle=style, marker=marker, color=f"C{color}", label=f"{kind}, {label}")
        axis.set_xscale("log")
        axis.set_title(f"temperature {temperature}")
        axis.set_xlabel("rows verified for a token")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens a verify step commits")
    axes[0][-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle("Small model of test/models in the Engine, one request at a time")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":  # python -m acceptance.plot FILE of Engines
    for argument in sys.argv[1:]:
        draw_engine(results.load_engine(Path(argument)), Path(argument).with_suffix(".png"))
