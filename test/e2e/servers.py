# SPDX-License-Identifier: Apache-2.0
"""Real servers for tests: ``python -m sglang.launch_server`` on a CPU, one at a time."""

from __future__ import annotations

import ctypes
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
# A start takes 20 s on an idle machine of two cores.
START_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 600

# One thread a rank: the machines that run this have two cores, and libgomp spins.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}

TARGET = ["--model-path", str(MODELS / "target"), "--device", "cpu", "--dtype", "float32"]


def speculative(algorithm: str, drafter: pathlib.Path = MODELS / "drafter") -> list[str]:
    return ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(drafter)]


class Server:
    def __init__(self, arguments: Iterable[str], log: pathlib.Path, env: Mapping[str, str] = {}):
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--host", "127.0.0.1"]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2]],
                env=os.environ | ENVIRONMENT | dict(env), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def wait_until_ready(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server stopped with {self.process.returncode}:\n{self.log_tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except (requests.ConnectionError, requests.Timeout):
                pass
            time.sleep(0.2)
        raise TimeoutError(f"no answer after {START_TIMEOUT_S} s:\n{self.log_tail()}")

    def log_tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            pass
        # The scheduler and the detokenizer are of the same session, and outlive a server that was killed.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def post(self, path: str, **payload: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=payload, timeout=REQUEST_TIMEOUT_S)

    def generate(self, prompts: list[Any], parameters: Any, **fields: Any) -> list[dict[str, Any]]:
        """All prompts (texts, or lists of token ids) at once. parameters: of all, or a list, one of each."""
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        response = self.post("/generate", **{key: prompts}, sampling_params=parameters, **fields)
        assert response.status_code == 200, response.text + self.log_tail()
        return response.json()

    def used_slots(self) -> int:
        """KV slots that are neither free nor only kept by the prefix cache."""
        (load,) = requests.get(f"{self.url}/v1/loads", timeout=30).json()["loads"]
        return load["num_used_tokens"]

    def assert_all_slots_are_back(self) -> None:
        deadline = time.monotonic() + 15
        while (used := self.used_slots()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert used == 0, f"{used} KV slots are lost"
        assert self.process.poll() is None, self.log_tail()


def end_with_parent() -> None:
    """In the child: a test run that is killed leaves no server behind."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Servers:
    """At most one server: an idle scheduler polls, and would take a core from the next one."""

    def __init__(self, logs: pathlib.Path):
        self.logs = logs
        self.running: Server | None = None
        self.description: tuple | None = None
        self.started = 0

    def get(self, arguments: Iterable[str], env: Mapping[str, str] = {}) -> Server:
        description = (tuple(arguments), tuple(sorted(env.items())))
        if description != self.description:
            self.stop()
            self.started += 1
            self.running = Server(arguments, self.logs / f"server-{self.started}.log", env)
            self.running.wait_until_ready()
            self.description = description
        return self.running

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()
        self.running = self.description = None


def token_ids(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


def meta(outputs: list[dict[str, Any]], name: str) -> list[Any]:
    return [output["meta_info"][name] for output in outputs]
