# SPDX-License-Identifier: Apache-2.0
"""Real servers for tests: ``python -m sglang.launch_server`` on a CPU, one at a time, forked by fork_server.py."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import requests

MODELS = pathlib.Path(__file__).parent.parent / "models"
# Against what hangs; a start takes seconds on an idle machine, and minutes on a busy one.
START_TIMEOUT_S = REQUEST_TIMEOUT_S = 1200

# One thread a rank: the machines that run this have two cores, and libgomp spins.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}

# After every step, and not only when idle: each KV slot is free, cached or of one request; none is free twice, or free
# and of a request.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}

# What decides while modules are imported.
IMPORT_TIME = ("TRITON_INTERPRET",)

TARGET = ["--model-path", str(MODELS / "target"), "--device", "cpu", "--dtype", "float32", "--sleep-on-idle"]


def speculative(algorithm: str, drafter: pathlib.Path = MODELS / "drafter") -> list[str]:
    return ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(drafter)]


class ForkServer:
    """The process that forks servers, with an environment of those variables that imports read."""

    def __init__(self, env: Mapping[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("fork_server.py"))],
            env=os.environ | ENVIRONMENT | dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=end_with_parent,
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Server:
    def __init__(self, parent: ForkServer, arguments: Iterable[str], log: pathlib.Path, env: Mapping[str, str] = {}):
        self.log = log
        self.parent = parent
        command = list(arguments)
        if "--port" not in command:
            command += ["--host", "127.0.0.1", "--port", str(free_port())]
        self.url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
        self.returncode: int | None = None
        self.free_at_start: int | None = None
        self.headers: dict[str, str] = {}
        log.touch()
        whole = os.environ | ENVIRONMENT | dict(env)
        self.pid = parent.ask(start=command, env=whole, own=dict(env), log=str(log))
        assert isinstance(self.pid, int), self.pid

    def poll(self) -> int | None:
        """None while it runs, then its exit code."""
        if self.returncode is None:
            self.returncode = self.parent.ask(status=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it still runs after so many seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.returncode

    def wait_until_ready(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.poll() is not None:
                raise RuntimeError(f"the server stopped with {self.returncode}:\n{self.log_tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=60).status_code == 200:
                    return self
            except (requests.ConnectionError, requests.Timeout):
                pass
            time.sleep(0.1)
        raise TimeoutError(f"no answer after {START_TIMEOUT_S} s:\n{self.log_tail()}")

    def log_tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def kill(self) -> None:
        """At once; its children end with it. To end by itself takes it two seconds of a core."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end, and wait until nothing of it is left."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        self.wait(timeout=60)
        # The scheduler and the detokenizer are of the same session, and outlive a server that was killed.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.wait(timeout=60)

    def post(self, path: str, **payload: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=payload, headers=self.headers, timeout=REQUEST_TIMEOUT_S)

    def generate(self, prompts: list[Any], parameters: Any, **fields: Any) -> list[dict[str, Any]]:
        """All prompts (texts, or lists of token ids) at once. parameters: of all, or a list, one of each."""
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        response = self.post("/generate", **{key: prompts}, sampling_params=parameters, **fields)
        assert response.status_code == 200, response.text + self.log_tail()
        return response.json()

    def free_slots(self) -> int:
        """KV slots that a request could have, once nothing runs: the free ones, and what only the prefix cache keeps.

        From a report that the scheduler makes when it is idle, after upstream's own check for leaks.
        """
        deadline, asked = time.monotonic() + 120, time.time()
        while time.monotonic() < deadline:
            # Goes through the scheduler, which reports when it is idle again; left alone it does so once a second.
            self.fetch("/server_info")
            load = self.load()
            if load["timestamp"] > asked and not load["num_running_reqs"] + load["num_waiting_reqs"]:
                return load["max_total_num_tokens"] - load["num_used_tokens"]
            time.sleep(0.01)
        raise TimeoutError(f"not idle after 120 s, or no report of it:\n{self.log_tail()}")

    def load(self) -> dict[str, Any]:
        """The scheduler's latest report."""
        (load,) = self.fetch("/v1/loads")["loads"]
        return load

    def fetch(self, path: str) -> Any:
        response = requests.get(f"{self.url}{path}", headers=self.headers, timeout=REQUEST_TIMEOUT_S)
        assert response.status_code == 200, response.text + self.log_tail()
        return response.json()

    def assert_all_slots_are_back(self) -> None:
        """As many as before the first request of a test."""
        deadline = time.monotonic() + 120
        while (free := self.free_slots()) != self.free_at_start and time.monotonic() < deadline:
            time.sleep(0.1)
        assert free == self.free_at_start, "free KV slots now, and before"
        assert self.poll() is None, self.log_tail()


def end_with_parent() -> None:
    """In the child: a test run that is killed leaves no server behind."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Servers:
    """At most one server that answers, and one process that forks them for each environment that imports read."""

    def __init__(self, logs: pathlib.Path):
        self.logs = logs
        self.running: Server | None = None
        self.description: tuple | None = None
        self.started = 0
        self.ending: Server | None = None
        self.parents: dict[tuple, ForkServer] = {}

    def get(self, arguments: Iterable[str], env: Mapping[str, str] = {}, *, key: str = "") -> Server:
        """A server that answers; the one that runs if it is of this description. key: its API key, if it has one."""
        description = (tuple(arguments), tuple(sorted(env.items())))
        if description != self.description:
            self.retire()
            self.running = self.start(arguments, env)
            self.running.headers = {"Authorization": f"Bearer {key}"} if key else {}
            self.running.wait_until_ready()
            self.running.free_at_start = self.running.free_slots()
            assert self.running.free_at_start == self.running.load()["max_total_num_tokens"]
            self.description = description
        return self.running

    def retire(self) -> None:
        """The running server ends while the next one starts, and writes nothing more."""
        if self.running is not None:
            self.running.kill()
            self.reap()
            self.ending = self.running
        self.running = self.description = None

    def reap(self) -> None:
        if self.ending is not None:
            self.ending.stop()
        self.ending = None

    def run(self, arguments: Iterable[str], env: Mapping[str, str] = {}) -> tuple[int, str]:
        """A server that has to end by itself. -> (exit code, what it wrote)"""
        self.retire()
        server = self.start(arguments, env)
        returncode = server.wait(START_TIMEOUT_S)
        server.stop()
        assert returncode is not None, f"it still runs after {START_TIMEOUT_S} s:\n{server.log_tail()}"
        return returncode, server.log.read_text(errors="replace")

    def start(self, arguments: Iterable[str], env: Mapping[str, str]) -> Server:
        self.started += 1
        return Server(self.parent_for(env), arguments, self.logs / f"server-{self.started}.log", env)

    def parent_for(self, env: Mapping[str, str]) -> ForkServer:
        wanted = {name: value for name, value in (os.environ | dict(env)).items() if name in IMPORT_TIME}
        key = tuple(sorted(wanted.items()))
        if key not in self.parents:
            self.parents[key] = ForkServer(wanted)
        return self.parents[key]

    def stop(self) -> None:
        """The running server ends in its own way; returns when nothing of any server runs."""
        if self.running is not None:
            self.running.stop()
        self.running = self.description = None
        self.reap()

    def close(self) -> None:
        self.retire()
        self.reap()
        while self.parents:
            self.parents.popitem()[1].close()


def token_ids(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


def meta(outputs: list[dict[str, Any]], name: str) -> list[Any]:
    return [output["meta_info"][name] for output in outputs]
