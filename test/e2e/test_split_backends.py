# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 beside another backend: one for prefill, kdtree_sm120 for what follows. And prefill in chunks that are
mixed with the decode steps of other requests."""

import re

import pytest
from e2e.servers import TARGET, meta, speculative, token_ids
from e2e.workloads import GREEDY

pytestmark = pytest.mark.server

SPLIT = ["--prefill-attention-backend", "torch_reference", "--decode-attention-backend", "kdtree_sm120"]
POOL = ["--max-total-tokens", "4096", "--max-running-requests", "8"]
NUM_TOKENS = 48


def answer(server, expected):
    entries = [entry for entry in expected if entry["prompt_tokens"] < 200][:4]
    outputs = server.generate([entry["prompt"] for entry in entries], GREEDY | {"max_new_tokens": NUM_TOKENS})
    assert token_ids(outputs) == [entry["tokens"][:NUM_TOKENS] for entry in entries]
    server.assert_all_slots_are_back()
    return outputs


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_trees_are_verified_by_the_backend_that_is_asked(servers, expected, mode):
    """--speculative-attention-mode says whose part a verification is."""
    other = "prefill" if mode == "decode" else "decode"
    split = [f"--{mode}-attention-backend", "kdtree_sm120", f"--{other}-attention-backend", "torch_reference"]
    tree = [*speculative("DDTREE"), "--speculative-num-draft-tokens", "8", "--speculative-attention-mode", mode]
    server = servers.get([*TARGET, *POOL, *split, *tree, "--kdtree-verify", "validate"])
    outputs = answer(server, expected)
    assert all(steps < NUM_TOKENS / 2 for steps in meta(outputs, "spec_verify_ct"))
    servers.stop()
    log = server.log.read_text()
    backends = {mode: "kdtree_sm120", other: "torch_reference"}
    assert "decode_backend={decode}, prefill_backend={prefill}".format(**backends) in log
    last = re.findall(r"kdtree_sm120 validate: (\d+) rows compared, (\d+) over the limit", log)[-1]
    assert int(last[0]) > 0 and last[1] == "0"


@pytest.mark.parametrize("algorithm", ["plain", "DDTREE"])
def test_decode_steps_take_part_in_chunks_of_a_prefill(servers, expected, algorithm):
    more = [*SPLIT]
    if algorithm == "DDTREE":
        more = ["--attention-backend", "kdtree_sm120", *speculative("DDTREE"), "--speculative-num-draft-tokens", "8"]
    server = servers.get([*TARGET, *POOL, *more, "--enable-mixed-chunk", "--chunked-prefill-size", "16"])
    answer(server, expected)
    assert re.search(r"Prefill batch.*#running-req: [1-9]", server.log.read_text())
