# SPDX-License-Identifier: Apache-2.0
"""A forked server is what a started one is: the same processes, with their names, and nothing of it stays behind."""

from pathlib import Path

import pytest
from e2e.servers import TARGET

pytestmark = pytest.mark.server


def processes(session):
    """{pid: (parent, command line)} of the living processes of a session."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, parent, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if int(its_session) == session and state != "Z":
            found[int(folder.name)] = int(parent), line
    return found


def test_its_processes_and_their_end(servers):
    server = servers.get([*TARGET, "--attention-backend", "kdtree_sm120", "--max-total-tokens", "4096"])
    names = {line.split()[0] for parent, line in processes(server.pid).values() if parent == server.pid}
    assert {"sglang::scheduler", "sglang::detokenizer"} <= names
    servers.stop()
    assert processes(server.pid) == {} and server.returncode == 0


def test_a_server_whose_scheduler_dies_ends_and_says_so(servers):
    returncode, log = servers.run([*TARGET, "--attention-backend", "kdtree_sm120", "--max-total-tokens", "1"])
    assert returncode != 0 and "Traceback" in log


def test_a_variable_that_imports_read_is_refused(servers):
    """SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION is one: a forked server would go on with the value of the imports."""
    with pytest.raises(
        AssertionError, match="SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.* was read while sglang was imported"
    ):
        servers.run(TARGET, {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"})
