# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a reader to type, and how a test takes it from there instead of from a copy."""

import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Four spaces behind an empty line, outside of a list: a block too.
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}\S.*\n+)+)")
INLINE = re.compile(r"`([^`\n]+)`")
CONTINUED = re.compile(r"\\\n\s*")
COMMENT = re.compile(r"(^|\s)#.*")
VARIABLE = re.compile(r"[A-Z_0-9]+=.*", re.DOTALL)
SHELL = ("", "bash", "sh", "shell", "console", "shellsession", "zsh")
# A code span is a command if it begins with one of these and says more.
PROGRAMS = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:\S*/)?python[\d.]*|make|bash|pip|pytest|docker|git|gh|gpg|cosign|sha256sum|curl|systemctl|"
    r"actionlint|sglang|(?:tools|scripts)/\S+) +\S"
)


def tracked_files() -> list[Path]:
    """As they are now, new ones included. On a host where the tree has no repository: all but what tools leave."""
    names = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(names, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    found = (path for path in ROOT.rglob("*") if path.is_file())
    left = {"__pycache__", "build", "out", "dist"}
    return [f for f in found if not any(part[0] == "." or part in left for part in f.relative_to(ROOT).parts)]


def documents() -> list[Path]:
    return sorted(path for path in tracked_files() if path.suffix in (".md", ".mdx"))


def lines_of_blocks(text: str) -> list[str]:
    """One string for each command line of the blocks, continued lines joined, without comments."""
    blocks = [block for _, language, block in FENCE.findall(text) if language in SHELL]
    blocks += [re.sub("^    ", "", block, flags=re.MULTILINE) for block in INDENTED.findall(FENCE.sub("", text))]
    found = []
    for block in blocks:
        lines = CONTINUED.sub(" ", block).split("\n")
        if any(line.strip().startswith("$ ") for line in lines):
            # What is typed stands behind "$ "; of what comes out, only a command that is offered is one.
            lines = [
                line.strip().removeprefix("$ ") for line in lines if re.match(r" *\$ |    (curl|python|make) ", line)
            ]
        found += in_their_folder(COMMENT.sub("", line).strip() for line in lines)
    return found


def in_their_folder(lines: Iterable[str]) -> Iterator[str]:
    """A line that only changes the folder holds for those behind it."""
    folder = ""
    for line in lines:
        if re.fullmatch(r"cd \S+", line):
            folder = f"{line} && "
        elif re.match(r"[\w./]", line) and not line.startswith("..."):
            yield folder + line


def lines_of_prose(text: str) -> list[str]:
    return [span for span in INLINE.findall(INDENTED.sub("", FENCE.sub("", text))) if PROGRAMS.match(span)]


def command_lines(document: Path) -> list[str]:
    """Every line that a reader can type, in the order of the document's blocks, then of its prose."""
    text = document.read_text()
    return list(dict.fromkeys(lines_of_blocks(text) + lines_of_prose(text)))


def parts(line: str) -> list[list[str]]:
    """Words of each program that a line runs, without variables that are set for it."""
    found = []
    for part in re.split(r"&&|\||;", re.sub(r">+ *\S+", "", line)):
        words = shlex.split(part)
        while words and VARIABLE.fullmatch(words[0]):
            del words[0]
        if words:
            found.append(words)
    return found


def typed(line: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What subprocess needs to run a line as a reader's shell does, its messages among its output. A pipe fails with
    any of its parts."""
    return {
        "args": ["bash", "-e", "-o", "pipefail", "-c", line],
        "cwd": folder,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }


def documented(document: str, beginning: str) -> list[str]:
    """The words of the one command of a document that is or begins so; a test that calls this runs what is there.

    test_commands.py finds such calls, both arguments being literal, and takes the line for run. ValueError: the
    document has no such command, or several.
    """
    begin = shlex.split(beginning)
    found = [w for line in command_lines(ROOT / document) for w in parts(line) if w[: len(begin)] == begin]
    found = [words for words in found if words == begin] or found
    if len(found) != 1:
        raise ValueError(f"{document} has {len(found)} commands that begin with {beginning!r}, expected 1")
    return found[0]
