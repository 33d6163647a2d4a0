# SPDX-License-Identifier: Apache-2.0
"""python -m two_ranks: tensor parallelism on two GPUs of one host, in one call.

    cd benchmark && python -m two_ranks --out results/h200x2                        # two GPUs with 140 GB each
    cd benchmark && python -m two_ranks --device cpu --parts equal churn steps --out OUT   # over gloo: that it runs

| part  | what runs, side by side                                                                 | file       |
|-------|-----------------------------------------------------------------------------------------|------------|
| equal | the small model, DDTREE on kdtree_sm120: one rank, two ranks, two in validate mode        | equal.json |
| churn | a server of two ranks under clients that abort, tiers 0 and 1, slots compared by rank     | churn.json |
| steps | one_rank on one rank and on two with real collectives, and with upstream's own all-reduce | steps.json |
| moe   | probe moe on two servers of two ranks, and what the ranks wait for each other             | moe.json   |

All Engines and servers start at once. What is timed, steps and the profiles of moe, waits until equal and churn have
ended, --quiet seconds after the start at the latest, and then runs one after another; upstream's own all-reduce comes
last. A file is written whenever a job of its part ends, and what has not ended --budget seconds after the start is
ended and named in it. For a shorter run name --parts, or fewer --churn-steps and --contexts, or --no-custom-all-reduce.

NVLink multicast stays off in every process: a host's GPUs may be shared by others whom it can disturb.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import psutil

from . import churning, equal, jobs, moe, results, steps

PARTS = {"equal": equal, "churn": churning, "steps": steps, "moe": moe}
STAGES = (jobs.TIMED, jobs.LAST)
# Read by NCCL, by PyTorch's symmetric memory and by NVSHMEM.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="a folder for the result files")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--budget", type=float, default=420, help="seconds after which everything ends")
    p.add_argument("--quiet", type=float, help="seconds after which the timed jobs begin (default: 0.6 of the budget)")
    p.add_argument("--start-timeout", type=float, default=200, help="seconds a server may take to start")
    p.add_argument("--parallel", type=int, default=16, help="jobs at once")
    p.add_argument("--churn-steps", type=int, default=2000)
    p.add_argument("--churn-seconds", type=float, default=600, help="at most, and not beyond --quiet")
    p.add_argument("--clients", type=int, default=48)
    p.add_argument("--contexts", nargs="+", type=int, help="of steps (default: 4,096 65,536 185,000)")
    p.add_argument("--steps", type=int, default=24, help="measured at a context")
    p.add_argument("--no-custom-all-reduce", dest="custom_all_reduce", action="store_false", help="NCCL's alone")
    p.add_argument("--logs", type=Path, help="a folder that keeps the logs")
    p.add_argument("--commit", help="what the headers say, where there is no git checkout")
    return p


def forbid_multicast() -> None:
    for name, value in NO_MULTICAST.items():
        if os.environ.setdefault(name, value) != value:
            raise SystemExit(f"two_ranks: {name}={os.environ[name]}: NVLink multicast has to stay off, {name}={value}")


class Files:
    """The result files, written again whenever something has ended."""

    def __init__(self, run: jobs.Run, planned: list[jobs.Job], options: list[str]):
        self.run, self.planned, self.options = run, planned, options
        self.outcomes: dict[str, dict[str, dict]] = {part: {} for part in run.args.parts}

    def add(self, job: jobs.Job, outcome: dict) -> None:
        self.outcomes[job.part][job.name] = outcome

    def write(self, part: str) -> dict:
        outcomes = self.outcomes[part]
        missing = [
            {"name": job.name, "reason": f"not done after {self.run.elapsed():.0f} s"}
            for job in self.planned if job.part == part and job.name not in outcomes
        ]  # fmt: skip
        if not any(job.part == part for job in self.planned):
            missing = [{"name": part, "reason": f"has no form on {self.run.device}"}]
        data = {
            "header": results.header(part, self.run.args, self.options, self.run.elapsed()),
            "rows": PARTS[part].rows(outcomes, self.run.device),
            "not_available": missing,
        }
        results.save(results.file_of(self.run.args.out, part), data)
        return data


def outcome_of(future: Future) -> dict:
    error = future.exception()
    return future.result() if error is None else jobs.failed(f"{type(error).__name__}: {error}")


def execute(run: jobs.Run, planned: list[jobs.Job], files: Files) -> None:
    """Run the jobs, stage after stage, until all have ended or the time has. All start at once."""
    # Threads of jobs that do not end must not keep the program alive: it leaves by os._exit.
    pool = ThreadPoolExecutor(run.args.parallel)
    futures = {pool.submit(job.work): job for job in sorted(planned, key=lambda job: job.stage)}
    pending = set(futures)
    while pending and run.elapsed() < run.args.budget:
        before = {stage: [futures[f].name for f in pending if futures[f].stage < stage] for stage in STAGES}
        for stage in STAGES:
            late = stage == jobs.TIMED and run.elapsed() > run.args.quiet
            if (not before[stage] or late) and run.give_turn(stage) and before[stage]:
                run.say(f"timed jobs begin beside {', '.join(before[stage])}, which have not ended")
        ended, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
        for future in ended:
            job, outcome = futures[future], outcome_of(future)
            run.say(f"{job.part}: {job.name}: {outcome.get('error') or outcome.get('reason') or 'ended'}")
            files.add(job, outcome)
            files.write(job.part)
    for future in pending:
        run.say(f"{futures[future].part}: {futures[future].name}: not done after {run.args.budget:.0f} s")
    pool.shutdown(wait=False, cancel_futures=True)


def end_children(before: Collection[psutil.Process]) -> None:
    """What this program started and what those started, but for those of ``before``."""
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(children, timeout=10)


def main(argv: list[str] | None = None) -> int:
    options = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(options)
    args.quiet = args.quiet or 0.6 * args.budget
    forbid_multicast()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        run = jobs.Run(args, Path(name))
        planned = [job for part in args.parts for job in PARTS[part].jobs(run)]
        files = Files(run, planned, options)
        before = psutil.Process().children(recursive=True)
        try:
            execute(run, planned, files)
        finally:
            end_children(before)
        failed = False
        for part in args.parts:
            data = files.write(part)
            for line in results.summary(data):
                print(f"{part}: {line}")
            found = results.problems(data)
            for problem in found:
                print(f"two_ranks: {part}: {problem}", file=sys.stderr)
            ran = any(job.part == part for job in planned)
            failed |= bool(found or any(row["problems"] for row in data["rows"]) or (ran and data["not_available"]))
        run.say(f"{args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still wait for a process that was ended.
    if threading.active_count() > 1:
        os._exit(code)
    sys.exit(code)
