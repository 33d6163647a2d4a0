# SPDX-License-Identifier: Apache-2.0
"""A server under many clients for minutes: nothing fails, every KV slot comes back, memory does not grow.

    python benchmark/backend_churn.py --out benchmark/results/h200/backend_churn.json          # on a GPU, DDTREE
    python benchmark/backend_churn.py --pool 1024 --conservativeness 0.05 --out r.json         # requests are retracted
    python benchmark/backend_churn.py --device cpu --clients 4 --seconds 20 --out r.json
    python benchmark/backend_churn.py --ranks 2 --steps 2000 --kv-defrag tier1 --check-slots --out r.json

Clients send ragged prompts with common beginnings, some leave in the middle of a stream, some abort by name; a
small --pool runs full, and the result counts the requests that were retracted for that. The server's own checks of its
slots stop it where one is lost. In the modes on and validate no call of the target that is ours may go to the stock
backend, and in validate mode there is no mismatch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import requests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = ROOT / "test" / "models"
sys.path[:0] = [str(HERE), str(HERE / "kernels")]

import backend_e2e  # noqa: E402

FORMAT = "backend_churn-1"
TROUBLE = re.compile(
    r"Traceback|CUDA error|memory leak|AssertionError|illegal memory access|kdtree_sm120 validate[^:]*: mismatch"
)
GROWTH_LIMIT_MIB = 64
VOCABULARY = (40, 2000)  # ids that the small model knows as text
LOG_INTERVAL = 10  # decode steps between two lines of the log, which are how steps are counted
# Upstream's two looks at the owners of all slots after each step, and ours, which also compares the ranks.
SLOT_CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


# Requests are admitted as if they were to answer 8 tokens, so that the pool runs full.
HASTY = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}


def server_arguments(args: argparse.Namespace) -> list[str]:
    values = {
        "model-path": MODELS / "target", "attention-backend": "kdtree_sm120", "kdtree-verify": args.mode,
        "max-total-tokens": args.pool, "max-running-requests": 16, "context-length": 2048, "page-size": args.page_size,
        "decode-log-interval": LOG_INTERVAL, "kv-defrag": args.kv_defrag,
        "schedule-conservativeness": args.conservativeness,
    }  # fmt: skip
    if args.disable_radix_cache:
        values["disable-radix-cache"] = True
    if args.kv_defrag == "tier1":  # metrics say how much each rank has moved
        values |= {
            "kv-defrag-copy-budget": "256K", "enable-metrics": True, "enable-metrics-for-all-schedulers": True
        }  # fmt: skip
    if args.ranks > 1:
        values |= {
            name.replace("_", "-"): value for name, value in backend_e2e.several_ranks(args.ranks, args.device).items()
        }
    if args.algorithm != "plain":
        values |= {
            "speculative-algorithm": args.algorithm, "speculative-draft-model-path": MODELS / "drafter",
            "speculative-num-draft-tokens": 16 if args.algorithm == "DDTREE" else 8,
        }  # fmt: skip
    if args.device == "cpu":
        values |= {"device": "cpu", "dtype": "float32"}
    else:
        values |= {"dtype": "bfloat16", "mem-fraction-static": backend_e2e.SHARED_GPU, "cuda-graph-max-bs-decode": 16}
    return command_line(values)


def command_line(values: dict[str, object]) -> list[str]:
    """Of True the flag alone."""
    return [
        part for name, value in values.items() for part in ([f"--{name}"] + ([] if value is True else [str(value)]))
    ]


class Client(threading.Thread):
    def __init__(self, url: str, number: int, over: threading.Event, counts: Counter, failures: list[str]):
        super().__init__(daemon=True)
        self.url, self.over, self.counts, self.failures = url, over, counts, failures
        self.name = f"client-{number}"
        self.random = random.Random(number)
        common = random.Random(0)
        self.beginnings = [[common.randrange(*VOCABULARY) for _ in range(n)] for n in (3, 40, 200)]

    def run(self) -> None:
        number = 0
        while not self.over.is_set():
            number += 1
            kind = self.random.choice(["whole", "whole", "leave", "abort"])
            try:
                self.request(kind, f"{self.name}-{number}")
                self.counts[kind] += 1
            except Exception as error:
                self.failures.append(f"{self.name}: {kind}: {error!r}"[:300])

    def request(self, kind: str, rid: str) -> None:
        tail = [self.random.randrange(*VOCABULARY) for _ in range(self.random.randrange(1, 30))]
        temperature = self.random.choice([0.0, 0.0, 0.9])
        body = {
            "input_ids": self.random.choice(self.beginnings) + tail, "rid": rid, "stream": kind != "whole",
            "sampling_params": {
                "temperature": temperature, "ignore_eos": True, "max_new_tokens": self.random.randrange(4, 200)
            },
        }  # fmt: skip
        with requests.post(f"{self.url}/generate", json=body, stream=kind != "whole", timeout=300) as response:
            if response.status_code != 200:
                raise RuntimeError(f"status {response.status_code}: {response.text[:200]}")
            if kind == "whole":
                meta = response.json()["meta_info"]
                if meta["completion_tokens"] != body["sampling_params"]["max_new_tokens"]:
                    raise RuntimeError(f"{meta['completion_tokens']} tokens of {body['sampling_params']}")
                return
            lines = (line for line in response.iter_lines() if line)
            for _ in range(self.random.randrange(1, 6)):
                next(lines, None)
            if kind == "abort":
                requests.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=60)
                for _ in lines:
                    pass


def used_slots(url: str) -> int:
    (load,) = requests.get(f"{url}/v1/loads", timeout=60).json()["loads"]
    return load["num_used_tokens"]


def slots_in_use_when_idle(url: str, patience_s: float) -> int:
    deadline = time.monotonic() + patience_s
    while (used := used_slots(url)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return used


def gpu_mib(args: argparse.Namespace) -> int | None:
    """In use on the GPUs of all ranks; None where other programs share them, or there is none."""
    if args.shared_gpus:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = ",".join((visible.split(",") if visible else [str(i) for i in range(args.ranks)])[: args.ranks])
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpus]
    try:
        return sum(
            map(int, subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split())
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def host_mib(pid: int) -> int:
    """Resident memory of a process and its descendants."""
    import psutil

    parent = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)]) >> 20


@contextlib.contextmanager
def server(
    arguments: Sequence[str], log: Path, *, start_timeout: float, env: dict[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen]]:
    """-> its address and process, once it answers"""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--port", str(port)]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | (env or {}))
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + start_timeout
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
                with contextlib.suppress(requests.RequestException):
                    if requests.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                time.sleep(0.5)
            yield url, process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def churn(url: str, clients: int, is_over: Callable[[], bool]) -> tuple[Counter, list[str]]:
    counts, failures, over = Counter(), [], threading.Event()
    threads = [Client(url, i, over, counts, failures) for i in range(clients)]
    for thread in threads:
        thread.start()
    # Where all clients fail at once, as when the server has ended, nothing is to be waited for.
    while not is_over() and len(failures) < 10 * clients:
        time.sleep(0.2)
    over.set()
    for thread in threads:
        thread.join()
    return counts, failures


def said_by_first(log: str, text: str) -> list[str]:
    """The lines of rank 0, or of the one rank, that begin so."""
    return re.findall(rf"^\[\S+ \S+?(?: TP0)?\] ({text}.*)$", log, re.M)


def steps_of(log: str) -> int:
    """Decode steps that a log tells of, to LOG_INTERVAL."""
    return LOG_INTERVAL * len(said_by_first(log, "Decode batch"))


def rank_problems(log: str, args: argparse.Namespace) -> list[str]:
    """What a log of several ranks, or of slots that move or are counted, has to say on each of them."""
    ranks, found = list(range(args.ranks)), []

    def say(text: str, *, what: str) -> None:
        said = ranks_that_say(log, text)
        if said != ranks:
            found.append(f"{what}: said by ranks {said}, not by {ranks}")

    say(rf"kdtree_sm120 .*tp rank \d+: verify {args.mode}\b", what="the backend's start-up line")
    if args.kv_defrag != "off":
        say(f"KV defragmentation: {args.kv_defrag} active", what=f"{args.kv_defrag} is active")
    if args.check_slots:
        compared = " and compared between the ranks" if args.ranks > 1 else ""
        say(rf"KV slots are counted after every step{compared}\.", what=f"slots are counted{compared}")
    if args.check_slots and args.kv_defrag == "tier1":
        say("The KV of running requests is compared after every step", what="KV is compared")
    if "KV relocation failed" in log:
        found.append("log: KV relocation failed")
    return found


def log_problems(log: str, args: argparse.Namespace) -> list[str]:
    """What no log may say, and what one of these modes has to."""
    trouble = sorted({line.strip()[:300] for line in log.splitlines() if TROUBLE.search(line)})
    found = [f"log: {line}" for line in trouble]
    if args.mode != "off":
        found += backend_e2e.fallback_problems(backend_e2e.fallbacks(log))
    if args.mode == "validate":
        reports = backend_e2e.reports_by_rank(log, args.ranks)
        found += backend_e2e.validate_problems(reports, args.ranks, ["target"])
    return found


def ranks_that_say(log: str, text: str) -> list[int]:
    """Of one rank the lines have no rank in front. A rank counts once, however often it says it."""
    return sorted({int(rank or 0) for rank in re.findall(rf"^\[\S+ \S+?(?: TP(\d+))?\] {text}", log, re.M)})


def moved_bytes(url: str) -> dict[int, float]:
    """Rank -> bytes that tier 1 has moved."""
    text = requests.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r'^sglang:kv_defrag_bytes_moved_total{.*tp_rank="(\d+)".*} (\S+)$', text, re.M)
    return {int(rank): float(value) for rank, value in found}


def run(args: argparse.Namespace, log: Path, deadline: float = float("inf")) -> dict:
    """--steps: until so many decode steps were made, else for --seconds, which bound it either way, as does the
    deadline (of time.monotonic)."""

    def until(seconds: float, share: float) -> Callable[[], bool]:
        end, target = min(time.monotonic() + seconds, deadline), None
        if args.steps:
            target = steps_of(log.read_text(errors="replace")) + share * args.steps
        return lambda: (
            time.monotonic() > end or (target is not None and steps_of(log.read_text(errors="replace")) >= target)
        )

    env = backend_e2e.environment_of(args.ranks, args.device) | (SLOT_CHECKS if args.check_slots else {})
    if args.conservativeness < 1:
        env |= HASTY
    with server(server_arguments(args), log, start_timeout=args.start_timeout, env=env) as (url, process):
        start = time.monotonic()
        warm, warm_failures = churn(url, args.clients, until(args.seconds / 4, 0.2))
        slots_in_use_when_idle(url, 60)
        before = gpu_mib(args), host_mib(process.pid)
        counts, failures = churn(url, args.clients, until(args.seconds, 0.8))
        used = slots_in_use_when_idle(url, 60)
        seconds = time.monotonic() - start
        after = gpu_mib(args), host_mib(process.pid)
        moved = moved_bytes(url) if args.kv_defrag == "tier1" else None
        alive = process.poll() is None
    text = log.read_text(errors="replace")
    problems = [*warm_failures, *failures, *rank_problems(text, args)]
    steps = steps_of(text)
    if not alive:
        problems.append("the server ended")
    if args.steps and steps < args.steps:
        problems.append(f"{steps} of {args.steps} steps in {seconds:.0f} s")
    if moved is not None and (len(moved) != args.ranks or len(set(moved.values())) != 1 or not all(moved.values())):
        problems.append(f"bytes moved, by rank: {moved}")
    if used:
        problems.append(f"{used} KV slots did not come back")
    problems += log_problems(text, args)
    for name, a, b in (("GPU", before[0], after[0]), ("host", before[1], after[1])):
        # So many steps may be over before a process has all that it keeps.
        if not args.steps and a is not None and b is not None and b - a > GROWTH_LIMIT_MIB:
            problems.append(f"{name} memory grew by {b - a} MiB")
    return {
        "requests": dict(counts + warm), "steps": steps, "seconds": round(seconds, 1),
        "retractions": len(said_by_first(text, "KV cache pool is full")),
        "moved_bytes": moved, "used_slots": used,
        "gpu_mib": [before[0], after[0]], "host_mib": [before[1], after[1]], "problems": problems,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--algorithm", choices=("plain", "DFLASH", "DDTREE"), default="DDTREE")
    parser.add_argument("--mode", choices=("off", "validate", "on"), default="on", help="--kdtree-verify")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180, help="of churn, after a quarter of that to warm up")
    parser.add_argument(
        "--steps", type=int, help="end after so many, at the latest after --seconds; memory is not judged"
    )
    parser.add_argument("--pool", type=int, default=4096, help="KV slots; a request takes up to 430")
    parser.add_argument(
        "--conservativeness",
        type=float,
        default=1.0,
        help="below 1 answers are taken for short, too",
    )
    parser.add_argument("--ranks", type=int, default=1, help="of tensor parallelism")
    parser.add_argument("--kv-defrag", choices=("off", "tier0", "tier1"), default="off")
    parser.add_argument(
        "--disable-radix-cache", action="store_true", help="the server's: finished requests leave free slots"
    )
    parser.add_argument("--check-slots", action="store_true", help="count all slots after each step, compare the ranks")
    parser.add_argument("--shared-gpus", action="store_true", help="others use them: do not watch their memory")
    parser.add_argument("--start-timeout", type=float, default=300)
    parser.add_argument("--commit", help="what the header says, where there is no git checkout")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import torch
    from verify_bench.results import commit, gpu_info

    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = run(args, args.out.with_suffix(".log"))
    header = {
        "format": FORMAT, "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": args.commit or commit(ROOT), "device": args.device,
        "gpu": gpu_info() if args.device == "cuda" else None, "versions": {"torch": torch.__version__},
        **{name: getattr(args, name) for name in (
            "algorithm", "mode", "page_size", "clients", "seconds", "steps", "ranks", "kv_defrag", "check_slots",
            "pool", "conservativeness",
        )},
    }  # fmt: skip
    args.out.write_text(json.dumps({"header": header, **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
