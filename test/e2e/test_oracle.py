# SPDX-License-Identifier: Apache-2.0
"""Greedy equality where it is hard: an untrained target whose tokens depend on the context, and drafts that hide the
true continuation at rank 0 to 2, so that accepted paths wind through the tree.

A trained or biased model hides errors: it goes on as before when a row of the mask or of KV is wrong. Here the same
server shows that it would notice: the same prompts fail when the tree is verified as a chain, and when the accepted KV
is not moved.

Half of the prompts are sampled, by seeds, so that each page size meets each way of scheduling with sampling too; and
with a pool that runs full, stop strings and an abort.
"""

import heapq
import json

import pytest
from e2e.oracle_models import (
    DRAFT_DEPTH,
    GREEDY_PROMPTS,
    NUM_TOKENS,
    SAMPLED_PROMPTS,
    SEEDS,
    TEMPERATURE,
    make_models,
    truth_of,
)
from e2e.oracle_plugin.oracle_draft import candidates_of, log_probs_of
from e2e.plugins import plugin_environment
from e2e.servers import MODELS, STRICT, meta, speculative, token_ids
from e2e.workloads import GREEDY, check_abort, check_stop_strings

pytestmark = pytest.mark.server

# page size, overlap scheduling, nodes of a tree. A pool has room for half of the prompts at a time.
CONFIGURATIONS = [(1, True, 16), (16, False, 40), (1, False, 40), (16, True, 16)]
POOL = {16: 448, 40: 640}
GREEDILY = GREEDY | {"max_new_tokens": NUM_TOKENS}
PARAMETERS = [GREEDILY] * len(GREEDY_PROMPTS) + [
    {"temperature": TEMPERATURE, "sampling_seed": seed, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    for seed in SEEDS
]
HALVES = {"greedy": slice(0, len(GREEDY_PROMPTS)), "sampled": slice(len(GREEDY_PROMPTS), None)}


def name_of(configuration):
    page_size, overlap, num_nodes = configuration
    return f"page {page_size}, {'' if overlap else 'no '}overlap, {num_nodes} nodes"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """-> (directory of the two models, [(prompt ids, the true continuation)])"""
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("oracle")
    target = make_models(directory)
    truth = truth_of(target, Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json")))
    (directory / "truth.json").write_text(json.dumps(truth))
    return directory, truth


@pytest.fixture(scope="module")
def answers(models):
    return [answer for _, answer in models[1]]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    here = MODELS.parent / "e2e"
    modules = here / "oracle_plugin" / "oracle_draft.py", here / "admission_plugin" / "hasty_admission.py"
    return plugin_environment(tmp_path_factory.mktemp("plugin"), *modules)


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=name_of)
def configuration(request):
    return request.param


@pytest.fixture(scope="module")
def server(configuration, models, plugin, servers):
    directory, _ = models
    page_size, overlap, num_nodes = configuration
    return servers.get(
        [
            "--model-path", str(directory / "target"), "--device", "cpu", "--dtype", "float32",
            "--sleep-on-idle", "--max-total-tokens", str(POOL[num_nodes]), "--max-running-requests", "8",
            "--schedule-conservativeness", "0.01", "--enable-deterministic-inference",
            "--attention-backend", "kdtree_sm120", *speculative("DDTREE", directory / "drafter"),
            "--page-size", str(page_size), "--speculative-num-draft-tokens", str(num_nodes),
            *([] if overlap else ["--disable-overlap-schedule"]),
        ],
        plugin | STRICT | {"ORACLE_TRUTH": str(directory / "truth.json")},
    )  # fmt: skip


def ask(server, kind, half, times=1):
    """The answers to one half of the prompts. Not to both at once: by the same seed upstream draws another token in a
    batch with a request that has filters, and a greedy one has."""
    prompts = (GREEDY_PROMPTS + SAMPLED_PROMPTS)[HALVES[half]] * times
    requests = {"rid": [f"{kind}-{i}" for i in range(len(prompts))]}
    return server.generate(prompts, PARAMETERS[HALVES[half]] * times, **requests)


def paths_of_tree(log_probs, num_nodes):
    """The rank paths of a best-first tree, from a heap: the num_nodes - 1 most probable ones."""
    heap, paths = [(-log_probs[0][0], (0,))], set()
    while heap and len(paths) < num_nodes - 1:
        cost, path = heapq.heappop(heap)
        paths.add(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < len(log_probs[depth]):
            heapq.heappush(heap, (cost + log_probs[depth][rank] - log_probs[depth][rank + 1], (*path[:-1], rank + 1)))
        if depth + 1 < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth + 1][0], (*path, 0)))
    return paths


def count_steps(truth, num_nodes):
    """-> for each prompt, the verify steps that its answer takes."""
    depths, ranks = DRAFT_DEPTH, num_nodes - 1
    paths = paths_of_tree(log_probs_of(depths, ranks).tolist(), num_nodes)
    full = [prompt + answer for prompt, answer in truth]
    steps = [0] * len(truth)
    for row, (prompt, _) in enumerate(truth):
        known = len(prompt) + 1  # the prefill's token is the first root
        while known < len(full[row]):
            path = ()
            for drafts, token in zip(candidates_of(full, row, known, depths, ranks).tolist(), full[row][known:]):
                if token not in drafts or (*path, drafts.index(token)) not in paths:
                    break
                path += (drafts.index(token),)
            known += len(path) + 1
            steps[row] += 1
    return steps


def test_the_truth_depends_on_the_context(answers):
    """Two different tokens follow the same token, in every answer: else a wrong mask could not show."""
    for answer in answers:
        followers = {}
        for token, follower in zip(answer, answer[1:], strict=False):
            followers.setdefault(token, set()).add(follower)
        assert len(set(answer)) > 10 and max(map(len, followers.values())) > 1


def test_the_server_is_the_one_that_is_meant(server, configuration):
    """Upstream turns overlap scheduling off, and changes page sizes, for reasons of its own."""
    page_size, overlap, num_nodes = configuration
    (state,) = server.fetch("/server_info")["internal_states"]
    assert (state["page_size"], not state["disable_overlap_schedule"]) == (page_size, overlap)
    assert state["speculative_num_draft_tokens"] == num_nodes


@pytest.mark.parametrize("half", HALVES)
def test_trees_are_verified_and_compacted_exactly(server, configuration, models, answers, half):
    steps = count_steps(models[1], configuration[2])
    assert max(steps) < 0.7 * NUM_TOKENS, "hardly anything is accepted: the test says nothing"
    outputs = ask(server, "sound", half)
    assert token_ids(outputs) == answers[HALVES[half]]
    assert meta(outputs, "spec_verify_ct") == steps[HALVES[half]]
    server.assert_all_slots_are_back()


def test_a_full_pool_retracts_and_answers_the_same(server, answers):
    """Each prompt twice. Prompts and answers are in the prefix cache, with the KV that compaction moved."""
    outputs = ask(server, "again", "sampled", times=2)
    assert token_ids(outputs) == answers[HALVES["sampled"]] * 2
    assert sum(meta(outputs, "num_retractions")) > 0
    server.assert_all_slots_are_back()


def test_stop_strings_inside_accepted_paths(server):
    check_stop_strings(server, GREEDY_PROMPTS[0], NUM_TOKENS, ends=range(10, 60, 20))
    server.assert_all_slots_are_back()


def test_abort_beside_another_request(server, answers):
    assert check_abort(server, "1 + 1", GREEDY_PROMPTS[1], NUM_TOKENS) == answers[1]
    server.assert_all_slots_are_back()


# Both page sizes, with overlap and without.
@pytest.mark.parametrize("configuration", CONFIGURATIONS[:2], ids=name_of, indirect=True, scope="module")
@pytest.mark.parametrize("part", ["mask", "move"])
def test_it_fails_when_a_part_is_left_out(server, configuration, answers, part):
    """mask: the tree is verified as a chain. move: accepted KV stays where the tree put it."""
    half = "greedy" if configuration == CONFIGURATIONS[0] else "sampled"
    outputs = token_ids(ask(server, part, half))
    assert all(ours != true for ours, true in zip(outputs, answers[HALVES[half]], strict=True))
    assert server.post("/flush_cache?timeout=600").status_code == 200  # wrong KV must not stay behind
    assert token_ids(ask(server, f"after {part}", half)) == answers[HALVES[half]]
    server.assert_all_slots_are_back()
