# SPDX-License-Identifier: Apache-2.0
"""The offline walk: its tree, its counts against expected_steps.json, and what contract errors cost."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from training.acceptance import CONTRACT_ERRORS, answer_of, by_kind
from training.checkpoint import load_drafter, load_target
from training.make_expected_steps import (
    NUM_TOKENS,
    SMALLEST_MARGIN,
    SMALLEST_ROUTER_MARGIN,
    TREE_NODES,
    WANTED,
    count_steps,
    walk_name,
)
from training.model_card import CARD, render
from training.offline_walk import CHAIN, StepCounter, best_first_paths, greedy_continuation, loop_start

MODELS = Path(__file__).parent
EXPECTED = json.loads((MODELS / "expected_steps.json").read_text())
ACCEPTANCE = json.loads((MODELS / "acceptance.json").read_text())
KINDS = by_kind(EXPECTED["entries"])


@pytest.fixture(scope="module")
def models():
    return load_target(MODELS / "target"), load_drafter(MODELS / "drafter")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


# -------------------------------------------------------------------------------------------- the tree


def all_paths(marginals: list[list[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Every rank path with its weight, in the order of the definition."""
    paths = []
    for depth in range(1, len(marginals) + 1):
        for path in itertools.product(*(range(len(row)) for row in marginals[:depth])):
            paths.append((sum(marginals[d][r] for d, r in enumerate(path)), path))
    return sorted(paths, key=lambda item: (-item[0], len(item[1]), item[1]))


@settings(max_examples=300, deadline=None)
@given(
    marginals=st.lists(st.lists(st.integers(-4, 0), min_size=1, max_size=4), min_size=1, max_size=4),
    count=st.integers(1, 40),
)
def test_best_first_paths_equal_sorting_all_paths(marginals, count):
    # Small integers: sums are exact and ties are common.
    marginals = [sorted(row, reverse=True) for row in marginals]
    assert best_first_paths(marginals, count) == all_paths(marginals)[:count]


def test_a_parent_comes_before_its_child_when_a_probability_is_one():
    paths = [path for _, path in best_first_paths([[0.0, -9.0]] * 3, 4)]
    assert paths == [(0,), (0, 0), (0, 0, 0), (1,)]


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([1, 2, 3, 4], 4),
        ([9, 8, 1, 2, 1, 2, 1], 2),
        ([5, 5, 5], 0),
        ([1, 2, 3, 1, 2], 5),  # less than two periods
        ([7, 1, 2, 3, 1, 2, 3], 1),
    ],
)
def test_loop_start(tokens, start):
    assert loop_start(tokens) == start


# ------------------------------------------------------------------------------------ expected_steps.json


def test_the_file_holds_what_tests_need():
    assert {kind: len(entries) for kind, entries in KINDS.items()} == WANTED
    for entry in EXPECTED["entries"]:
        assert len(entry["tokens"]) == NUM_TOKENS
        assert entry["margin"] >= SMALLEST_MARGIN
        assert entry["router_margin"] >= SMALLEST_ROUTER_MARGIN
        assert set(entry["steps"]) == {"plain", "chain", *(walk_name(nodes) for nodes in TREE_NODES)}
        assert entry["steps"]["plain"] == NUM_TOKENS - 1
        # A block of 8 commits 1 to 8 tokens.
        assert all(-(-(NUM_TOKENS - 1) // 8) <= count < NUM_TOKENS for count in entry["steps"].values())
    assert max(entry["prompt_tokens"] for entry in KINDS["long"]) > 2048


@pytest.mark.parametrize("kind", ["code", "prose", "repeat", "noise", "long"])
def test_the_walk_reproduces_the_recorded_counts(kind, models, tokenizer):
    entry = KINDS[kind][0]
    answer = greedy_continuation(models[0], tokenizer.encode(entry["prompt"]).ids, NUM_TOKENS)
    assert answer.tokens == entry["tokens"]
    steps, margin = count_steps(*models, answer)
    assert steps == entry["steps"]
    assert min(margin, answer.margin) >= SMALLEST_MARGIN / 2


def test_a_walk_commits_every_token_once(models, tokenizer):
    answer = answer_of(tokenizer, KINDS["code"][1])
    counter = StepCounter(*models, answer)
    for nodes in (CHAIN, 2, 8, 64):
        walk = counter.walk(nodes)
        assert sum(walk.lengths) == NUM_TOKENS - 1
        assert walk.starts == [sum(walk.lengths[:i]) for i in range(walk.steps)]
        assert all(1 <= length <= 8 for length in walk.lengths)
    assert max(counter.walk(2).lengths) == 2  # the root and one draft


def test_a_larger_tree_accepts_at_least_as_much_at_every_root(models, tokenizer):
    answer = answer_of(tokenizer, KINDS["code"][2])
    counter = StepCounter(*models, answer)
    for start in range(0, NUM_TOKENS - 8, 5):
        wanted = answer.tokens[start + 1 : start + 8]
        accepted = [counter._accept_tree(start, wanted, nodes)[0] for nodes in (2, 8, 16, 32, 64)]
        assert accepted == sorted(accepted)


# ------------------------------------------------------------------------------------------- acceptance


def test_acceptance_adds_up_to_the_recorded_counts():
    for kind, entries in KINDS.items():
        for walk, figures in ACCEPTANCE["greedy"][kind]["walks"].items():
            assert figures["steps"] == sum(entry["steps"][walk] for entry in entries), (kind, walk)
            assert figures["tokens"] == NUM_TOKENS * len(entries)
            assert figures["accept_length"] == round(figures["tokens"] / figures["steps"], 3)


def test_acceptance_reaches_what_the_project_asks_for():
    code = ACCEPTANCE["greedy"]["code"]["walks"]
    assert code["chain"]["accept_length"] >= 2.75
    assert code["tree32"]["accept_length"] >= 3.5
    # Not only where greedy text has become a loop.
    assert code["chain"]["before_loop"] >= 2.75
    assert code["tree32"]["before_loop"] >= 3.5
    assert all(figures["accept_length"] >= 5 for figures in ACCEPTANCE["commit_length_probe"]["walks"].values())


def test_trees_beat_the_chain_on_sampled_code():
    walks = ACCEPTANCE["sampled"]["code"]["walks"]
    lengths = [walks[walk_name(nodes)]["accept_length"] for nodes in (CHAIN, *TREE_NODES)]
    assert lengths == sorted(lengths)
    assert walks["tree32"]["accept_length"] > 1.25 * walks["chain"]["accept_length"]


@pytest.mark.parametrize("error", [name for name in CONTRACT_ERRORS if name != "as trained"])
def test_a_contract_error_costs_acceptance(error, models, tokenizer):
    answers = [answer_of(tokenizer, entry) for entry in KINDS["code"][:3]]
    right = sum(entry["steps"]["chain"] for entry in KINDS["code"][:3])
    wrong = sum(StepCounter(*models, answer, CONTRACT_ERRORS[error]).walk().steps for answer in answers)
    recorded = ACCEPTANCE["contract_errors"]
    assert wrong > right  # an exact step count finds every one of them
    # On these prompts the error costs about what it costs on the recorded ones.
    cost, recorded_cost = wrong / right, recorded["as trained"] / recorded[error]
    assert 0.6 * recorded_cost < cost < 1.7 * recorded_cost


def test_the_model_card_shows_the_recorded_numbers():
    card = CARD.read_text()
    assert render(card) == card, "run python -m training.model_card"
