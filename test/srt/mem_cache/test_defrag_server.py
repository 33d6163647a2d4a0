# SPDX-License-Identifier: Apache-2.0
"""Real servers under churn: the tokens are those computed in torch without a server,
whatever moves; after every step each slot has one owner; and slots did move.

The pool is small, so that cached prefixes are evicted and read again all the time.
"""

import json
import re

import pytest
import requests
from e2e.servers import MODELS, TARGET, Servers, meta, speculative, token_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

COMMON = [
    *TARGET,
    "--attention-backend",
    "kdtree_sm120",
    "--max-total-tokens",
    "3072",
    "--max-running-requests",
    "12",
    "--enable-metrics",
]
DDTREE = [*speculative("DDTREE"), "--speculative-num-draft-tokens", "16"]
# Two looks at the owners of all slots after each step: counts, and one by one.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
GREEDY = {"temperature": 0.0, "max_new_tokens": 128, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    pool = Servers(tmp_path_factory.mktemp("defrag-servers"))
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def entries():
    return json.loads((MODELS / "expected_steps.json").read_text())["entries"][:24]


def metric(server, name):
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    values = re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)
    return [float(value) for value in values]


def check_under_churn(server, entries):
    """Twice all prompts, in two orders: what a wave leaves in the cache is read, and
    evicted, by the next."""
    for wave in (entries, entries[::-1]):
        outputs = server.generate([entry["prompt"] for entry in wave], GREEDY)
        assert token_ids(outputs) == [entry["tokens"] for entry in wave]
    assert sum(meta(outputs, "cached_tokens")) > 0
    server.assert_all_slots_are_back()


@pytest.mark.parametrize(
    "tier, options",
    [
        ("tier0", DDTREE),
        ("tier1", DDTREE),
        ("tier1", ["--disable-overlap-schedule"]),
        ("tier1", [*DDTREE, "--tp-size", "2"]),
    ],
    ids=["tier0-ddtree", "tier1-ddtree", "tier1-plain-normal-loop", "tier1-ddtree-tp2"],
)
def test_tokens_are_those_of_torch(servers, entries, tier, options):
    env = STRICT
    if "--tp-size" in options:
        env = env | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    budget = ["--kv-defrag", tier, "--kv-defrag-copy-budget", "256K"]
    server = servers.get([*COMMON, *options, *budget], env)
    check_under_churn(server, entries)
    log = server.log.read_text()
    ranks = 2 if "--tp-size" in options else 1
    assert log.count(f"KV defragmentation: {tier} active") == ranks
    assert "KV relocation failed" not in log
    moved = metric(server, "sglang:kv_defrag_bytes_moved_total")
    if tier == "tier1":
        assert moved and moved[0] > 0, "nothing was moved: the test shows nothing"
        assert log.count("tier1 moves up to") == ranks
