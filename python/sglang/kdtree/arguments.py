# SPDX-License-Identifier: Apache-2.0
"""The parser of the command line, whose errors have the form of every other, and the types of its arguments."""

from __future__ import annotations

import argparse
import re

from sglang.kdtree.errors import KitError

UNITS = {"": 1, "k": 1_000, "m": 1_000_000}
# (what argparse says, what was expected there, what came); a type that refuses is named by its __name__.
REFUSALS = [
    (r"argument (.+?): invalid (.+?) value: (.*)", "{1}", "{2}"),
    (
        r"argument (.+?): invalid choice: (.+?) \(choose from (.*)\)",
        "one of {2}",
        "{1}",
    ),
    (r"argument (.+?): expected (.*)", "{1}", "none, or too many"),
    (r"argument (.+?): (.*)", "a use as --help describes", "{1}"),
    (r"the following arguments are required: (.*\|.*)", "one of them", "none"),
    (r"the following arguments are required: (.*)", "a value", "none"),
    (r"unrecognized arguments: (.*)", "an argument that this verb has", "{0}"),
    (r"(.*)", "arguments as --help describes", "{0}"),
]
NAMES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """Raises KitError, knows no abbreviations, and says each default."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def add_argument(self, *names, help: str | None = None, **options):
        default = options.get("default", argparse.SUPPRESS)
        if default not in (None, "", [], argparse.SUPPRESS):
            help = f"{help} (default: %(default)s)" if help else "default: %(default)s"
        return super().add_argument(*names, help=help, **options)

    def error(self, message: str):
        for pattern, expected, got in REFUSALS:
            if match := re.fullmatch(pattern, message, re.DOTALL):
                parts = match.groups()
                raise KitError(
                    what=parts[0],
                    expected=NAMES.get(expected := expected.format(*parts), expected),
                    got=got.format(*parts),
                    remedy=f"Run: {self.prog} --help",
                )


def count(text: str) -> int:
    """A positive whole number, of tokens or of anything else: 4096, 200k, 1.5M; k is 1000."""
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    number = float(match[1]) * UNITS[match[2].lower()] if match else 0.5
    if number < 1 or number != int(number):
        raise ValueError
    return int(number)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def counts_or_none(text: str) -> list[int]:
    return counts(text) if text else []


count.__name__ = "whole number, at least 1, such as 4096, 200k or 1.5M"
counts.__name__ = counts_or_none.__name__ = (
    "whole numbers, at least 1, such as 1k,16k,185000"
)
