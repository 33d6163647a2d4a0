# SPDX-License-Identifier: Apache-2.0
"""python -m one_rank: ms a decode or verify step of one TP rank of Kimi K2.6, against context, through the real Engine.

    cd benchmark && python -m one_rank --out results/h200/one_rank.json          # on a GPU: every arm
    cd benchmark && python -m one_rank --scale small --out small.json            # on a CPU: shows that it runs

Each arm is an Engine in a process of its own; --parallel of them start at once and then measure one after another.
Contexts are put into the prefix cache, not prefilled (see seed.py); a row says how many tokens were found there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend_e2e import environment_of
from verify_bench.results import commit, gpu_info, versions_of, without_folders

from . import results, table
from .experts import tiles_of
from .shapes import ARMS, SCALES, TREE_SIZES, Run, Scale, runs_of, unavailable

HERE = Path(__file__).resolve().parent

TASK_DEFAULTS = {"steps": 32, "limit_s": 3.0}


def header_device(scale: Scale) -> str:
    return scale.arguments.get("device", "cuda")


def draft_window_of(args: argparse.Namespace, scale: Scale) -> int:
    return scale.draft_window if args.draft_window is None else args.draft_window


def header(scale: Scale, options: list[str], commit_of: str, draft_window: int) -> dict:
    gpu = gpu_info() if scale.name == "full" else None
    versions = versions_of("sglang", "sgl-kernel-sm120", "triton")
    return {
        "format": results.FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit_of,
        "device": header_device(scale),
        "gpu": gpu,
        "versions": versions,
        "scale": scale.name,
        "model": scale.model,
        "drafter": scale.drafter,
        "draft_window": draft_window,
        "expert_tiles": tiles_of(scale.model, gpu["name"], versions["triton"]) if gpu else None,
        "options": without_folders(options),
    }


def last_error(log: Path) -> str:
    """The last line of a log that speaks of an error, or its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if "Error" in line or "one_rank" in line), lines[-1])[:300]


def measure(
    run: Run, args: argparse.Namespace, scale: Scale, folder: Path, *, first_gpu: int = 0
) -> tuple[list[dict], str | None]:
    """-> rows, and why there are not as many as asked for"""
    task = {
        "arm": run.arm,
        "s_q": run.s_q,
        "scale": scale.name,
        "contexts": args.contexts,
        "kv_dtype": args.kv_dtype,
        "page_size": args.page_size,
        "steps": args.steps,
        "limit_s": args.limit,
        "profile": args.profile,
        "turn": str(folder / "turn"),
        "rows": str(folder / f"{run.name}.rows"),
        "ranks": run.ranks,
        "custom_all_reduce": run.custom_all_reduce,
        "first_gpu": first_gpu,
        "draft_window": draft_window_of(args, scale),
    }
    log = (args.logs or folder) / f"{run.name}.log"
    command = [sys.executable, "-m", "one_rank.arm", json.dumps(task)]
    # The kernels of our package and the fork come from the environment; this package from here.
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    reason = None
    with open(log, "w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout,
                env=os.environ | environment_of(run.ranks, header_device(scale)) | {"PYTHONPATH": path},
            ).returncode  # fmt: skip
            if code:
                reason = f"exit code {code}: {last_error(log)}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {args.timeout} s"
    rows_file = Path(task["rows"])
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    if reason is None and len(rows) < len(args.contexts):
        reason = f"{len(rows)} of {len(args.contexts)} contexts"
    lost = [f"at {row['context']:,}: {row['profile_error']}" for row in rows if "profile_error" in row]
    if reason is None and lost:
        reason = f"no profile {'; '.join(lost)}"
    print(f"{run.name}: {len(rows)} rows{f'; {reason}; see {log}' if reason else ''}", flush=True)
    return rows, reason


def arguments_of(args: argparse.Namespace, run: Run) -> argparse.Namespace:
    """Only of the smallest tree are the kernels shown."""
    profile = args.profile and run.s_q in (1, min(args.trees))
    return argparse.Namespace(**vars(args) | {"profile": profile})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--trees", nargs="+", type=int, default=list(TREE_SIZES), help="tokens of a tree")
    parser.add_argument(
        "--stock-trees",
        nargs="+",
        type=int,
        help="of trees in other arms than tree_kdtree, if others",
    )
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=TASK_DEFAULTS["steps"], help="measured at a context")
    parser.add_argument("--limit", type=float, default=TASK_DEFAULTS["limit_s"], help="seconds of a context, about")
    parser.add_argument("--kv-dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument(
        "--draft-window",
        type=int,
        help="tokens that a DFLASH drafter sees (4096); 0: the whole context",
    )
    parser.add_argument("--profile", action="store_true", help="also count the kernels of two arms by kind")
    parser.add_argument("--parallel", type=int, default=4, help="Engines on the GPU at once; 27 GB each at full scale")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one arm, its wait for the turn included")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the arms' logs")
    parser.add_argument("--commit", help="what the header says, where there is no git checkout")
    args = parser.parse_args(argv)
    scale = SCALES[args.scale]
    args.contexts = sorted(args.contexts or scale.contexts)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    options = sys.argv[1:] if argv is None else argv
    data = {
        "header": header(
            scale, options, args.commit or commit(HERE.parent.parent), draft_window_of(args, scale)
        ),
        "rows": [], "not_available": [],
    }  # fmt: skip
    chosen = []
    for run in runs_of(args.arms, args.trees, scale, args.stock_trees):
        reason = unavailable(run, scale)
        if reason:
            data["not_available"].append({"arm": run.arm, "s_q": run.s_q, "reason": reason})
        else:
            chosen.append(run)
    failed = False
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.parallel) as pool:
        futures = [pool.submit(measure, run, arguments_of(args, run), scale, Path(name)) for run in chosen]
        for run, future in zip(chosen, futures, strict=True):
            rows, reason = future.result()
            data["rows"] += rows
            if reason:
                failed = True
                data["not_available"].append({"arm": run.arm, "s_q": run.s_q, "reason": reason})
            results.save(args.out, data)
    results.save(args.out, data)
    columns, rows = table.steps(data)
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    for line in (columns, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    found = results.problems(data)
    for problem in found:
        print(f"one_rank: {problem}", file=sys.stderr)
    return 1 if failed or found else 0


if __name__ == "__main__":
    sys.exit(main())
