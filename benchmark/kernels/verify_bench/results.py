# SPDX-License-Identifier: Apache-2.0
"""The result file: its header, its rows, and the check that a file is one."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from . import counters, result_file
from .probes import Ceilings
from .result_file import save as save
from .shapes import Shape
from .timing import Timing

FORMAT = "mla_tree_verify-1"
HEADER_KEYS = result_file.HEADER_KEYS | {"ceilings": dict}
ROW_KEYS = {
    "arm": str,
    "bs": int,
    "s_q": int,
    "h_q": int,
    "prefix": int,
    "kv_dtype": str,
    "page_size": int,
    "us_p20": (int, float),
    "us_p50": (int, float),
    "us_p80": (int, float),
    "gbps": (int, float),
    "tflops": (int, float),
    "prefixes": list,
    "error": (int, float),
    "error_worst_row": (int, float),
    "calls": int,
    "samples": int,
    "graph": bool,
}
MISSING_KEYS = {"arm": str, "reason": str, "shapes": list}


def row(arm: str, shape: Shape, timing: Timing, error: tuple[float, float]) -> dict:
    return {
        "arm": arm,
        "bs": shape.bs,
        "s_q": shape.s_q,
        "h_q": shape.h_q,
        "prefix": shape.prefix,
        "kv_dtype": shape.kv_dtype,
        "page_size": shape.page_size,
        "us_p20": round(timing.p20, 3),
        "us_p50": round(timing.p50, 3),
        "us_p80": round(timing.p80, 3),
        "gbps": round(counters.gbps(shape, timing.p50), 2),
        "tflops": round(counters.tflops(shape, timing.p50), 3),
        "prefixes": list(shape.prefixes),
        "error": float(f"{error[0]:.3e}"),
        "error_worst_row": float(f"{error[1]:.3e}"),
        "calls": timing.calls,
        "samples": timing.samples,
        "graph": timing.graph,
    }


def add_missing(data: dict, arm: str, reason: str, shape: Shape) -> None:
    """An arm that did not run at a shape: one entry for each arm and reason."""
    for m in data["not_available"]:
        if (m["arm"], m["reason"]) == (arm, reason):
            m["shapes"].append(str(shape))
            return
    data["not_available"].append({"arm": arm, "reason": reason, "shapes": [str(shape)]})


def shape_of(r: dict) -> Shape:
    return Shape(tuple(r["prefixes"]), r["s_q"], r["h_q"], r["kv_dtype"], r["page_size"])


def problems(data: dict) -> list[str]:
    """What is wrong with a result file; empty when it is one."""
    found, rows = result_file.field_problems(
        data, format=FORMAT, header_keys=HEADER_KEYS, row_keys=ROW_KEYS, missing_keys=MISSING_KEYS
    )
    seen = set()
    for i, r in rows:
        if not 0 < r["us_p20"] <= r["us_p50"] <= r["us_p80"]:
            found.append(f"row {i}: percentiles are not 0 < p20 <= p50 <= p80")
        if not r["error"] < 1:  # NaN too
            found.append(f"row {i}: error {r['error']}: a wrong arm must not be timed")
        shape = shape_of(r)
        if (shape.bs, shape.prefix) != (r["bs"], r["prefix"]):
            found.append(f"row {i}: bs or prefix disagrees with prefixes")
        if abs(counters.gbps(shape, r["us_p50"]) - r["gbps"]) > 0.01 + 1e-3 * r["gbps"]:
            found.append(f"row {i}: gbps {r['gbps']} does not follow from us_p50")
        if (r["arm"], shape) in seen:
            found.append(f"row {i}: {r['arm']} at {shape} occurs twice")
        seen.add((r["arm"], shape))
    return found


def load(path: Path) -> dict:
    return result_file.load(path, problems)


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


GPU_QUERY = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def gpu_info(index: int = 0) -> dict | None:
    if not torch.cuda.is_available():
        return None
    p = torch.cuda.get_device_properties(index)
    info = {
        "name": p.name,
        "compute_capability": f"{p.major}.{p.minor}",
        "sms": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "memory_bytes": p.total_memory,
    }
    text = _run("nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader", "-i", str(index))
    if text:
        info.update(zip((k.replace(".", "_") for k in GPU_QUERY), (v.strip() for v in text.split(",")), strict=False))
    return info


def save_rows(path: Path, format: str, device: str, commit_of: str, rows: list[dict]) -> None:
    """A result file of rows alone, with the GPU, its clocks and the versions on top. Folders are made."""
    document = {
        "format": format,
        "date": datetime.date.today().isoformat(),
        "commit": commit_of,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "gpu": gpu_info() if device == "cuda" else None,
        "versions": versions_of("sgl-kernel-sm120", "triton"),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def without_folders(options: list[str]) -> list[str]:
    """A command's words, absolute paths cut to their last part: where a host keeps its files says nothing."""
    return [Path(word).name if word.startswith("/") else word for word in options]


def commit(root: Path) -> str:
    """HEAD, with '+dirty' when a tracked file differs from it; 'unknown' outside a git checkout."""
    head = _run("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+dirty" if _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") else "")


def versions_of(*distributions: str) -> dict[str, str | None]:
    """Of Python, torch and the CUDA that torch was built for, and of these distributions; None: not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def header(commit: str, device: str, ceilings: Ceilings | None, arm_versions: dict[str, str | None]) -> dict:
    versions = versions_of("triton", "numpy") | arm_versions
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "device": device,
        "gpu": gpu_info() if device == "cuda" else None,
        "versions": versions,
        "ceilings": {
            k: v if isinstance(v, (str, type(None))) else round(v, 1) for k, v in dataclasses.asdict(ceilings).items()
        }
        if ceilings
        else {},
    }
