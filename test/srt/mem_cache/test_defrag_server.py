# SPDX-License-Identifier: Apache-2.0
"""Real servers under churn: the tokens are those computed in torch without a server,
whatever moves; after every step each slot has one owner, and the ranks have the same
slots; and slots did move.

The pool has half of the slots that 12 requests need at a time, so that cached prefixes
are evicted and read again all the time.
"""

import json
import re
from typing import NamedTuple

import pytest
import requests
from e2e.servers import MODELS, TARGET, meta, speculative, token_ids

pytestmark = pytest.mark.server

POOL = 1536
COMMON = [
    *TARGET,
    "--attention-backend",
    "kdtree_sm120",
    "--max-total-tokens",
    str(POOL),
    "--max-running-requests",
    "12",
    "--enable-metrics",
]
DDTREE = [
    *speculative("DDTREE"),
    "--speculative-num-draft-tokens",
    "16",
    # Requests that hold nearly all of the pool leave no run to move to.
    "--max-running-requests",
    "4",
]
TP2 = ["--tp-size", "2", "--enable-metrics-for-all-schedulers"]
# Upstream's two looks at the owners of all slots after each step, and ours.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
NEW_TOKENS = 96
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
# Its rows share slots, and have no request.
BEAMS = GREEDY | {"beam_width": 3, "max_new_tokens": 32}


class Case(NamedTuple):
    tier: str
    core: str
    options: list[str]
    prompts: int = 16
    ranks: int = 1
    beams: int = 0
    env: dict[str, str] = {}


CASES = {
    "off": Case("off", "python", DDTREE),
    "tier0": Case("tier0", "python", DDTREE),
    # Four requests at a time leave gaps that are worth a move only after some churn.
    # The second of two prefills in a row comes at the drained boundary of the overlap loop.
    "tier1": Case(
        "tier1",
        "rust",
        DDTREE,
        prompts=24,
        env={"SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP": "1"},
    ),
    "tier1-normal-loop": Case("tier1", "python", ["--disable-overlap-schedule"], beams=1),
    "tier1-tp2": Case("tier1", "rust", [*DDTREE, *TP2], prompts=24, ranks=2),
}
CORES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}


@pytest.fixture
def entries(case):
    """Of code, the shortest: a server still evicts some pools of tokens."""
    every = json.loads((MODELS / "expected_steps.json").read_text())["entries"]
    code = [entry for entry in every if entry["kind"] == "code"]
    return sorted(code, key=lambda entry: entry["prompt_tokens"])[: case.prompts]


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def server(servers, case):
    env = STRICT | {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": case.core} | case.env
    if case.ranks == 2:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    flags = ["--kv-defrag", case.tier]
    if case.tier == "tier1":
        flags += ["--kv-defrag-copy-budget", "256K"]
    return servers.get([*COMMON, *case.options, *flags], env)


def by_rank(server, name):
    """Rank -> value of a metric."""
    text = requests.get(f"{server.url}/metrics", timeout=600).text
    found = re.findall(rf'^{re.escape(name)}{{.*tp_rank="(\d+)".*}} (\S+)$', text, re.M)
    return {int(rank): float(value) for rank, value in found}


def ranks_that_say(log, text):
    """Of one rank the lines have no rank in front."""
    return sorted(int(rank or 0) for rank in re.findall(rf"^\[\S+ \S+?(?: TP(\d+))?\] {text}", log, re.M))


def test_tokens_are_those_of_torch(server, case, entries):
    """Twice all prompts, in two orders: what a wave leaves in the cache is read, and
    evicted, by the next. Beam searches find the same among requests that are moved."""
    prompts = [entry["prompt"] for entry in entries]
    alone = server.generate(prompts[: case.beams], BEAMS) if case.beams else []
    for wave in (entries, entries[::-1]):
        asked = [entry["prompt"] for entry in wave] + prompts[: case.beams]
        outputs = server.generate(asked, [GREEDY] * len(wave) + [BEAMS] * case.beams)
        expected = [entry["tokens"][:NEW_TOKENS] for entry in wave]
        assert token_ids(outputs) == expected + token_ids(alone)
    assert sum(meta(outputs, "cached_tokens")) > 0
    server.assert_all_slots_are_back()

    log, ranks = server.log.read_text(), list(range(case.ranks))
    assert f"Tree Core: {CORES[case.core]}\n" in log
    evicted = by_rank(server, "sglang:evicted_tokens_total")
    assert sorted(evicted) == ranks and min(evicted.values()) > 3 * POOL
    if case.tier == "off":
        assert "KV defragmentation" not in log and not by_rank(server, "sglang:kv_defrag_runs_total")
        return
    assert ranks_that_say(log, f"KV defragmentation: {case.tier} active") == ranks
    compared = " and compared between the ranks" if case.ranks > 1 else ""
    assert ranks_that_say(log, f"KV slots are counted after every step{compared}\\.") == ranks
    assert sorted(by_rank(server, "sglang:kv_runs_per_request")) == ranks
    assert all(longest > 0 for longest in by_rank(server, "sglang:kv_longest_run_tokens").values())
    if case.tier == "tier1":
        assert ranks_that_say(log, "KV defragmentation: tier1 moves up to") == ranks
        assert ranks_that_say(log, "The KV of running requests is compared after every step") == ranks
        assert "KV relocation failed" not in log
        moved = by_rank(server, "sglang:kv_defrag_bytes_moved_total")
        assert sorted(moved) == ranks
        assert len(set(moved.values())) == 1 and moved[0] > 0, "nothing was moved: the test shows nothing"
