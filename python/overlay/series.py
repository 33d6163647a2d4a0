# SPDX-License-Identifier: Apache-2.0
"""The fork as a series of patches for `git am` on upstream's repository at the pinned release: series.toml.

One logical change each, with a description in upstream's pull request template beside it. The paths are those of
upstream's repository: `python/sglang/` for the package, `test/registered/` for the tests that upstream would run,
`docs/docs/` for its documentation.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from . import description
from .edits import apply
from .errors import Refused
from .plan import Plan, is_source, make_plan
from .upstream import Pin, Wheel, pinned_wheel

SERIES = "series.toml"
AUTHOR = "kdtree <kdtree@users.noreply.github.com>"
DATE = "2020-01-01T00:00:00+0000"  # the same inputs give the same patches
PACKAGE = "python/"  # where upstream's repository holds what its wheel holds at the top
TESTS, PAGES, PAGES_UPSTREAM = "test/registered", "docs/upstream", "docs/docs"
WRITTEN = ("[0-9][0-9][0-9][0-9]-*.patch", "[0-9][0-9][0-9][0-9]-*.md")


@dataclass(frozen=True)
class Change:
    title: str
    motivation: str
    description: str
    files: list[str] = field(default_factory=list)  # paths or directories; a file belongs to what names it most exactly
    edits: list[str] = field(default_factory=list)  # names, as in Edit.name
    fix: bool = False  # of a plain upstream bug: means something to upstream without the rest of the series
    accuracy: str = ""  # what shows that outputs are right; empty: the change cannot reach them
    speed: str = ""  # likewise
    tables: list[dict] = field(default_factory=list)  # of measurements, see description.py

    def message(self) -> str:
        def section(heading: str, text: str) -> str:
            return f"{heading}\n\n" + "\n\n".join(
                textwrap.fill(" ".join(p.split()), 72) for p in text.strip().split("\n\n")
            )

        parts = [self.title, section("Motivation", self.motivation), section("Modifications", self.description)]
        return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Step:
    """A change with what belongs to it."""

    change: Change
    files: list[str]  # as series.toml and Plan.own name them
    edits: list[str]


def load(fork: Path) -> list[Change]:
    path, changes, reasons = fork / SERIES, [], []
    for number, fields in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["change"], start=1):
        try:
            changes.append(Change(**fields))
        except TypeError as error:
            reasons.append(f"{SERIES}, change {number}: {str(error).partition('()')[2].strip() or error}")
    if reasons:
        raise Refused(*reasons)
    return changes


def own_files(fork: Path, plan: Plan) -> dict[str, Path]:
    """Every file that the series adds: of the package, and beside it in this repository."""
    found, root = dict(plan.own), fork.parent
    for folder, pattern in ((TESTS, "*.py"), (PAGES, "*.mdx")):
        for path in sorted((root / folder).rglob(pattern)):
            if path.name != "conftest.py" and is_source(path.relative_to(root)):
                found[path.relative_to(root).as_posix()] = path
    return found


def upstream_path(name: str) -> str:
    """Where a file lies in upstream's repository."""
    if name.startswith("sglang/"):
        return PACKAGE + name
    return PAGES_UPSTREAM + name.removeprefix(PAGES) if name.startswith(PAGES + "/") else name


def assign(changes: list[Change], own: dict[str, Path], plan: Plan) -> list[Step]:
    """Each change with its files and edits; every file and edit belongs to exactly one change."""
    reasons = []
    files: dict[str, list[str]] = {change.title: [] for change in changes}
    owners: dict[str, list[str]] = {edit.name: [] for edit in plan.edits}
    for path in own:
        matches = [(len(entry), change.title) for change in changes for entry in change.files if covers(entry, path)]
        best = [title for length, title in matches if length == max(matches)[0]]
        owners[path] = best
        for title in best:
            files[title].append(path)
    for change in changes:
        for entry in change.files:
            if not any(covers(entry, path) for path in own):
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
    return [Step(change, files[change.title], change.edits) for change in changes]


def covers(entry: str, path: str) -> bool:
    return path == entry or path.startswith(entry.rstrip("/") + "/")


def steps_of(fork: Path, plan: Plan) -> list[Step]:
    return assign(load(fork), own_files(fork, plan), plan)


def check(fork: Path, plan: Plan) -> None:
    steps_of(fork, plan)


def write(fork: Path, pin: Pin, out: Path) -> list[Path]:
    return write_against(fork, pinned_wheel(pin), out)


def contents(fork: Path, plan: Plan, wheel: Wheel, steps: list[Step]) -> list[dict[str, bytes]]:
    """For each step what its patch writes: path in upstream's repository -> the file after it."""
    own, done, written = own_files(fork, plan), set(), []
    for step in steps:
        done.update(step.edits)
        files = {upstream_path(path): own[path].read_bytes() for path in step.files}
        for module in sorted({name.partition(":")[0] for name in step.edits}):
            chosen = [edit for edit in plan.edits if edit.module == module and edit.name in done]
            files[PACKAGE + module] = apply(module, wheel.read(module).decode(), chosen).encode()
        written.append(files)
    return written


def write_against(fork: Path, wheel: Wheel, out: Path) -> list[Path]:
    """Commit the changes one by one on the touched part of upstream's tree and let git format the patches."""
    plan = make_plan(fork, wheel)
    steps = steps_of(fork, plan)
    bodies = [
        description.pull_request(step.change, [upstream_path(path) for path in step.files], fork.parent)
        for step in steps
    ]
    out.mkdir(parents=True, exist_ok=True)
    for pattern in WRITTEN:
        for stale in out.glob(pattern):
            stale.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        git(tree, "init", "--quiet")
        for module in plan.edited:
            put(tree / PACKAGE / module, wheel.read(module))
        commit(tree, "upstream", allow_empty=True)
        for step, files in zip(steps, contents(fork, plan, wheel, steps), strict=True):
            for path, data in files.items():
                put(tree / path, data)
            commit(tree, step.change.message())
        options = ["--quiet", "--zero-commit", "--no-signature", "--numbered", "--full-index", "--binary"]
        git(
            tree, "format-patch", *options, "--root", "HEAD", f"-{len(steps)}", "--output-directory", str(out.resolve())
        )
    patches = sorted(out.glob(WRITTEN[0]))
    for patch, body in zip(patches, bodies, strict=True):
        patch.with_suffix(".md").write_text(body, encoding="utf-8")
    return patches


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
