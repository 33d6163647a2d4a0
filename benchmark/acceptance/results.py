# SPDX-License-Identifier: Apache-2.0
"""The result file of the acceptance study."""

from __future__ import annotations

import json
from pathlib import Path

from . import ROW_COSTS

FORMAT = "acceptance-1"
ENGINE_FORMAT = "acceptance-engine-1"
COMMIT_LENGTH_SCHEMA = "sglang.kdtree/probe-commit-length/1"  # of the runs in a file that has no format of its own
TEMPERATURES = ("0", "1")


def entry(tally) -> dict:
    """tally: a walk.Tally"""
    return {
        "tokens": tally.tokens,
        "steps": tally.steps,
        "rows": tally.rows,
        "accept_length": round(tally.tokens / tally.steps, 3),
        "rows_per_token": round(tally.rows / tally.tokens, 3),
        # Tokens per unit of time, by the cost of a row; a step of one row takes 1.
        "speed": {f"{c:g}": round(tally.tokens / tally.cost[c], 4) for c in ROW_COSTS},
    }


def load(path: Path) -> dict:
    """Refuses a file that is not consistent with itself."""
    data = json.loads(Path(path).read_text())
    if data["header"]["format"] != FORMAT:
        raise ValueError(f"{path}: format {data['header']['format']!r}, expected {FORMAT!r}")
    for temperature in TEMPERATURES:
        for kind, ways in data["walks"][temperature].items():
            totals = {way["tokens"] for way in ways.values()}
            if len(totals) != 1:
                raise ValueError(f"{path}: T = {temperature}, {kind}: answers differ: {sorted(totals)} tokens")
            for name, way in ways.items():
                for key, value in (("accept_length", way["steps"]), ("rows_per_token", way["tokens"])):
                    top = way["tokens"] if key == "accept_length" else way["rows"]
                    if abs(way[key] - top / value) > 1e-3:
                        raise ValueError(f"{path}: T = {temperature}, {kind}, {name}: {key} is {way[key]}")
    return data


def load_engine(path: Path) -> dict:
    """Of real Engines. Refuses a file that is not consistent with itself."""
    data = json.loads(Path(path).read_text())
    if data["header"]["format"] != ENGINE_FORMAT:
        raise ValueError(f"{path}: format {data['header']['format']!r}, expected {ENGINE_FORMAT!r}")
    tokens: dict[tuple, set[float]] = {}
    for row in data["rows"]:
        where = f"{path}: {row['arm']}, T = {row['temperature']}, {row['kind']}, batch {row['batch']}"
        for key, top, bottom in (("accept_length", "tokens", "steps"), ("rows_per_token", "rows", "tokens")):
            if abs(row[key] - row[top] / row[bottom]) > 1e-3:
                raise ValueError(f"{where}: {key} is {row[key]}, {top} over {bottom} {row[top] / row[bottom]:.3f}")
        if len(row["tok_s"]) != row["rounds"]:
            raise ValueError(f"{where}: {len(row['tok_s'])} speeds of {row['rounds']} rounds")
        cell = row["temperature"], row["kind"], row["batch"]
        tokens.setdefault(cell, set()).add(row["tokens"] / row["rounds"])
    for cell, found in tokens.items():
        if len(found) != 1:
            raise ValueError(f"{path}: {cell}: arms gave {sorted(found)} tokens a round")
    return data


def load_commit_length(path: Path) -> dict:
    """What `probe commit-length` said of several servers. Refuses a file that is not consistent with itself."""
    data = json.loads(Path(path).read_text())
    for name, run in data["runs"].items():
        if run["schema"] != COMMIT_LENGTH_SCHEMA:
            raise ValueError(f"{path}: {name}: schema {run['schema']!r}, expected {COMMIT_LENGTH_SCHEMA!r}")
        for point in run["points"]:
            where = f"{path}: {name}, {point['text']} at {point['context']}"
            if sum(point["histogram"]) != point["steps"]:
                raise ValueError(f"{where}: {point['steps']} steps, {sum(point['histogram'])} in its histogram")
            if not 1 <= point["chain_length"] <= point["commit_length"] <= len(point["histogram"]):
                raise ValueError(
                    f"{where}: expected 1 <= chain <= commit <= {len(point['histogram'])}, got "
                    f"{point['chain_length']} and {point['commit_length']}"
                )
            drafts = sum(accepted * steps for accepted, steps in enumerate(point["histogram"])) / point["steps"]
            if abs(drafts - point["accepted_drafts"]) > 1e-3:
                raise ValueError(f"{where}: {point['accepted_drafts']} accepted drafts, {drafts} by its histogram")
    return data
