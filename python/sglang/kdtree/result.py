# SPDX-License-Identifier: Apache-2.0
"""What every verb returns, and how it reaches the terminal or a file."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from sglang.kdtree.errors import EXIT_OK, KitError
from sglang.kdtree.optional import require


class Result(msgspec.Struct, kw_only=True):
    verb: str
    data: dict[str, Any]
    exit_code: int = EXIT_OK

    def document(self) -> dict[str, Any]:
        return {
            "schema": f"sglang.kdtree/{self.verb}/1",
            "exit_code": self.exit_code,
            **self.data,
        }


def new_table(columns: str, **options: Any) -> Any:
    """Of columns "a|b|c"; all but texts and verdicts stand to the right."""
    from rich.table import Table

    table = Table(**options)
    for name in columns.split("|"):
        left = name in (
            "text",
            "phase",
            "placement",
            "file",
            "mask",
            "verdict",
            "regime",
        )
        table.add_column(name, justify="left" if left else "right")
    return table


def dump_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=False, allow_nan=False)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=path.name, suffix=".tmp"
        )
        try:
            with os.fdopen(handle, "w") as file:
                file.write(dump_json(document) + "\n")
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise KitError(
            what=f"output file {path}",
            expected="a writable path",
            got=str(error),
            remedy="Name another file with --output.",
        ) from error


def read_json(path: Path, *, argument: str) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(
            what=f"{argument} {path}",
            expected="a readable JSON file",
            got=looks_of(path),
            remedy="Check the path.",
        ) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise KitError(
            what=f"{argument} {path}",
            expected="complete JSON",
            got=f"{error.msg} at line {error.lineno} column {error.colno} ({len(text)} characters read)",
            remedy="The file is damaged or was cut off: write it again.",
        ) from error


def looks_of(path: Path) -> str:
    """What a file of another kind is, for the words of an error: what it holds, or begins with."""
    try:
        with zipfile.ZipFile(path) as archive:
            return f"an archive of {', '.join(archive.namelist()[:3])}"
    except zipfile.BadZipFile:
        with path.open("rb") as file:
            return f"{path.stat().st_size} bytes that begin with {file.read(16)!r}"
    except OSError as error:
        return error.strerror or str(error)


def require_schema(document: Any, *, verb: str, source: str) -> dict[str, Any]:
    wanted = f"sglang.kdtree/{verb}/1"
    found = (
        document.get("schema")
        if isinstance(document, dict)
        else type(document).__name__
    )
    if found != wanted:
        raise KitError(
            what=source,
            expected=f'a document with "schema": "{wanted}"',
            got=repr(found),
            remedy=_written_by(verb),
        )
    from sglang.kdtree.schemas import SCHEMAS

    jsonschema = require("jsonschema", needed_for="reading documents of the kit")
    try:
        jsonschema.validate(document, SCHEMAS[verb])
    except jsonschema.ValidationError as error:
        raise KitError(
            what=f"{source}: {error.json_path}",
            expected=f"the form that `schema {verb}` prints",
            got=error.message[:200],
            remedy=_written_by(verb),
        ) from error
    return document


def _written_by(verb: str) -> str:
    words = verb.replace("-", " ", 1) if verb.startswith(("bench-", "probe-")) else verb
    return f"Write it with: python -m sglang.kdtree {words} --output FILE"
