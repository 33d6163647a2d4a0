# SPDX-License-Identifier: Apache-2.0
"""Write `symbol_sha` into the edits: the statement that somebody looked at the symbol in the pinned release."""

from __future__ import annotations

import re
from pathlib import Path

from .edits import Edit, Module, load_edits, scope_and_hash
from .errors import Refused
from .upstream import Wheel

HEADER = re.compile(r"^\[\[edit\]\]\s*$", re.MULTILINE)
SIGNATURE = re.compile(r"^symbol_sha\s*=.*$", re.MULTILINE)


def sign(fork: Path, wheel: Wheel) -> list[str]:
    """-> one line for each edit whose signature changed."""
    changed, reasons, texts = [], [], {}
    for edit in load_edits(fork / "edits"):
        try:
            if edit.module not in wheel.names:
                raise Refused(f"upstream {wheel.version} has no such module")
            sha = scope_and_hash(Module(edit.module, wheel.read(edit.module).decode()), edit)[1]
        except Refused as refusal:
            reasons += [f"{edit.place}: {reason}" for reason in refusal.reasons]
            continue
        if sha != edit.symbol_sha:
            path = toml_of(fork, edit)
            texts[path] = put_signature(texts.get(path) or path.read_text(encoding="utf-8"), edit.number, sha)
            changed.append(f"{edit.place}: {edit.symbol_sha or 'unsigned'} -> {sha}")
    if reasons:
        raise Refused(*reasons)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return changed


def toml_of(fork: Path, edit: Edit) -> Path:
    return fork / "edits" / (edit.module.removeprefix("sglang/") + ".toml")


def put_signature(text: str, number: int, sha: str) -> str:
    """Comments and layout of the file stay as they are."""
    starts = [match.start() for match in HEADER.finditer(text)] + [len(text)]
    begin, end = starts[number - 1], starts[number]
    block, line = text[begin:end], f'symbol_sha = "{sha}"'
    if SIGNATURE.search(block):
        block = SIGNATURE.sub(line, block)
    else:
        body = block.rstrip("\n")
        block = f"{body}\n{line}\n" + block[len(body) + 1 :]
    return text[:begin] + block + text[end:]
