# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the model card (README.md) from the JSON files they come from.

    python -m training.model_card [--check]

A table stands between ``<!-- name:begin -->`` and ``<!-- name:end -->``. ``--check`` changes nothing and exits
with 1 if the card is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent
CARD = MODELS / "README.md"
CODE_KINDS = {
    "code": "held-out Python, 12 to 60 lines",
    "prose": "English prose",
    "repeat": "repeated phrases",
    "noise": "random characters",
    "long": "held-out Python, about 3000 tokens",
}


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def walk_columns(acceptance: dict) -> list[str]:
    """Names of the walks in the order of the file."""
    return list(acceptance["commit_length_probe"]["walks"])


def column_title(walk: str) -> str:
    """``tree16`` -> ``tree 16``."""
    return re.sub(r"^tree", "tree ", walk)


def acceptance_table(acceptance: dict, mode: str, figure: str) -> str:
    """Tokens per verify step by kind of prompt."""
    walks = walk_columns(acceptance)
    rows = []
    for kind, entry in acceptance[mode].items():
        figures = ["-" if (v := entry["walks"][w][figure]) is None else f"{v:.2f}" for w in walks]
        rows.append([CODE_KINDS[kind], entry["prompts"], *figures])
    if mode == "greedy" and figure == "accept_length":
        probe = acceptance["commit_length_probe"]
        rows.append([probe["prompt"], 1, *(f"{probe['walks'][w][figure]:.2f}" for w in walks)])
    return table(["prompts", "number", *map(column_title, walks)], rows)


def loop_sentence(acceptance: dict) -> str:
    """How much of the greedy text is a loop."""
    shares = ", ".join(f"{kind} {entry['share_in_loops']:.0%}" for kind, entry in acceptance["greedy"].items())
    return f"Share of the greedy tokens that belong to such loops: {shares}."


def contract_table(acceptance: dict) -> str:
    """What wrong drafter inputs cost."""
    return table(
        ["what the drafter is given", "tokens per verify step, chain"],
        ([name, f"{value:.2f}"] for name, value in acceptance["contract_errors"].items()),
    )


def corpus_table(corpus: dict) -> str:
    """What the models were trained on."""
    rows = [
        [name, entry["files"], f"{entry['bytes'] / 1e6:.2f}", f"{entry['tokens'] / 1e6:.2f}", entry["licence"]]
        for name, entry in corpus["train"].items()
    ]
    return table(["source", "files", "MB", "M tokens", "licence"], rows)


def sections() -> dict[str, str]:
    """All generated parts of the card."""
    acceptance = json.loads((MODELS / "acceptance.json").read_text())
    corpus = json.loads((MODELS / "training" / "corpus.json").read_text())
    return {
        "greedy": acceptance_table(acceptance, "greedy", "accept_length"),
        "before-loop": acceptance_table(acceptance, "greedy", "before_loop") + "\n\n" + loop_sentence(acceptance),
        "sampled": acceptance_table(acceptance, "sampled", "accept_length"),
        "contract": contract_table(acceptance),
        "corpus": corpus_table(corpus),
    }


def render(card: str) -> str:
    """The card with every generated part replaced."""
    for name, body in sections().items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if card.count(begin) != 1 or card.count(end) != 1:
            raise SystemExit(f"the card must hold {begin} and {end} once each")
        head, rest = card.split(begin)
        card = f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"
    return card


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    card = CARD.read_text()
    fresh = render(card)
    if args.check:
        if fresh != card:
            print("README.md is out of date: run python -m training.model_card", file=sys.stderr)
        sys.exit(fresh != card)
    CARD.write_text(fresh)


if __name__ == "__main__":
    main()
