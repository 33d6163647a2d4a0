# SPDX-License-Identifier: Apache-2.0
"""Two longctx results side by side: B against A, at the same text and context."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError
from sglang.kdtree.result import Result, new_table, read_json, require_schema

# A difference below this is noise for a few repeats; arbitrary.
REGRESSION_RATIO = 0.97
IDENTITY = (
    "model version attention_backend speculative_algorithm num_draft_tokens".split()
)


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
    server = {key: document["server"][key] for key in IDENTITY}
    return {"file": str(path), "label": document["label"], **server}


def differing_settings(a: dict, b: dict) -> list[str]:
    """What else changed between the runs, and what each warned of: a ratio of such rows means little."""
    found = []
    for part, keys in (
        ("settings", ["output_tokens", "repeats", "temperature", "seed"]),
        ("server", ["api", "engine", *IDENTITY, "page_size"]),
    ):
        for key in keys:
            if a[part][key] != b[part][key]:
                found.append(f"{key}: {a[part][key]} against {b[part][key]}")
    for side, document in (("A", a), ("B", b)):
        found += [f"{side}, {warning}" for warning in document["warnings"]]
    return found


def compare_rows(a: list[dict], b: list[dict]) -> list[dict[str, Any]]:
    before = {(row["text"], row["context"]): row for row in a}
    rows = []
    for row in b:
        other = before.get((row["text"], row["context"]))
        if other:
            both = {
                key: [side[key]["p50"] for side in (other, row)]
                for key in ("decode_tok_s", "step_ms", "prefill_tok_s", "accept_length")
            }
            rows.append(
                {
                    "text": row["text"],
                    "context": row["context"],
                    "decode_tok_s": both["decode_tok_s"],
                    "decode_ratio": both["decode_tok_s"][1] / both["decode_tok_s"][0],
                    "step_ratio": both["step_ms"][0] / both["step_ms"][1],
                    "prefill_ratio": both["prefill_tok_s"][1]
                    / both["prefill_tok_s"][0],
                    "accept_length": both["accept_length"],
                }
            )
    return rows


def render(result: Result, console: Any) -> None:
    data = result.data
    table = new_table(
        "text|context|A tok/s|B tok/s|decode|step|prefill|tokens a step",
        title="B against A, p50 (above 1: B is faster)",
    )
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
