# SPDX-License-Identifier: Apache-2.0
"""python -m kv_churn: replay requests against each allocator, side by side.

``--ranks`` are data-parallel ranks: each is a process with a pool, a prefix cache and a
share of the requests of its own.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import gc
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from sglang.srt.arg_groups.fields.kdtree.kv_defrag import parse_size
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from .alloc_cost import measure_all
from .replay import BYTES_PER_SLOT, MODES, Outcome, Replay
from .traces import MIXES, TraceRequest, mooncake, synthetic

FORMAT = "kv_churn-1"


def header(args: argparse.Namespace) -> dict:
    def git(*command: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True).stdout.strip()

    options = re.sub(r" ?--(plot|out) \S+", "", " ".join(sys.argv[1:]))  # They change no number.
    return {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "command": f"python -m kv_churn {options}",
        "host": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "sglang": metadata.version("sglang"),
        },
        "ranks": args.ranks,
        "pool_tokens": args.pool_tokens,
        "max_running": args.max_running,
        "bytes_per_slot": BYTES_PER_SLOT,
        "copy_budget_bytes": parse_size(args.copy_budget),
    }


def trace_of(name: str, requests: int, rank: int, args: argparse.Namespace) -> Iterator[TraceRequest]:
    """The share of one rank: of a file each nth request, of a mix a stream of its own."""
    if args.trace is not None:
        trace = mooncake(
            args.trace,
            shrink=args.shrink,
            steps_per_second=args.steps_per_second,
            limit=requests,
            context=args.context,
            pool_tokens=args.pool_tokens,
        )
        return itertools.islice(trace, rank, None, args.ranks)
    share = len(range(rank, requests, args.ranks))
    return synthetic(MIXES[name], count=share, max_running=args.max_running, seed=(args.seed, rank))


def replay(name: str, requests: int, mode: str, rank: int, args: argparse.Namespace) -> Outcome:
    """What one rank does with its requests."""
    return Replay(
        mode,
        pool_tokens=args.pool_tokens,
        max_running=args.max_running,
        context=args.context,
        budget_bytes=parse_size(args.copy_budget),
        tree_core=args.tree_core,
    ).run(trace_of(name, requests, rank, args))


def dumps(result: dict) -> str:
    """JSON with each list of numbers on a line."""
    text = json.dumps(result, indent=1) + "\n"
    return re.sub(r'\[([^][{}"]+)\]', lambda numbers: f"[{' '.join(numbers[1].split())}]", text)


def summary(mix: str, mode: str, outcomes: Sequence[Outcome], wall_seconds: float) -> dict:
    """``outcomes`` are those of the ranks. Counts and CPU times are sums over them, and
    contiguity is their mean; ``wall_seconds`` is from the first request made to the last one
    checked, of all ranks."""

    def total(field: str) -> float:
        return sum(getattr(outcome, field) for outcome in outcomes)

    def mean(field: str) -> float:
        means = []
        for outcome in outcomes:
            values = getattr(outcome.series, field)
            values = values[len(values) // 5 :]  # The first fifth fills the pool.
            means.append(sum(values) / max(len(values), 1))
        return round(sum(means) / len(means), 4)

    us = 1e6 / max(total("steps"), 1)
    return {
        "mix": mix,
        "mode": mode,
        "requests": total("requests"),
        "steps": total("steps"),
        "runs_per_request": mean("runs_per_request"),
        "runs_per_1k_tokens": mean("runs_per_1k_tokens"),
        "longest_run": mean("longest_run"),
        "contiguous_block_share": mean("block_share"),
        "cached_share": round(total("cached_tokens") / total("prompt_tokens"), 4),
        "retractions": total("retractions"),
        "bytes_moved": total("bytes_moved"),
        "slots_moved_per_generated_token": round(
            total("bytes_moved") / BYTES_PER_SLOT / max(total("generated_tokens"), 1), 3
        ),
        "max_bytes_in_a_step": max(outcome.max_bytes_in_a_step for outcome in outcomes),
        "cpu_us_per_step": round(total("cpu_seconds") * us, 1),
        "defrag_cpu_us_per_step": round(total("defrag_cpu_seconds") * us, 1),
        "cpu_seconds": round(total("cpu_seconds"), 2),
        "wall_seconds": round(wall_seconds, 2),
        "trace_cpu_seconds": round(total("trace_cpu_seconds"), 2),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="kv_churn", description=__doc__)
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--trace", type=Path, help="a Mooncake JSONL file instead")
    parser.add_argument("--shrink", type=int, default=16, help="divides its lengths")
    parser.add_argument("--steps-per-second", type=float, default=50.0)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[100_000], help="of all mixes, or a number for each --mix"
    )
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel, each in a process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool-tokens", type=int, default=32768, help="of a rank")
    parser.add_argument("--max-running", type=int, default=48, help="requests of a rank")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--copy-budget", default="64M")
    parser.add_argument("--tree-core", choices=["rust", "python"], default="rust")
    parser.add_argument("--out", type=Path, help="JSON result")
    parser.add_argument("--plot", type=Path, help="figure over time; needs matplotlib")
    args = parser.parse_args()
    mixes = [args.trace.stem] if args.trace else args.mix
    if len(args.requests) not in (1, len(mixes)):
        parser.error(f"--requests has {len(args.requests)} numbers for {len(mixes)} mixes")
    counts = args.requests * (1 if len(args.requests) > 1 else len(mixes))
    for name, values in (("--requests", counts), ("--ranks", [args.ranks])):
        if min(values) < 1:
            parser.error(f"{name}: expected 1 or more; got {min(values)}")
    if not 0 < args.steps_per_second < math.inf:
        parser.error(f"--steps-per-second: expected a number above 0; got {args.steps_per_second}")
    try:
        parse_size(args.copy_budget)
        if args.trace:  # all of it, before a rank meets what is wrong in it
            collections.deque(trace_of(mixes[0], counts[0], 0, args), maxlen=0)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    get_context().set_server_args(ServerArgs(model_path="none", device="cpu"))

    result = {**header(args), "results": [], "series": [], "alloc_free_pair": []}
    # As a server's: what is imported is no garbage, requests are many, and few of them are.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with multiprocessing.get_context("fork").Pool(args.ranks, maxtasksperchild=1) as pool:
        for (name, count), mode in itertools.product(zip(mixes, counts), args.mode):
            began = time.perf_counter()
            outcomes = pool.starmap(replay, [(name, count, mode, rank, args) for rank in range(args.ranks)], 1)
            row = summary(name, mode, outcomes, time.perf_counter() - began)
            print(
                f"{name:12} {mode:10} {row['runs_per_1k_tokens']:7.1f} runs/1k tokens  "
                f"longest {row['longest_run']:6.0f}  "
                f"64-blocks {100 * row['contiguous_block_share']:5.1f} %  "
                f"cached {100 * row['cached_share']:4.1f} %  "
                f"moved {row['bytes_moved'] / 2**30:7.1f} GiB  "
                f"{row['cpu_us_per_step']:6.0f} us/step  {row['cpu_seconds']:6.1f} s CPU  {row['wall_seconds']:6.1f} s",
                flush=True,
            )
            result["results"].append(row)
            result["series"].append({"mix": name, "mode": mode, **dataclasses.asdict(outcomes[0].series)})
    result["alloc_free_pair"] = measure_all()
    for row in result["alloc_free_pair"]:
        print(row)
    if args.out:
        args.out.write_text(dumps(result))
    if args.plot:
        from .plot import plot

        plot(result, args.plot)


if __name__ == "__main__":
    main()
