# SPDX-License-Identifier: Apache-2.0
"""Text to read: code and prose that every Python carries, and a predictable phrase. No network.

A prompt starts with a line that no other prompt has, so that no prefix of it can be in a cache.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from sglang.kdtree.errors import KitError

KINDS = ("code", "prose", "phrase")
PHRASE = "The cat sat on the mat. "
TASK = {
    "code": "\n\n# Continue with the next function of this module.\n",
    "prose": "\n\nExplain in your own words what the text above says, point by point.\n",
    "phrase": "",
}
_SKIPPED_FOLDERS = set(
    "test tests idlelib lib2to3 site-packages dist-packages encodings pydoc_data __pycache__".split()
)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    text: str

    def window(self, *, start: int, length: int) -> str:
        """length characters from start on, going round at the end."""
        offset = start % len(self.text)
        repeats = (offset + length) // len(self.text) + 1
        text = self.text * repeats if repeats > 1 else self.text
        return text[offset : offset + length]


@functools.cache
def load_source(kind: str) -> Source:
    if kind == "phrase":
        return Source(kind=kind, text=PHRASE)
    text = "".join(_code_files()) if kind == "code" else "\n\n".join(_prose_texts())
    if len(text) < 10_000:
        raise KitError(
            what=f"--text {kind}",
            expected="at least 10,000 characters of it beside this Python",
            got=f"{len(text)} characters",
            remedy="This Python is stripped. Use --text phrase, or a Python with its standard library's sources.",
        )
    return Source(kind=kind, text=text)


def _code_files() -> Sequence[str]:
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def _prose_texts() -> Sequence[str]:
    """The language reference that pydoc carries, then the descriptions and licences of installed packages."""
    from pydoc_data import topics

    texts = [topics.topics[name] for name in sorted(topics.topics)]
    for distribution in sorted(
        metadata.distributions(), key=lambda d: (d.metadata["Name"] or "").lower()
    ):
        texts.append(distribution.metadata.get_payload() or "")
    return [text for text in texts if text.strip()]


def build_prompt(
    source: Source, *, characters: int, seed: int, repeat: int, nonce: str
) -> str:
    """A prompt of about this many characters. seed and repeat choose the text, nonce the first line."""
    first_line = f"[{nonce}]\n"
    task = TASK[source.kind]
    start = 0 if source.kind == "phrase" else _start(source, seed=seed, repeat=repeat)
    body = source.window(
        start=start, length=max(1, characters - len(first_line) - len(task))
    )
    return first_line + body + task


def _start(source: Source, *, seed: int, repeat: int) -> int:
    digest = hashlib.sha256(f"{seed}/{repeat}/{source.kind}".encode()).hexdigest()
    return int(digest[:8], 16) % len(source.text)


def nonce_for(*, run: str, kind: str, context: int, repeat: int) -> str:
    """Different for every prompt of every run, of one length, so that no two prompts share a prefix."""
    return hashlib.sha256(f"{run}/{kind}/{context}/{repeat}".encode()).hexdigest()[:16]


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def distinct_ngrams(items: Sequence, *, n: int = 4) -> float | None:
    """Share of different n-grams among all: 1 for text that never repeats, near 0 for a loop."""
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
