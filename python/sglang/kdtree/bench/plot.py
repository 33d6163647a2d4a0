# SPDX-License-Identifier: Apache-2.0
"""Decode speed and step time against context, one line per run and text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.kdtree.optional import figure_module


def plot_runs(documents: Sequence[dict[str, Any]], path: Path) -> None:
    pyplot = figure_module()
    from matplotlib import ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for index, document in enumerate(documents):
        label = document["label"] or document["server"]["attention_backend"] or "run"
        if len(documents) > 1:  # as compare's table calls them
            label = f"{'AB'[index]}: {label}"
        for kind in document["settings"]["texts"]:
            rows = sorted(
                (r for r in document["rows"] if r["text"] == kind),
                key=lambda r: r["prompt_tokens"],
            )
            contexts = [row["prompt_tokens"] for row in rows]
            for axis, key in zip(axes, ("decode_tok_s", "step_ms"), strict=True):
                axis.plot(
                    contexts,
                    [row[key]["p50"] for row in rows],
                    marker="o",
                    label=f"{label}, {kind}",
                )
    measured = sorted(
        {row["context"] for document in documents for row in document["rows"]}
    )
    titles = ("decode, tokens/s (p50)", "step, ms (p50)")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="context, tokens", xscale="log", yscale="log")
        axis.set_xticks(measured, [label_of(context) for context in measured])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(ticker.StrMethodFormatter("{x:g}"))
        axis.grid(True, which="both", alpha=0.3)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def label_of(context: int) -> str:
    return f"{context / 1000:g}k" if context >= 1000 else str(context)
