# SPDX-License-Identifier: Apache-2.0
"""Phase one: the whole fork resolved against one upstream wheel, or every reason why not; nothing is written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .edits import Edit, apply, load_edits
from .errors import Refused
from .upstream import Wheel

FORK = Path(__file__).resolve().parent.parent  # python/: UPSTREAM.toml, edits/, sglang/
NOT_SHIPPED = "__pycache__"  # and what is hidden: caches of tools


@dataclass(frozen=True)
class Plan:
    own: dict[str, Path]  # path in the wheel -> our file
    edited: dict[str, bytes]  # path in the wheel -> upstream's module with our edits
    edits: list[Edit]

    def files(self) -> dict[str, bytes]:
        return {path: source.read_bytes() for path, source in self.own.items()} | self.edited


def own_files(fork: Path) -> dict[str, Path]:
    root = fork / "sglang"
    paths = sorted(path for path in root.rglob("*") if path.is_file() and is_source(path.relative_to(root)))
    return {path.relative_to(fork).as_posix(): path for path in paths}


def is_source(path: Path) -> bool:
    return not any(part == NOT_SHIPPED or part.startswith(".") for part in path.parts)


def make_plan(fork: Path, wheel: Wheel, *, without: Collection[str] = (), signed: bool = True) -> Plan:
    """`without` names edits to leave out, as the tests do that show each edit is needed."""
    reasons = []
    own = own_files(fork)
    for path in own:
        if path in wheel.names:
            reasons.append(f"{path}: shadows an upstream file: give ours another name, or make an edit of it")
        reasons += package_complaints(path, own, wheel)
    try:
        edits = load_edits(fork / "edits")
    except Refused as refusal:
        reasons += refusal.reasons
        edits = []
    unknown = set(without) - {edit.name for edit in edits}
    reasons += [f"{name}: there is no such edit to leave out" for name in sorted(unknown)]
    by_module: dict[str, list[Edit]] = {}
    for edit in edits:
        by_module.setdefault(edit.module, [])
        if edit.name not in without:
            by_module[edit.module].append(edit)
    edited = {}
    for module, its_edits in by_module.items():
        if module not in wheel.names:
            reasons.append(
                f"{module}: upstream {wheel.version} has no such module: find where it moved and move the TOML"
            )
            continue
        try:
            edited[module] = apply(module, wheel.read(module).decode(), its_edits, signed=signed).encode()
        except Refused as refusal:
            reasons += refusal.reasons
    if reasons:
        raise Refused(*reasons)
    return Plan(own, edited, edits)


def package_complaints(path: str, own: dict[str, Path], wheel: Wheel) -> list[str]:
    """Upstream has directories without __init__.py; a directory of ours with Python files in it needs one."""
    folder = path.rpartition("/")[0]
    known = any(name.startswith(folder + "/") for name in wheel.names)
    if path.endswith(".py") and not known and f"{folder}/__init__.py" not in own:
        return [f"{path}: its new package {folder} has no __init__.py"]
    return []
