# SPDX-License-Identifier: Apache-2.0
"""The size of the fork, its caps, and the edits that we would like to lose."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from .edits import num_lines
from .errors import Refused
from .plan import Plan
from .upstream import Pin


@dataclass(frozen=True)
class Delta:
    files: int
    lines: int
    edits: int
    modules: int
    inserted_lines: int


def measure(plan: Plan) -> Delta:
    return Delta(
        files=len(plan.own),
        lines=sum(path.read_bytes().count(b"\n") for path in plan.own.values()),
        edits=len(plan.edits),
        modules=len({edit.module for edit in plan.edits}),
        inserted_lines=sum(num_lines(edit.text) for edit in plan.edits),
    )


def line(plan: Plan, pin: Pin) -> str:
    """The line that the README shows."""
    size = measure(plan)
    return (
        f"Delta over {pin.name} {pin.version}: {size.files} files of ours ({size.lines} lines), "
        f"{size.edits} edits in {size.modules} upstream files ({size.inserted_lines} lines)."
    )


LINE = re.compile(r"^Delta over .*$", re.MULTILINE)


def write_line(document: Path, plan: Plan, pin: Pin) -> None:
    """Bring the document's one delta line up to date."""
    text, count = LINE.subn(lambda _: line(plan, pin), document.read_text(encoding="utf-8"))
    if count != 1:
        raise Refused(f"{document}: {count} lines start with 'Delta over', one is needed")
    document.write_text(text, encoding="utf-8")


def load_caps(fork: Path) -> dict[str, int]:
    return tomllib.loads((fork / "CAPS.toml").read_text(encoding="utf-8"))


def check_caps(plan: Plan, caps: dict[str, int]) -> None:
    size = asdict(measure(plan))
    advice = "make the delta smaller, or raise the cap in a commit of its own"
    over = [
        f"{name} is {size[name]}, the cap in CAPS.toml is {cap}: {advice}"
        for name, cap in caps.items()
        if size[name] > cap
    ]
    if over:
        raise Refused(*over)


def report(plan: Plan, pin: Pin, caps: dict[str, int]) -> str:
    size = asdict(measure(plan))
    lines = [line(plan, pin), ""]
    lines += [f"  {name:15} {size[name]:6} of at most {cap}" for name, cap in caps.items()]
    lines += ["", "Edits we would like to lose:"]
    for edit in plan.edits:
        lines += [
            f"  {edit.place}",
            f"    why      {edit.why}",
            f"    upstream {edit.upstream}",
            f"    until    {edit.retire_when}",
        ]
    return "\n".join(lines)
