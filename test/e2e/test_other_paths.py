# SPDX-License-Identifier: Apache-2.0
"""DDTREE on two tensor-parallel ranks, in validate mode."""

import time

import pytest
from e2e.servers import TARGET, meta, speculative, token_ids
from e2e.workloads import GREEDY

pytestmark = pytest.mark.server

POOL = ["--max-total-tokens", "4096", "--max-running-requests", "8"]
TREE_OF_8 = [*speculative("DDTREE"), "--speculative-num-draft-tokens", "8"]


def check(server, entries, num_tokens, walk=None):
    outputs = server.generate([entry["prompt"] for entry in entries], GREEDY | {"max_new_tokens": num_tokens})
    assert token_ids(outputs) == [entry["tokens"][:num_tokens] for entry in entries]
    if walk:
        assert meta(outputs, "spec_verify_ct") == [entry["steps"][walk] for entry in entries]
    server.assert_all_slots_are_back()


def test_two_ranks_validating(servers, expected):
    """gloo, a vocabulary split in two: tokens and verify steps are those of one rank. Both kernels run, and agree."""
    server = servers.get(
        [*TARGET, *POOL, *TREE_OF_8, "--attention-backend", "kdtree_sm120", "--tp-size", "2",
         "--kdtree-verify", "validate"],
        {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )  # fmt: skip
    check(server, [entry for entry in expected if entry["prompt_tokens"] < 200][:2], 128, "tree8")

    def reports_of(rank):
        return [x for x in server.log.read_text().splitlines() if "kdtree_sm120 validate:" in x and rank in x]

    # After each answer the server is idle and says what is new, also where the number of steps asks for no report.
    for _ in range(3):
        before = [len(reports_of(rank)) for rank in ("TP0", "TP1")]
        server.generate(["The cat"], {"temperature": 0, "max_new_tokens": 2})
        deadline = time.monotonic() + 60
        while any(len(reports_of(rank)) <= n for rank, n in zip(("TP0", "TP1"), before, strict=True)):
            assert time.monotonic() < deadline, server.log.read_text()[-3000:]
            time.sleep(0.1)
    servers.stop()
    reports = [line for line in server.log.read_text().splitlines() if "kdtree_sm120 validate:" in line]
    assert all(" 0 over the limit" in report for report in reports)
    # The first may come before anything was verified; the last sums all of them up.
    for rank in ("TP0", "TP1"):
        last = [report for report in reports if rank in report][-1]
        assert int(last.partition("validate: ")[2].split()[0]) > 0
