# SPDX-License-Identifier: Apache-2.0
"""The fork as a series of patches for `git am` on the pinned upstream tree, one logical change each: series.toml."""

from __future__ import annotations

import os
import subprocess
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .edits import apply
from .errors import Refused
from .plan import Plan, make_plan
from .upstream import Pin, Wheel, pinned_wheel

SERIES = "series.toml"
AUTHOR = "kdtree <kdtree@users.noreply.github.com>"
DATE = "2020-01-01T00:00:00+0000"  # the same inputs give the same patches


@dataclass(frozen=True)
class Change:
    title: str
    motivation: str
    description: str
    files: list[str]  # of ours: paths or directories; a file belongs to the change that names it most exactly
    edits: list[str]  # names, as in Edit.name
    fix: bool  # of a plain upstream bug: means something to upstream without the rest of the series

    def message(self) -> str:
        def section(heading: str, text: str) -> str:
            return f"{heading}\n\n" + "\n\n".join(
                textwrap.fill(" ".join(p.split()), 72) for p in text.strip().split("\n\n")
            )

        parts = [self.title, section("Motivation", self.motivation), section("Modifications", self.description)]
        return "\n\n".join(parts) + "\n"


def load(fork: Path) -> list[Change]:
    path, changes, reasons = fork / SERIES, [], []
    for number, fields in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["change"], start=1):
        try:
            changes.append(Change(**{"files": [], "edits": [], "fix": False, **fields}))
        except TypeError as error:
            reasons.append(f"{SERIES}, change {number}: {str(error).partition('()')[2].strip() or error}")
    if reasons:
        raise Refused(*reasons)
    return changes


def assign(changes: list[Change], plan: Plan) -> list[tuple[Change, list[str], list[str]]]:
    """Each change with its files and edits; every file and edit belongs to exactly one change."""
    reasons = []
    files: dict[str, list[str]] = {change.title: [] for change in changes}
    owners: dict[str, list[str]] = {edit.name: [] for edit in plan.edits}
    for path in plan.own:
        matches = [(len(entry), change.title) for change in changes for entry in change.files if covers(entry, path)]
        best = [title for length, title in matches if length == max(matches)[0]]
        owners[path] = best
        for title in best:
            files[title].append(path)
    for change in changes:
        for entry in change.files:
            if not any(covers(entry, path) for path in plan.own):
                reasons.append(f"{SERIES}: {change.title!r} names {entry}, which is no file of ours")
        for name in change.edits:
            if name in owners:
                owners[name].append(change.title)
            else:
                reasons.append(f"{SERIES}: {change.title!r} names the edit {name}, which does not exist")
    for name, titles in owners.items():
        if not titles:
            reasons.append(f"{SERIES}: {name} is in no change: add it to one")
        if len(titles) > 1:
            reasons.append(f"{SERIES}: {name} is in {len(titles)} changes: {', '.join(titles)}")
    if reasons:
        raise Refused(*reasons)
    return [(change, files[change.title], change.edits) for change in changes]


def covers(entry: str, path: str) -> bool:
    return path == entry or path.startswith(entry.rstrip("/") + "/")


def check(fork: Path, plan: Plan) -> None:
    assign(load(fork), plan)


def write(fork: Path, pin: Pin, out: Path) -> list[Path]:
    return write_against(fork, pinned_wheel(pin), out)


def write_against(fork: Path, wheel: Wheel, out: Path) -> list[Path]:
    """Commit the changes one by one on the touched part of upstream's tree and let git format the patches."""
    plan = make_plan(fork, wheel)
    steps = assign(load(fork), plan)
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("[0-9][0-9][0-9][0-9]-*.patch"):
        stale.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        git(tree, "init", "--quiet")
        for module in plan.edited:
            put(tree / module, wheel.read(module))
        commit(tree, "upstream", allow_empty=True)
        done: set[str] = set()
        for change, files, edits in steps:
            done.update(edits)
            for path in files:
                put(tree / path, plan.own[path].read_bytes())
            for module in {name.partition(":")[0] for name in edits}:
                chosen = [edit for edit in plan.edits if edit.module == module and edit.name in done]
                put(tree / module, apply(module, wheel.read(module).decode(), chosen).encode())
            commit(tree, change.message())
        options = ["--quiet", "--zero-commit", "--no-signature", "--numbered", "--full-index", "--binary"]
        git(
            tree, "format-patch", *options, "--root", "HEAD", f"-{len(steps)}", "--output-directory", str(out.resolve())
        )
    return sorted(out.glob("[0-9][0-9][0-9][0-9]-*.patch"))


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def commit(tree: Path, message: str, *, allow_empty: bool = False) -> None:
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--message", message, *(["--allow-empty"] if allow_empty else []))


def git(tree: Path, *arguments: str) -> None:
    name, _, address = AUTHOR.partition(" <")
    identity = {}
    for who in ("AUTHOR", "COMMITTER"):
        identity |= {f"GIT_{who}_NAME": name, f"GIT_{who}_EMAIL": address.rstrip(">"), f"GIT_{who}_DATE": DATE}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment = clean | identity | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    result = subprocess.run(["git", "-C", str(tree), *arguments], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise Refused(f"git {arguments[0]} failed: {result.stderr.strip() or result.stdout.strip()}")
