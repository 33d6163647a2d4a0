# SPDX-License-Identifier: Apache-2.0
"""The result files, one a part: a header, rows with their problems, and what did not run."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import backend_e2e as e2e
from one_rank import results as one_rank_results
from verify_bench import result_file
from verify_bench.result_file import save as save
from verify_bench.results import versions_of, without_folders

FORMAT = "two_ranks-1"
HEADER_KEYS = {
    "format": str, "part": str, "date": str, "commit": str, "device": str, "gpus": list, "versions": dict,
    "options": list, "seconds": (int, float),
}  # fmt: skip
MISSING_KEYS = {"name": str, "reason": str}
ROW_KEYS = {
    "equal": {"name": str, "ranks": int, "mode": str, "problems": list},
    "churn": {"kv_defrag": str, "problems": list},
    "steps": {"name": str, "problems": list},
    "moe": {"model": str, "problems": list},
}


def header(part: str, args: argparse.Namespace, options: list[str], seconds: float) -> dict:
    import torch

    versions = versions_of("sglang", "sgl-kernel-sm120", "triton")
    cuda = args.device == "cuda"
    return {
        "format": FORMAT,
        "part": part,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": args.commit or e2e.commit_of_checkout(),
        "device": args.device,
        "gpus": gpus() if cuda else [],
        "versions": versions | {"nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None},
        "rule": {"tie": e2e.TIE, "drift": e2e.DRIFT},
        "options": without_folders(options),
        "seconds": round(seconds, 1),
    }


def gpus() -> list[dict]:
    """Of each GPU what verify_bench says of the first, and how they are connected."""
    import torch
    from verify_bench.results import gpu_info

    return [
        (gpu_info(index) or {}) | {"peer_access": [
            other for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]}
        for index in range(torch.cuda.device_count())
    ]  # fmt: skip


def problems(data: dict) -> list[str]:
    """What is wrong with a result file; empty when it is one."""
    part = data.get("header", {}).get("part") if isinstance(data, dict) else None
    if part not in ROW_KEYS:
        return [f"not a result file of two_ranks: part {part!r}"]
    found, rows = result_file.field_problems(
        data, format=FORMAT, header_keys=HEADER_KEYS, row_keys=ROW_KEYS[part], missing_keys=MISSING_KEYS
    )
    if part == "steps":
        measured = [row for _, row in rows if "context" in row]
        one_rank = {"header": data["header"] | {
            "format": one_rank_results.FORMAT, "gpu": None, "scale": "", "model": {}, "draft_window": 0
        }, "rows": measured}  # fmt: skip
        found += one_rank_results.problems(one_rank)
    return found


def load(path: Path) -> dict:
    return result_file.load(path, problems)


def file_of(folder: Path, part: str) -> Path:
    return folder / f"{part}.json"


def summary(data: dict) -> list[str]:
    """A line a row, with its problems."""
    lines = []
    for row in data["rows"]:
        name = row.get("name") or row.get("kv_defrag") or row.get("model")
        facts = {
            key: row[key]
            for key in (
                "context", "ms_per_step_p50", "max_logprob_difference", "sampling", "steps", "retractions", "requests",
                "moved_bytes", "activated", "waiting", "not_available",
            )
            if row.get(key) is not None
        }  # fmt: skip
        state = "FAIL" if row["problems"] else "ok  "
        lines.append(f"{state} {name}: {'; '.join(row['problems']) or json.dumps(facts)}"[:600])
    lines += [f"not run: {missing['name']}: {missing['reason']}" for missing in data["not_available"]]
    return lines
