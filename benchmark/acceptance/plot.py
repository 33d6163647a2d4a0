# SPDX-License-Identifier: Apache-2.0
"""Picture of the acceptance study: tokens a step against rows verified for a token."""

from __future__ import annotations

from pathlib import Path

from . import WIDTHS


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
