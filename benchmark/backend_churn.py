# SPDX-License-Identifier: Apache-2.0
"""A server under many clients for minutes: nothing fails, every KV slot comes back, memory does not grow.

    python benchmark/backend_churn.py --out benchmark/results/h200/backend_churn.json          # on a GPU, DDTREE
    python benchmark/backend_churn.py --device cpu --clients 4 --seconds 20 --out r.json

Clients send ragged prompts with common beginnings, some leave in the middle of a stream, some abort by name; the pool
is so small that requests are retracted. The server's own checks of its slots stop it where one is lost.
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
from collections.abc import Iterator
from pathlib import Path

import requests

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = ROOT / "test" / "models"
sys.path.insert(0, str(HERE / "kernels"))

FORMAT = "backend_churn-1"
TROUBLE = re.compile(r"Traceback|CUDA error|memory leak|AssertionError|illegal memory access")
GROWTH_LIMIT_MIB = 64
VOCABULARY = (40, 2000)  # ids that the small model knows as text


def server_arguments(args: argparse.Namespace) -> list[str]:
    values = {
        "model-path": MODELS / "target", "attention-backend": "kdtree_sm120", "kdtree-verify": args.mode,
        "max-total-tokens": 4096, "max-running-requests": 16, "context-length": 2048, "page-size": args.page_size,
    }  # fmt: skip
    if args.algorithm != "plain":
        values |= {
            "speculative-algorithm": args.algorithm, "speculative-draft-model-path": MODELS / "drafter",
            "speculative-num-draft-tokens": 16 if args.algorithm == "DDTREE" else 8,
        }  # fmt: skip
    if args.device == "cpu":
        values |= {"device": "cpu", "dtype": "float32"}
    else:
        values |= {"dtype": "bfloat16", "mem-fraction-static": 0.3, "cuda-graph-max-bs-decode": 16}
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


class Client(threading.Thread):
    def __init__(self, url: str, number: int, until: float, counts: Counter, failures: list[str]):
        super().__init__(daemon=True)
        self.url, self.until, self.counts, self.failures = url, until, counts, failures
        self.name = f"client-{number}"
        self.random = random.Random(number)
        common = random.Random(0)
        self.beginnings = [[common.randrange(*VOCABULARY) for _ in range(n)] for n in (3, 40, 200)]

    def run(self) -> None:
        number = 0
        while time.monotonic() < self.until:
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


def gpu_mib() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def host_mib(pid: int) -> int:
    """Resident memory of a process and its descendants."""
    import psutil

    parent = psutil.Process(pid)
    return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)]) >> 20


@contextlib.contextmanager
def server(args: argparse.Namespace, log: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", *server_arguments(args), "--port", str(port)]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + args.start_timeout
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


def churn(url: str, clients: int, seconds: float) -> tuple[Counter, list[str]]:
    counts, failures = Counter(), []
    until = time.monotonic() + seconds
    threads = [Client(url, i, until, counts, failures) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, failures


def run(args: argparse.Namespace, log: Path) -> dict:
    with server(args, log) as (url, process):
        warm, warm_failures = churn(url, args.clients, args.seconds / 4)
        slots_in_use_when_idle(url, 60)
        before = gpu_mib(), host_mib(process.pid)
        counts, failures = churn(url, args.clients, args.seconds)
        used = slots_in_use_when_idle(url, 60)
        after = gpu_mib(), host_mib(process.pid)
        alive = process.poll() is None
    text = log.read_text(errors="replace")
    problems = [*warm_failures, *failures]
    if not alive:
        problems.append("the server ended")
    if used:
        problems.append(f"{used} KV slots did not come back")
    trouble = sorted({line.strip()[:300] for line in text.splitlines() if TROUBLE.search(line)})
    problems += [f"log: {line}" for line in trouble]
    for name, a, b in (("GPU", before[0], after[0]), ("host", before[1], after[1])):
        if a is not None and b is not None and b - a > GROWTH_LIMIT_MIB:
            problems.append(f"{name} memory grew by {b - a} MiB")
    return {
        "requests": dict(counts + warm), "retractions": text.count("KV cache pool is full"), "used_slots": used,
        "gpu_mib": [before[0], after[0]], "host_mib": [before[1], after[1]], "problems": problems,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--algorithm", choices=("plain", "DFLASH", "DDTREE"), default="DDTREE")
    parser.add_argument("--mode", choices=("off", "validate", "on"), default="on", help="--kdtree-verify")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--start-timeout", type=float, default=300)
    parser.add_argument("--commit", help="what the header says, where there is no git checkout")
    args = parser.parse_args(argv)
    import torch
    from verify_bench.results import commit, gpu_info

    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = run(args, args.out.with_suffix(".log"))
    header = {
        "format": FORMAT, "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": args.commit or commit(ROOT), "device": args.device,
        "gpu": gpu_info() if args.device == "cuda" else None, "versions": {"torch": torch.__version__},
        "algorithm": args.algorithm, "mode": args.mode, "page_size": args.page_size, "clients": args.clients,
        "seconds": args.seconds,
    }  # fmt: skip
    args.out.write_text(json.dumps({"header": header, **result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
