# SPDX-License-Identifier: Apache-2.0
"""What the result files of all benchmarks with rows share: a header, rows, and what could not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

# Of a header: what was measured where, and with what.
HEADER_KEYS = {
    "format": str,
    "date": str,
    "commit": str,
    "device": str,
    "gpu": (dict, type(None)),
    "versions": dict,
}


def field_problems(
    data: object, *, format: str, header_keys: dict, row_keys: dict, missing_keys: dict
) -> tuple[list[str], list[tuple[int, dict]]]:
    """What is wrong with the fields of a file, and its rows (with their numbers) whose fields are all there and of
    their types. The keys map a name to the type or types that isinstance takes."""
    found: list[str] = []

    def check(what: str, item: dict, keys: dict) -> bool:
        before = len(found)
        for key, kind in keys.items():
            if key not in item:
                found.append(f"{what}: no '{key}'")
            elif not isinstance(item[key], kind) or (isinstance(item[key], bool) and kind is not bool):
                found.append(f"{what}: '{key}' is {item[key]!r}")
        return len(found) == before

    if not isinstance(data, dict) or not isinstance(data.get("header"), dict) or not isinstance(data.get("rows"), list):
        return ["not a result file: expected an object with 'header' and 'rows'"], []
    check("header", data["header"], header_keys)
    if data["header"].get("format") != format:
        found.append(f"header: format {data['header'].get('format')!r}, expected {format!r}")
    rows = [(i, row) for i, row in enumerate(data["rows"]) if check(f"row {i}", row, row_keys)]
    for i, missing in enumerate(data.get("not_available", [])):
        check(f"not_available {i}", missing, missing_keys)
    return found, rows


def load(path: Path, problems: Callable[[dict], list[str]]) -> dict:
    """ValueError with the first of the problems, if there are any."""
    data = json.loads(path.read_text())
    found = problems(data)
    if found:
        raise ValueError(f"{path}: " + "; ".join(found[:5]))
    return data


def save(path: Path, data: dict) -> None:
    """One line a row, so that a diff of two runs can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["{", f'"header": {json.dumps(data["header"], indent=1)},']
    for key in ("rows", "not_available"):
        body = ",\n".join(json.dumps(item) for item in data.get(key, []))
        lines.append(f'"{key}": [\n{body}\n]' + ("," if key == "rows" else ""))
    lines.append("}")
    path.write_text("\n".join(lines) + "\n")
