# SPDX-License-Identifier: Apache-2.0
"""Two longctx results side by side: B against A, at the same text and context."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError
from sglang.kdtree.result import Result, read_json, require_schema

# A difference below this is noise for a few repeats; arbitrary.
REGRESSION_RATIO = 0.97


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", type=Path, metavar="A.json", help="written by bench longctx --output")
    add("b", type=Path, metavar="B.json", help="the run to judge against A")
    add("--plot", type=Path, metavar="PNG", help="draw both runs")


def run(args: argparse.Namespace, console: Any) -> Result:
    del console
    documents = [
        require_schema(
            read_json(path, argument=name), verb="bench-longctx", source=str(path)
        )
        for name, path in (("A", args.a), ("B", args.b))
    ]
    rows = compare_rows(documents[0]["rows"], documents[1]["rows"])
    if not rows:
        raise KitError(
            what=f"{args.a} and {args.b}",
            expected="a text and context measured in both",
            got="none in common",
            remedy="Run both with the same --text and --contexts.",
        )
    if args.plot:
        from sglang.kdtree.bench.plot import plot_runs

        plot_runs(documents, args.plot)
    slower = [row for row in rows if row["decode_ratio"] < REGRESSION_RATIO]
    data = {
        "a": describe(documents[0], args.a),
        "b": describe(documents[1], args.b),
        "differs": differing_settings(*documents),
        "rows": rows,
        "slower": len(slower),
    }
    return Result(
        verb="bench-compare", data=data, exit_code=EXIT_FINDING if slower else EXIT_OK
    )


def describe(document: dict, path: Path) -> dict[str, Any]:
    server = document["server"]
    keys = (
        "model",
        "version",
        "attention_backend",
        "speculative_algorithm",
        "num_draft_tokens",
    )
    return {
        "file": str(path),
        "label": document["label"],
        **{key: server[key] for key in keys},
    }


def differing_settings(a: dict, b: dict) -> list[str]:
    """What else changed between the runs, and what each warned of: a ratio of such rows means little."""
    found = []
    for key in ("output_tokens", "repeats", "temperature", "seed"):
        if a["settings"][key] != b["settings"][key]:
            found.append(f"{key}: {a['settings'][key]} against {b['settings'][key]}")
    for key in (
        "api",
        "model",
        "engine",
        "version",
        "attention_backend",
        "speculative_algorithm",
        "num_draft_tokens",
        "page_size",
    ):
        if a["server"][key] != b["server"][key]:
            found.append(f"{key}: {a['server'][key]} against {b['server'][key]}")
    for side, document in (("A", a), ("B", b)):
        found += [f"{side}, {warning}" for warning in document["warnings"]]
    return found


def compare_rows(a: list[dict], b: list[dict]) -> list[dict[str, Any]]:
    before = {(row["text"], row["context"]): row for row in a}
    rows = []
    for row in b:
        other = before.get((row["text"], row["context"]))
        if other:
            rows.append(
                {
                    "text": row["text"],
                    "context": row["context"],
                    "decode_tok_s": [
                        other["decode_tok_s"]["p50"],
                        row["decode_tok_s"]["p50"],
                    ],
                    "decode_ratio": row["decode_tok_s"]["p50"]
                    / other["decode_tok_s"]["p50"],
                    "step_ratio": other["step_ms"]["p50"] / row["step_ms"]["p50"],
                    "prefill_ratio": row["prefill_tok_s"]["p50"]
                    / other["prefill_tok_s"]["p50"],
                    "accept_length": [
                        other["accept_length"]["p50"],
                        row["accept_length"]["p50"],
                    ],
                }
            )
    return rows


def render(result: Result, console: Any) -> None:
    from rich.table import Table

    data = result.data
    table = Table(title="B against A, p50 (above 1: B is faster)")
    for name in (
        "text",
        "context",
        "A tok/s",
        "B tok/s",
        "decode",
        "step",
        "prefill",
        "tokens a step",
    ):
        table.add_column(name, justify="left" if name == "text" else "right")
    for row in data["rows"]:
        table.add_row(
            row["text"],
            f"{row['context']:,}",
            *[f"{value:,.1f}" for value in row["decode_tok_s"]],
            *[
                f"{row[key]:.2f}x"
                for key in ("decode_ratio", "step_ratio", "prefill_ratio")
            ],
            "->".join(f"{value:.2f}" for value in row["accept_length"]),
        )
    console.print(table)
    for text in data["differs"]:
        console.print(f"differs: {text}", style="yellow", markup=False)
