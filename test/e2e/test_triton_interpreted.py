# SPDX-License-Identifier: Apache-2.0
"""Upstream's real Triton MLA kernels, interpreted on a CPU, and kdtree_sm120 over them: the form that runs on a GPU,
without graphs. A few tokens only: the interpreter takes about a second a step."""

import re

import pytest
from e2e.servers import TARGET, meta, speculative, token_ids
from e2e.workloads import GREEDY

pytestmark = pytest.mark.server

NUM_TOKENS = 12
INTERPRETED = {"TRITON_INTERPRET": "1"}
TREE = [
    *TARGET, "--max-total-tokens", "4096", *speculative("DDTREE"), "--speculative-num-draft-tokens", "8",
    "--skip-server-warmup", "--attention-backend",
]  # fmt: skip
KDTREE = [*TREE, "kdtree_sm120", "--kdtree-verify"]


@pytest.fixture(scope="module")
def prompts(expected):
    """The two shortest of code, whose tokens torch computed without a server, in float32 without near ties."""
    code = [entry for entry in expected if entry["kind"] == "code"]
    return sorted(code, key=lambda entry: len(entry["prompt"]))[:2]


def answer(server, prompts):
    outputs = server.generate([p["prompt"] for p in prompts], GREEDY | {"max_new_tokens": NUM_TOKENS})
    assert token_ids(outputs) == [p["tokens"][:NUM_TOKENS] for p in prompts]
    assert max(meta(outputs, "spec_verify_ct")) < NUM_TOKENS - 1, "nothing was accepted: no tree was verified"
    return server.log.read_text(errors="replace")


def test_validate_compares_the_kernels_and_returns_the_stock_result(servers, prompts):
    log = answer(servers.get([*KDTREE, "validate"], INTERPRETED), prompts)
    assert "kdtree_sm120 over Triton, tp rank 0: verify validate" in log
    reports = re.findall(r"validate: (\d+) rows compared, (\d+) over the limit, .* mean (\S+) max .*, (\d+) mism", log)
    assert reports, log[-3000:]
    rows, over, mean_rel, mismatches = reports[-1]
    assert int(rows) >= 8 and over == mismatches == "0"
    # float32 on both sides; bf16 rounds coarser (docs/validate.md).
    assert float(mean_rel) < 1e-5


def test_on_gives_the_tokens_of_the_reference(servers, prompts):
    drafter = ["--speculative-draft-attention-backend", "kdtree_sm120"]
    log = answer(servers.get([*KDTREE, "on", *drafter], INTERPRETED), prompts)
    assert "kdtree_sm120 over Triton, tp rank 0: verify on" in log
    assert "kdtree_sm120 draft block over Triton: 8 tokens" in log
    assert "to the stock backend:" not in log


def test_upstreams_kernels_verify_the_same_tree(servers, prompts):
    """They read it from a FULL mask. Five nodes of eight slots: fewer than the drafter's block."""
    server = servers.get([*TREE, "triton", "--speculative-ddtree-budget", "5"], INTERPRETED)
    answer(server, prompts)
    server.assert_all_slots_are_back()
