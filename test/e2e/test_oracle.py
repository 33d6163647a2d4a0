# SPDX-License-Identifier: Apache-2.0
"""Greedy equality where it is hard: an untrained target whose tokens depend on the context, and drafts that hide the
true continuation at rank 0 to 2, so that accepted paths wind through the tree.

A trained or biased model hides errors: it goes on as before when a row of the mask or of KV is wrong. Here the same
server shows that it would notice: the same prompts fail when the tree is verified as a chain, and when the accepted KV
is not moved.
"""

import json

import pytest
from e2e.oracle_models import NUM_TOKENS, PROMPTS, greedy_truth, make_models
from e2e.servers import MODELS, meta, speculative, token_ids
from e2e.workloads import GREEDY

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

CONFIGURATIONS = {
    "page 1, overlap": ["--page-size", "1", "--speculative-num-draft-tokens", "16"],
    "page 16, no overlap": ["--page-size", "16", "--speculative-num-draft-tokens", "40", "--disable-overlap-schedule"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """-> (directory of the two models, file of the truth, the true continuations)"""
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("oracle")
    target = make_models(directory)
    truth = greedy_truth(target, Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json")))
    (directory / "truth.json").write_text(json.dumps(truth))
    return directory, [answer for _, answer in truth]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A directory for PYTHONPATH with the test aid and its entry point."""
    directory = tmp_path_factory.mktemp("plugin")
    source = MODELS.parent / "e2e" / "oracle_plugin" / "oracle_draft.py"
    (directory / source.name).write_text(source.read_text())
    info = directory / "oracle_draft-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oracle-draft\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\noracle_draft = oracle_draft:install\n")
    return directory


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=list(CONFIGURATIONS))
def server(request, models, plugin, servers):
    directory, _ = models
    arguments = [
        "--model-path", str(directory / "target"), "--device", "cpu", "--dtype", "float32",
        "--max-total-tokens", "8192", "--attention-backend", "kdtree_sm120",
        *speculative("DDTREE", directory / "drafter"),
    ]  # fmt: skip
    return servers.get(
        [*arguments, *CONFIGURATIONS[request.param]],
        {"PYTHONPATH": python_path(plugin), "ORACLE_TRUTH": str(directory / "truth.json")},
    )


def python_path(directory):
    import os

    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def ask(server, kind):
    requests = {"rid": [f"{kind}-{i}" for i in range(len(PROMPTS))]}
    return server.generate(PROMPTS, GREEDY | {"max_new_tokens": NUM_TOKENS}, **requests)


def test_the_truth_depends_on_the_context(models):
    """Two different tokens follow the same token, in every answer: else a wrong mask could not show."""
    for answer in models[1]:
        followers = {}
        for token, follower in zip(answer, answer[1:], strict=False):
            followers.setdefault(token, set()).add(follower)
        assert len(set(answer)) > 10 and max(map(len, followers.values())) > 1


def test_trees_are_verified_and_compacted_exactly(server, models):
    outputs = ask(server, "sound")
    assert token_ids(outputs) == models[1]
    assert min(meta(outputs, "spec_accept_length")) > 1.5, "hardly anything was accepted: the test says nothing"
    # The second time prompt and answer are in the prefix cache, with the KV that compaction moved.
    assert token_ids(ask(server, "again")) == models[1]
    server.assert_all_slots_are_back()


@pytest.mark.parametrize("part", ["mask", "move"])
def test_it_fails_when_a_part_is_left_out(server, models, part):
    """mask: the tree is verified as a chain. move: accepted KV stays where the tree put it."""
    wrong = [ours != true for ours, true in zip(token_ids(ask(server, part)), models[1], strict=True)]
    assert all(wrong)
    server.post("/flush_cache?timeout=10")  # wrong KV must not stay behind
    assert token_ids(ask(server, f"after {part}")) == models[1]
