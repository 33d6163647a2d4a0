# SPDX-License-Identifier: Apache-2.0
"""The size of the fork, its caps, and the edits that we would like to lose."""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
        inserted_lines=sum(len(edit.text.splitlines()) for edit in plan.edits),
    )


def line(plan: Plan, pin: Pin) -> str:
    """The line that the README shows."""
    size = measure(plan)
    return (
        f"Delta over {pin.name} {pin.version}: {size.files} files of ours ({size.lines} lines), "
        f"{size.edits} edits in {size.modules} upstream files ({size.inserted_lines} lines)."
    )


def over_caps(size: Delta, pin: Pin) -> list[str]:
    measured = asdict(size)
    return [
        f"{name} is {measured[name]}, the cap in UPSTREAM.toml is {cap}: make the delta smaller, or raise the cap in a commit of its own"
        for name, cap in pin.caps.items()
        if measured[name] > cap
    ]


def report(plan: Plan, pin: Pin) -> str:
    size = asdict(measure(plan))
    lines = [line(plan, pin), ""]
    lines += [f"  {name:15} {size[name]:6} of at most {cap}" for name, cap in pin.caps.items()]
    lines += ["", "Edits we would like to lose:"]
    for edit in plan.edits:
        lines += [f"  {edit.place}", f"    why      {edit.why}", f"    upstream {edit.upstream}", f"    until    {edit.retire_when}"]
    return "\n".join(lines)
