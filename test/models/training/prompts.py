# SPDX-License-Identifier: Apache-2.0
"""The prompts that tests and tables use: held-out Python, prose, repeated phrases, noise.

Code comes from the standard library files that were held out of training (PSF licence); everything else
is written or drawn here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 7

PROSE = (
    "Before you install the program, read this page to its end. The first part tells what the program needs, "
    "the second how to build it, and the last what to do when",
    "The committee met on the first Tuesday of the month. It agreed that every member may copy the minutes, "
    "provided that",
    "If the file does not exist, the command prints a warning and exits with a status of 1. Otherwise it reads "
    "the file line by line and",
    "A river that freezes in winter carries less water than one that does not. This is why the old maps of the "
    "valley show",
)

REPEATED = (
    ("The cat sat on the mat. ", 8),
    ("def add(first, second):\n    return first + second\n\n\n", 6),
    ("Every evening the keeper of the lighthouse counts eleven boats, four gulls and one grey whale. ", 5),
    ("zq7 vorto lem-41 {qua} 0x3f; ", 7),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, its kind, and where it is from."""

    kind: str
    source: str
    text: str


def code_excerpts(held_out: dict[str, str], count: int) -> list[Prompt]:
    """Excerpts of 12 to 60 whole lines, files in turn."""
    draw = random.Random(SEED)
    names = sorted(held_out)
    excerpts = []
    for index in range(count):
        name = names[index % len(names)]
        lines = held_out[name].split("\n")
        length = draw.randrange(12, 61)
        start = draw.randrange(max(1, len(lines) - length))
        text = "\n".join(lines[start : start + length]) + "\n"
        excerpts.append(Prompt("code", f"{name}:{start + 1}-{start + length}", text))
    return excerpts


def long_excerpts(held_out: dict[str, str]) -> list[Prompt]:
    """Beginnings of long held-out files, about 3000 tokens each."""
    names = ("configparser.py", "statistics.py", "ftplib.py")
    return [Prompt("long", f"{name}:1-", held_out[name][:9000]) for name in names]


def noise(count: int) -> list[Prompt]:
    """Random characters of the first two Unicode blocks, control characters included."""
    draw = random.Random(SEED)
    return [
        Prompt("noise", "random characters", "".join(chr(draw.randrange(1, 256)) for _ in range(96)))
        for _ in range(count)
    ]


def candidates(held_out: dict[str, str]) -> dict[str, list[Prompt]]:
    """More prompts of each kind than are used, so that near ties can be left out."""
    return {
        "code": code_excerpts(held_out, 72),
        "prose": [Prompt("prose", "written for this file", text) for text in PROSE],
        "repeat": [Prompt("repeat", f"{times} times", text * times) for text, times in REPEATED],
        "noise": noise(6),
        "long": long_excerpts(held_out),
    }
