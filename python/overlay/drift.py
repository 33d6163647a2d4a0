# SPDX-License-Identifier: Apache-2.0
"""What another upstream release would change for us: per edit, for what our files use, and files it would shadow."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from . import uses
from .edits import Edit, Module, load_edits, resolve, scope_and_hash
from .errors import Refused
from .plan import own_files
from .upstream import Pin, Wheel, obtain, pinned_wheel, published

ADVICE = {
    "unchanged": "nothing to do",
    "symbol changed": "review the difference; if the edit still says what it should, `sign` it after the bump",
    "anchor lost": "the code it named is gone or doubled: give the edit another anchor, or retire it",
    "module gone": "find where the module went and move the TOML, or retire the edit",
}


def report(fork: Path, pin: Pin, version: str) -> tuple[str, bool]:
    """(text, whether a bump to `version` would need no work). `newest` and `previous`, the one before the pin, are
    versions, too."""
    pinned = pinned_wheel(pin)
    if version in ("newest", "previous"):
        version = named(version, pin, published(pin.name))
    return compare(fork, pinned, Wheel(obtain(pin.name, version)))


def named(name: str, pin: Pin, versions: list[str]) -> str:
    """versions: what is published, newest first"""
    if name == "newest":
        return versions[0]
    older = versions[versions.index(pin.version) + 1 :] if pin.version in versions else []
    if not older:
        raise Refused(f"nothing older than {pin.version} is published; there is {', '.join(versions)}")
    return older[0]


def compare(fork: Path, pinned: Wheel, newer: Wheel) -> tuple[str, bool]:
    lines, clean = [f"{pinned.distribution} {pinned.version} -> {newer.version}"], True
    for edit in load_edits(fork / "edits"):
        verdict, detail = judge(edit, pinned, newer)
        clean &= verdict == "unchanged"
        lines.append(f"{verdict:14} {edit.place}")
        if verdict != "unchanged":
            lines += [f"    {ADVICE[verdict]}", *(f"    {line}" for line in detail)]
    shadowed = sorted(path for path in own_files(fork) if path in newer.names)
    lines += [
        f"shadowed       {path}\n    upstream has a file there now: retire ours, or rename it" for path in shadowed
    ]
    lost, changed = uses.compare(own_files(fork), pinned, newer)
    lines += [*lost, *changed]
    clean &= not shadowed and not lost
    lines.append("no work needed" if clean else "work needed")
    return "\n".join(lines), clean


def judge(edit: Edit, pinned: Wheel, newer: Wheel) -> tuple[str, list[str]]:
    if edit.module not in newer.names:
        same_name = [name for name in sorted(newer.names) if name.endswith("/" + edit.module.rpartition("/")[2])]
        return "module gone", [f"a file of that name: {name}" for name in same_name]
    module = Module(edit.module, newer.read(edit.module).decode())
    try:
        resolve(module, edit, signed=False)
        sha = scope_and_hash(module, edit)[1]
    except Refused as refusal:
        return "anchor lost", refusal.reasons + difference(edit, pinned, newer)
    if sha == edit.symbol_sha:
        return "unchanged", []
    return "symbol changed", difference(edit, pinned, newer)


def difference(edit: Edit, pinned: Wheel, newer: Wheel) -> list[str]:
    """Unified diff of the symbol; of the module where the symbol itself is gone."""
    texts = [symbol_text(edit, wheel) for wheel in (pinned, newer)]
    if None in texts:
        texts = [wheel.read(edit.module).decode() for wheel in (pinned, newer)]
    one, two = (text.split("\n") for text in texts)
    return list(difflib.unified_diff(one, two, pinned.version, newer.version, lineterm="", n=2))


def symbol_text(edit: Edit, wheel: Wheel) -> str | None:
    module = Module(edit.module, wheel.read(edit.module).decode())
    try:
        scope, _ = scope_and_hash(module, edit)
    except Refused:
        return None
    return module.text if isinstance(scope, ast.Module) else module.source(scope)
