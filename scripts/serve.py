# SPDX-License-Identifier: Apache-2.0
"""Start the server and say when it answers.

    serve.py --device cpu|cuda [--model MODEL [--draft DRAFT]] [--port N] [--args='SERVER FLAGS']

Without a model it serves the small one of test/models, which needs no GPU. Ctrl-C, or the end of this program in any
other way, ends the server and every process of it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = (ROOT / "test" / "models" / "target", ROOT / "test" / "models" / "drafter")
TREE = ["--attention-backend", "kdtree_sm120", "--speculative-algorithm", "DDTREE"]
# The pool is bounded, or SGLang would take all memory.
SMALL_FLAGS = ["--max-total-tokens", "16384", "--speculative-num-draft-tokens", "32"]
# Greedy answers with and without drafts are equal in float32; the CUDA kernel takes bfloat16.
SMALL_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
# Named, or a GPU whose driver is broken would be passed over for the CPU. An idle scheduler polls, and would keep one
# of the few cores busy.
DEVICE_FLAGS = {"cpu": ["--device", "cpu", "--sleep-on-idle"], "cuda": ["--device", "cuda"]}
HOST = "127.0.0.1"
READY_WITHIN_S = 1800  # a large model loads for minutes
STOP_WITHIN_S = 20
PR_SET_PDEATHSIG = 1  # prctl: the signal that a process gets when its parent ends

# To this machine, whatever proxy is set.
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="path or name; default: the small model")
    parser.add_argument("--draft", default="", help="its DFlash drafter; without one the model is served plainly")
    parser.add_argument("--port", default="30000")
    parser.add_argument("--args", default="", help="more flags for the server, as one string: --args='--tp 8'")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    args = parser.parse_args()
    args.port = port_number(args.port)
    command, environment = server(args)
    refuse_busy_port(args.port)
    print("serve: " + shlex.join(command), flush=True)
    for end in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, stop_once)
    # Of a session of its own: Ctrl-C reaches this program alone, which then ends the server in order.
    process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=end_with_parent)
    try:
        if not wait_until_ready(process, args.port):
            return process.returncode or 1
        print(ready_message(args.port), flush=True)
        code = process.wait()
        print(f"serve: the server stopped with exit code {code}; its last messages are above", flush=True)
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        return 0
    finally:
        stop(process)


def stop_once(number: int, _) -> None:
    """make hands on what the whole group may have got already; the second one must not disturb the clean-up."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def server(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    small = not args.model
    if small and args.draft:
        raise SystemExit(f"serve: DRAFT={args.draft} without MODEL: give both, or neither")
    if small and not SMALL[0].is_dir():
        raise SystemExit(f"serve: {SMALL[0]} is not here: this clone has no small model; give MODEL=... and DRAFT=...")
    model, draft = map(str, SMALL) if small else (place("MODEL", args.model), place("DRAFT", args.draft))
    flags = ["--model-path", model, "--host", HOST, "--port", str(args.port)]
    flags += ["--attention-backend", "kdtree_sm120"] if not draft else [*TREE, "--speculative-draft-model-path", draft]
    flags += ["--dtype", SMALL_DTYPE[args.device], *SMALL_FLAGS] if small else []
    flags += DEVICE_FLAGS[args.device]
    environment = without_proxy(os.environ)
    if args.device == "cpu":
        # Two OpenMP pools that spin on the same cores are ten times slower than one thread each.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
    if all(Path(path).exists() for path in (model, draft) if path):
        environment.setdefault("HF_HUB_OFFLINE", "1")
    try:
        more = shlex.split(args.args)
    except ValueError as error:
        raise SystemExit(f"serve: ARGS={args.args}: {error}") from None
    return [sys.executable, "-m", "sglang.launch_server", *flags, *more], environment


def place(name: str, value: str) -> str:
    """A directory, or the name of a model on a hub. What can only be a directory has to be one."""
    path = Path(value).expanduser()
    if not value or path.is_dir():
        return str(path) if value else ""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", value):
        raise SystemExit(f"serve: {name}={value}: there is no such directory")
    return value


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The server asks itself for a first answer; a proxy would not find it."""
    changed = dict(environment)
    before = changed.get("no_proxy") or changed.get("NO_PROXY")
    changed["no_proxy"] = changed["NO_PROXY"] = ",".join(filter(None, [before, HOST, "localhost"]))
    return changed


def port_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise SystemExit(f"serve: PORT={text}: a port is a number from 1 to 65535")
    return int(text)


def refuse_busy_port(port: int) -> None:
    """Another server there would answer /health for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise SystemExit(f"serve: port {port} is for root only; choose another: make serve PORT=30000") from None
        except OSError as error:
            raise SystemExit(
                f"serve: port {port} is in use ({error.strerror}); choose another: make serve PORT={next_free(port)}"
            ) from None


def next_free(port: int) -> int:
    for other in range(port + 1, 65536):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, other))
            return other
    return 30000


def end_with_parent() -> None:
    """In the child: when this program is killed, the server ends too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_until_ready(process: subprocess.Popen, port: int) -> bool:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with direct.open(f"http://{HOST}:{port}/health", timeout=5) as answer:
                if answer.status == 200 and process.poll() is None:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    if process.poll() is None:
        print(f"serve: no answer from /health within {READY_WITHIN_S} s", flush=True)
    else:
        print(f"serve: the server stopped with exit code {process.returncode}; its last messages are above", flush=True)
    return False


def ready_message(port: int) -> str:
    sampling = {"max_new_tokens": 32, "temperature": 0}
    body = json.dumps({"text": "The cat sat on the mat. The cat sat on", "sampling_params": sampling})
    proxied = urllib.request.getproxies().get("http") and not urllib.request.proxy_bypass(HOST)
    curl = f"curl --noproxy {HOST} -s" if proxied else "curl -s"
    return (
        f"\nserve: ready on http://{HOST}:{port} (Ctrl-C stops it). Try:\n\n"
        f"    {curl} http://{HOST}:{port}/generate -H 'Content-Type: application/json' \\\n        -d '{body}'\n"
    )


def stop(process: subprocess.Popen) -> None:
    """End the server and what it started. A second Ctrl-C does not wait for an orderly end."""
    if process.poll() is None:
        print("serve: stopping", flush=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(timeout=STOP_WITHIN_S)
    # Its scheduler and detokenizer are of its session, and outlive a server that was killed.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
