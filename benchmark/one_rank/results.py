# SPDX-License-Identifier: Apache-2.0
"""The result file: its header, its rows, and the check that a file is one."""

from __future__ import annotations

import json
from pathlib import Path

from .shapes import ACCEPT_LENGTHS, ARMS

FORMAT = "one_rank-1"
HEADER_KEYS = {
    "format": str,
    "date": str,
    "commit": str,
    "device": str,
    "gpu": (dict, type(None)),
    "versions": dict,
    "scale": str,
    "model": dict,
}
ROW_KEYS = {
    "arm": str,
    "context": int,
    "s_q": int,
    "kv_dtype": str,
    "page_size": int,
    "graphs": bool,
    "ms_per_step_p20": (int, float),
    "ms_per_step_p50": (int, float),
    "ms_per_step_p80": (int, float),
    "steps": int,
    "accept_length": (int, float),
    "cached_tokens": int,
    "first_chunk_s": (int, float),
    "tok_s": dict,
}
MISSING_KEYS = {"arm": str, "s_q": int, "reason": str}


def key_of(row: dict) -> tuple:
    return tuple(row[name] for name in ("arm", "s_q", "context", "kv_dtype", "page_size"))


def problems(data: dict) -> list[str]:
    """What is wrong with a result file; empty when it is one."""
    found: list[str] = []

    def check(what: str, item: dict, keys: dict) -> None:
        for key, kind in keys.items():
            if key not in item:
                found.append(f"{what}: no '{key}'")
            elif not isinstance(item[key], kind) or (isinstance(item[key], bool) and kind is not bool):
                found.append(f"{what}: '{key}' is {item[key]!r}")

    if not isinstance(data, dict) or not isinstance(data.get("header"), dict) or not isinstance(data.get("rows"), list):
        return ["not a result file: expected an object with 'header' and 'rows'"]
    check("header", data["header"], HEADER_KEYS)
    if data["header"].get("format") != FORMAT:
        found.append(f"header: format {data['header'].get('format')!r}, expected {FORMAT!r}")
    seen = set()
    for i, row in enumerate(data["rows"]):
        before = len(found)
        check(f"row {i}", row, ROW_KEYS)
        if len(found) > before:
            continue
        if row["arm"] not in ARMS:
            found.append(f"row {i}: no arm {row['arm']!r}")
        if not 0 < row["ms_per_step_p20"] <= row["ms_per_step_p50"] <= row["ms_per_step_p80"]:
            found.append(f"row {i}: percentiles are not 0 < p20 <= p50 <= p80")
        for accept in ACCEPT_LENGTHS:
            stated, follows = row["tok_s"].get(str(accept), -1), 1e3 * accept / max(row["ms_per_step_p50"], 1e-9)
            if abs(stated - follows) > 0.01 + 1e-3 * follows:
                found.append(f"row {i}: tok_s at {accept} does not follow from ms_per_step_p50")
        if row["cached_tokens"] < 0.9 * row["context"] - 64:
            found.append(f"row {i}: only {row['cached_tokens']} of {row['context']} tokens were there: another context")
        if key_of(row) in seen:
            found.append(f"row {i}: {key_of(row)} occurs twice")
        seen.add(key_of(row))
    for i, missing in enumerate(data.get("not_available", [])):
        check(f"not_available {i}", missing, MISSING_KEYS)
    return found


def load(path: Path) -> dict:
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
