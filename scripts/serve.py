# SPDX-License-Identifier: Apache-2.0
"""Start the server and say when it answers: scripts/serve.py [MODEL [DRAFT]] [--port N] [-- SERVER FLAGS].

Without a model it serves the small one of test/models, which needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = (ROOT / "test" / "models" / "target", ROOT / "test" / "models" / "drafter")
TREE = ["--attention-backend", "kdtree_sm120", "--speculative-algorithm", "DDTREE"]
# The pool is bounded, or SGLang would take all memory.
SMALL_FLAGS = ["--max-total-tokens", "16384", "--speculative-num-draft-tokens", "32"]
# Greedy answers with and without drafts are equal in float32; the CUDA kernel takes bfloat16.
SMALL_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
READY_WITHIN = 1800  # a large model loads for minutes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="path or name; default: the small model")
    parser.add_argument("--draft", default="", help="its DFlash drafter; without one the model is served plainly")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--args", default="", help="more flags for the server, as one string")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    args = parser.parse_args()
    command, environment = server(args)
    refuse_busy_port(args.port)
    print("serve: " + shlex.join(command), flush=True)
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if not wait_until_ready(process, args.port):
            return process.returncode or 1
        print(ready_message(args.port), flush=True)
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        stop(process)


def server(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    small = not args.model
    model, draft = map(str, SMALL) if small else (args.model, args.draft)
    local = [Path(path).exists() for path in (model, draft) if path]
    if small and args.draft:
        raise SystemExit(f"serve: DRAFT={args.draft} without MODEL: give both, or neither")
    if small and not Path(model).is_dir():
        raise SystemExit(f"serve: {model} is not here: this clone has no small model; give MODEL=... and DRAFT=...")
    flags = ["--model-path", model, "--host", "127.0.0.1", "--port", str(args.port)]
    flags += ["--attention-backend", "kdtree_sm120"] if not draft else [*TREE, "--speculative-draft-model-path", draft]
    flags += ["--dtype", SMALL_DTYPE[args.device], *SMALL_FLAGS] if small else []
    environment = dict(os.environ)
    if args.device == "cpu":
        flags += ["--device", "cpu"]
        # Two OpenMP pools that spin on the same cores are ten times slower than one thread each.
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
    if all(local):
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return [sys.executable, "-m", "sglang.launch_server", *flags, *shlex.split(args.args)], environment


def refuse_busy_port(port: int) -> None:
    """Another server there would answer /health for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SystemExit(
                f"serve: port {port} is in use ({error.strerror}); choose another: make serve PORT=..."
            ) from None


def wait_until_ready(process: subprocess.Popen, port: int) -> bool:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200 and process.poll() is None:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    if process.poll() is None:
        print(f"serve: no answer from /health within {READY_WITHIN} s", flush=True)
    else:
        print(f"serve: the server stopped with exit code {process.returncode}; its last messages are above", flush=True)
    return False


def ready_message(port: int) -> str:
    sampling = {"max_new_tokens": 32, "temperature": 0}
    body = json.dumps({"text": "The cat sat on the mat. The cat sat on", "sampling_params": sampling})
    return (
        f"\nserve: ready on http://127.0.0.1:{port} (Ctrl-C stops it). Try:\n\n"
        f"    curl -s http://127.0.0.1:{port}/generate -H 'Content-Type: application/json' \\\n        -d '{body}'\n"
    )


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
