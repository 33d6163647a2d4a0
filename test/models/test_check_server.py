# SPDX-License-Identifier: Apache-2.0
"""The comparison of an engine's answers with the recorded ones notices what it should."""

from training.check_server import compare, engine_arguments, parse_override

ENTRY = {"kind": "code", "source": "queue.py:1-9", "tokens": [5, 6, 7], "steps": {"chain": 2, "tree8": 1}}


def answer(tokens: list[int], steps: int | None = None) -> dict:
    return {"output_ids": tokens, "meta_info": {} if steps is None else {"spec_verify_ct": steps}}


def test_equal_answers_pass():
    assert compare("chain", [ENTRY], [answer([5, 6, 7], 2)]) == []
    assert compare("plain", [ENTRY], [answer([5, 6, 7])]) == []


def test_a_different_token_is_named():
    (problem,) = compare("plain", [ENTRY], [answer([5, 9, 7])])
    assert "queue.py:1-9" in problem
    assert "from number 1 on" in problem
    (problem,) = compare("plain", [ENTRY], [answer([5, 6])])
    assert "from number 2 on" in problem


def test_a_different_step_count_is_named():
    (problem,) = compare("tree8", [ENTRY], [answer([5, 6, 7], 2)])
    assert "2 verify steps, expected 1" in problem
    (problem,) = compare("chain", [ENTRY], [answer([5, 6, 7])])  # an engine that did not speculate
    assert "None verify steps" in problem


def test_a_walk_selects_the_algorithm():
    assert "speculative_algorithm" not in engine_arguments("plain", {})
    assert engine_arguments("chain", {})["speculative_algorithm"] == "DFLASH"
    tree = engine_arguments("tree16", {"page_size": 16})
    assert (tree["speculative_algorithm"], tree["speculative_num_draft_tokens"], tree["page_size"]) == (
        "DDTREE",
        16,
        16,
    )


def test_overrides_are_read_as_json_where_they_are():
    assert parse_override("page_size=16") == ("page_size", 16)
    assert parse_override("disable_overlap_schedule=true") == ("disable_overlap_schedule", True)
    assert parse_override("attention_backend=kdtree_sm120") == ("attention_backend", "kdtree_sm120")
