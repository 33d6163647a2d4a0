# SPDX-License-Identifier: Apache-2.0
"""`make serve` as a newcomer meets it, for real: the ready line, the printed command, an idle server, Ctrl-C."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docs.documents import documented

ROOT = Path(__file__).resolve().parents[2]
IDLE_S = 4
TICKS = os.sysconf("SC_CLK_TCK")


def processes_of(session: int) -> dict[int, float]:
    """The living processes of a session, with the processor seconds that each has used."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


@pytest.mark.server
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_it_answers_sleeps_when_idle_and_leaves_nothing():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # This Python for .venv's, which is made, and nothing is left to make of it.
    words = [*documented("README.md", "make serve"), "-o", "environment", f"VENV={sys.executable}", "SET=cpu"]
    process = subprocess.Popen(
        [*words, f"PORT={port}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("        -d "):
                break
        assert f"serve: ready on http://127.0.0.1:{port}" in said, said
        example = said[said.index("    curl") :]
        typed = shlex.split(example.replace("\\\n", ""))
        assert typed == [word.replace("30000", str(port)) for word in documented("README.md", "curl -s")]
        answer = subprocess.run(["bash", "-c", example], capture_output=True, text=True, check=True).stdout
        answer = json.loads(answer)
        assert answer["text"].startswith(" the mat. The cat sat on the mat.")
        tokens, steps = answer["meta_info"]["completion_tokens"], answer["meta_info"]["spec_verify_ct"]
        assert tokens == 32 and steps <= 10  # the drafter has the phrase: several tokens a step

        assert "kdtree_sm120, DDTREE" in the_table_of_speeds(port)

        # make, serve.py, the server
        server = child_of(child_of(process.pid))
        time.sleep(1)
        before = processes_of(server)
        time.sleep(IDLE_S)
        used = {pid: seconds - before[pid] for pid, seconds in processes_of(server).items() if pid in before}
        assert len(used) >= 3  # the server, its scheduler, its detokenizer
        assert sum(used.values()) < 0.3 * IDLE_S, used

        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it; make ends by the signal then
        process.communicate(timeout=600)
        assert process.returncode in (-signal.SIGINT, 2)
        assert processes_of(server) == {}
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)


def the_table_of_speeds(port: int) -> str:
    """By the README's line, with a shorter context and answer."""
    _, *line = documented("README.md", ".venv/bin/python -m sglang.kdtree bench longctx")
    shorter = ["--contexts", "200", "--output-tokens", "16", "--url", f"http://127.0.0.1:{port}"]
    done = subprocess.run([sys.executable, *line, *shorter], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


def child_of(pid: int) -> int:
    return int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout)
