# SPDX-License-Identifier: Apache-2.0
"""pip in the environment: what it does is shown, all that it says is logged, and a failure is told with its remedy."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PROGRESS = ("Collecting ", "Downloading ", "Processing ", "Building wheel", "Installing collected", "Successfully inst")
RETRYING = re.compile(r"WARNING: Retrying .*after connection broken by '(\w+)")
CUDA_LIBRARIES = re.compile(r"(Collecting|Downloading) nvidia[-_](cublas|cuda[-_]runtime|cudnn)")
CUDA_NOTE = (
    "    note: this index has torch with CUDA alone, some GB that are not used here. PyTorch's CPU index has none:\n"
    "    Ctrl-C, then make again with PIP_EXTRA_INDEX_URL=... set to it"
)
BEGINS = "Installing collected packages"  # from this line on, an interruption leaves the environment half-made
QUIET_S = 20  # a line of life after this long without one
TAIL_LINES = 25

# What pip says, and what to do. The first that fits is told; the cause of a failure stands before its consequences.
REMEDIES = [
    (
        r"No space left on device|Errno 28\]|Disk quota exceeded",
        "the disk is full. Make room, or name other places for temporary files and pip's cache (TMPDIR, PIP_CACHE_DIR)",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "the package index could not be trusted. Behind a proxy that signs by itself, name its certificate: "
        "PIP_CERT=/path/to/ca.pem",
    ),
    (
        r"ProxyError|Cannot connect to proxy|407 Proxy",
        "the proxy does not let pip through. See HTTPS_PROXY and NO_PROXY, and `pip config list`",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|NewConnectionError|ConnectionRefused"
        r"|ConnectTimeout|Failed to establish a new connection|Network is unreachable|ReadTimeout|Connection broken",
        "the package index cannot be reached. See the network, the proxy (HTTPS_PROXY) or the mirror (PIP_INDEX_URL, "
        "`pip config list`)",
    ),
    (
        r"no wheel of sglang==|from versions: none|No matching distribution found",
        "the index has no such package for this Python. A mirror may lack it; see PIP_INDEX_URL and `pip config list`",
    ),
    (
        r"THESE PACKAGES DO NOT MATCH THE HASHES|sha256 is \w+, UPSTREAM.toml says",
        "a download was damaged or is not the pinned file. Empty the cache (pip cache purge) and try again",
    ),
    (
        r"[gc]\+\+'? failed: No such file|command '\S*(gcc|g\+\+|cc)' failed|unable to execute",
        "a package is built here and its compiler failed. Debian, Ubuntu: apt install g++",
    ),
    (r"Permission denied|Errno 13\]", "a file belongs to another user. Was make run with sudo? chown the checkout"),
]


class Failed(Exception):
    """pip ended with an error, which is the text; `began`: it may have left the environment half-made."""

    def __init__(self, text: str, began: bool):
        super().__init__(text)
        self.began = began


def run(command: list[str], *, log: Path, environment: Mapping[str, str], lock: int, note: str = "") -> None:
    """Run pip to its end. The lock's descriptor is handed on, so that a pip that outlives us still holds it.

    `note` is printed once, when the libraries of CUDA are about to be downloaded.
    """
    said: list[str] = []
    began = False
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            text=True,
            errors="replace",
        )
        try:
            for line in lines_of(process):
                file.write(f"{time.strftime('%H:%M:%S')} {line}")
                file.flush()
                said.append(line.strip())
                began = began or said[-1].startswith(BEGINS)
                show(said[-1])
                if note and CUDA_LIBRARIES.match(said[-1]):
                    print(note, flush=True)
                    note = ""
            code = process.wait()
        except BaseException as stopped:
            end(process)
            raise Failed("setup: stopped; make again continues", began) from stopped
    if code:
        raise Failed(explanation(said, code, log), began)


def lines_of(process: subprocess.Popen) -> Iterator[str]:
    """The output line by line; a sign of life on the terminal when there is none for a while."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    started = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=QUIET_S)
        except queue.Empty:
            print(f"    ... {time.monotonic() - started:.0f} s", flush=True)
            continue
        if line is None:
            return
        yield line


def show(line: str) -> None:
    if line.startswith(PROGRESS):
        print(f"    {line[:110]}", flush=True)
    elif match := RETRYING.match(line):
        print(f"    no connection ({match[1]}), pip tries again", flush=True)


def explanation(said: list[str], code: int, log: Path) -> str:
    if code < 0:
        guess = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"setup: pip was ended by {signal.Signals(-code).name}{guess}; make again continues. All it said: {log}"
    text = "\n".join(said)
    found = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, text)), None)
    errors = [line for line in said if line.startswith("ERROR")][:3] if found else said[-TAIL_LINES:]
    head = f"setup: {found}, then make again." if found else "setup: pip failed. The end of what it said:"
    return "\n".join([head, *(f"    {line[:300]}" for line in errors), f"    All of it: {log}"])


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def settings(chosen: str) -> dict[str, str]:
    """The user's own environment, proxy and index included, less what would install somewhere else."""
    elsewhere = {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONHOME", "PYTHONPATH"}
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return kept | {"PIP_USER": "0", "SGL_KERNEL_SM120_CUDA": "1" if chosen == "cuda" else "0"}
