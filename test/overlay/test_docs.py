# SPDX-License-Identifier: Apache-2.0
"""The documents name what exists: paths, make targets and flags of our tools."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = {path.name for path in ROOT.iterdir()}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
WORD = re.compile(r"[\w.{}*/-]+")


def documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split()] or sorted(ROOT.glob("*.md"))


def named_paths(document: Path) -> set[str]:
    """What looks like a path of this repository: in links, in inline code, and in blocks of commands."""
    text = document.read_text()
    found = {target for target in LINK.findall(text) if "://" not in target}
    code = [match for match in INLINE.findall(FENCE.sub("", text))] + FENCE.findall(text)
    for snippet in code:
        for word in WORD.findall(snippet):
            first = word.removeprefix("./").split("/")[0]
            if "/" in word and first in TOP and not re.search(r"[{}*]", word):
                found.add(word.removeprefix("./"))
    return found


def exists(document: Path, name: str) -> bool:
    return any((base / name).exists() for base in (ROOT, document.parent))


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_exists(document):
    generated = ("build", "out", "bundle", "dist", "patches")
    missing = [
        name
        for name in named_paths(document)
        if not exists(document, name) and not set(Path(name).parts) & set(generated)
    ]
    assert missing == []


def test_the_readme_names_paths(tmp_path):
    """The finder finds: a missing file in a link, in code or in a command is seen."""
    assert {"python/UPSTREAM.toml", "sgl-kernel-sm120/", "python/constraints-cpu.txt"} <= named_paths(
        ROOT / "README.md"
    )
    page = tmp_path / "page.md"
    page.write_text("[a](gone.md) `test/gone.py`\n```\npython scripts/gone.py\n```\n")
    assert {name for name in named_paths(page) if not exists(page, name)} == {
        "gone.md",
        "test/gone.py",
        "scripts/gone.py",
    }


def test_every_make_target_in_a_document_exists():
    rules = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in documents():
        snippets = " ; ".join(INLINE.findall(document.read_text()) + FENCE.findall(document.read_text()))
        used = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z][a-z-]*)\b", snippets))
        assert used <= rules, document


def test_every_overlay_command_in_a_document_exists():
    from overlay.__main__ import parser

    known = parser()._subparsers._group_actions[0].choices
    for document in documents():
        used = set(re.findall(r"python -m overlay ([a-z]+)", document.read_text()))
        assert used <= set(known), document
