# SPDX-License-Identifier: Apache-2.0
"""The description of one change in the sections of upstream's pull request template.

A table of measurements is never written by hand. `tables` of a change names what makes it and from which result file:

    tables = [{ maker = "benchmark/report.py:context", result = "benchmark/results/h200/mla_tree_verify.json" }]

The maker is a function of a Python file of this repository: the result file's contents, and `arguments` if the entry
has any, -> the table as Markdown.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import Refused

if TYPE_CHECKING:
    from .series import Change

NO_OUTPUT = "Not applicable: no output of a model changes."
NO_SPEED = "Not applicable: nothing on the path of a request on a GPU changes."


def pull_request(change: Change, files: list[str], root: Path) -> str:
    """Markdown: title, the template's sections, and a checklist that is filled in from what the change holds."""
    tests = [path for path in files if path.startswith("test/")]
    pages = [path for path in files if path.startswith("docs/")]
    tables = [table(entry, root) for entry in change.tables]
    speed = "\n\n".join(part for part in (change.speed.strip(), *tables) if part)
    sections = {
        "Motivation": change.motivation.strip(),
        "Modifications": change.description.strip(),
        "Accuracy Tests": change.accuracy.strip() or NO_OUTPUT,
        "Speed Tests and Profiling": speed or NO_SPEED,
        "Checklist": "\n".join(
            [
                item(True, "formatted and linted with the versions and settings of .pre-commit-config.yaml"),
                item(bool(tests), "unit tests: " + (", ".join(f"`{path}`" for path in tests) or "none of its own")),
                item(bool(pages), "documentation: " + (", ".join(f"`{path}`" for path in pages) or "none of its own")),
                item(bool(change.accuracy or tables), "accuracy and speed results, where the change can reach them"),
                item(True, "code style: names say what they are, no copies, comments give reasons"),
            ]
        ),
    }
    return f"# {change.title}\n\n" + "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items()) + "\n"


def item(done: bool, text: str) -> str:
    return f"- [{'x' if done else ' '}] {text}"


def table(entry: dict, root: Path) -> str:
    path, _, name = entry["maker"].partition(":")
    maker = getattr(module_at(root / path), name, None)
    if maker is None:
        raise Refused(f"series.toml: {entry['maker']}: no such function makes a table")
    try:
        data = json.loads((root / entry["result"]).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"series.toml: a table's result file: {error}") from None
    return f"From `{entry['result']}`:\n\n{maker(data, *entry.get('arguments', []))}"


@functools.cache
def module_at(path: Path) -> ModuleType:
    if not path.exists():
        raise Refused(f"series.toml: {path} makes a table and does not exist")
    spec = importlib.util.spec_from_file_location(f"overlay_table_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks up its annotations
    spec.loader.exec_module(module)
    return module
