# SPDX-License-Identifier: Apache-2.0
"""The result file: its header, its rows, and the check that a file is one."""

from __future__ import annotations

from pathlib import Path

from verify_bench import result_file
from verify_bench.result_file import save as save

from .shapes import ACCEPT_LENGTHS, ARMS

FORMAT = "one_rank-1"
HEADER_KEYS = result_file.HEADER_KEYS | {"scale": str, "model": dict, "draft_window": int}
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
    """Of several ranks also these."""
    own = tuple(row[name] for name in ("arm", "s_q", "context", "kv_dtype", "page_size"))
    return own + (row["ranks"], row["custom_all_reduce"]) if "custom_all_reduce" in row else own


def problems(data: dict) -> list[str]:
    """What is wrong with a result file; empty when it is one."""
    found, rows = result_file.field_problems(
        data, format=FORMAT, header_keys=HEADER_KEYS, row_keys=ROW_KEYS, missing_keys=MISSING_KEYS
    )
    seen = set()
    for i, row in rows:
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
    return found


def load(path: Path) -> dict:
    return result_file.load(path, problems)
