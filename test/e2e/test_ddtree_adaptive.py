# SPDX-License-Identifier: Apache-2.0
"""DDTREE with an adaptive budget, a drafter that sees a window, a context that ends soon, and metrics: the greedy
tokens stay those of plain decoding, whatever was verified. And what a request can ask for: stop tokens, bias, min-p,
penalties, a grammar.
"""

import re

import pytest
import requests
from e2e import workloads
from e2e.servers import TARGET, meta, speculative, token_ids
from e2e.workloads import GREEDY

pytestmark = pytest.mark.server

CONTEXT = 256
ADAPTIVE = [
    *TARGET, "--max-total-tokens", "8192", "--attention-backend", "kdtree_sm120", *speculative("DDTREE"),
    "--speculative-num-draft-tokens", "32", "--speculative-ddtree-budget", "auto",
    "--speculative-draft-window-size", "48", "--context-length", str(CONTEXT), "--enable-metrics",
]  # fmt: skip
TOKENS = 48


@pytest.fixture
def server(servers):
    server = servers.get(ADAPTIVE)
    yield server
    server.assert_all_slots_are_back()


@pytest.fixture(scope="module")
def entries(expected):
    """Prompts and answers that fit into the context."""
    fitting = [entry for entry in expected if entry["prompt_tokens"] + TOKENS < CONTEXT - 1]
    assert len(fitting) >= 10
    return fitting


def totals_of(output):
    values = output["meta_info"]["ddtree"]
    assert values[:-1] == [None] * (len(values) - 1)
    return values[-1]


def test_greedy_tokens_do_not_depend_on_the_budget(server, entries):
    """All at once, then one at a time: the batch's size, its scores and the measured costs choose the width."""
    outputs = server.generate([entry["prompt"] for entry in entries], GREEDY | {"max_new_tokens": TOKENS})
    assert token_ids(outputs) == [entry["tokens"][:TOKENS] for entry in entries]
    for entry in entries[:4]:
        (output,) = server.generate([entry["prompt"]], GREEDY | {"max_new_tokens": TOKENS})
        assert output["output_ids"] == entry["tokens"][:TOKENS]


def test_the_window_leaves_the_drafter_its_sight(server, entries):
    """Of prompts longer than the window. A drafter that reads the wrong slots has hardly any draft accepted."""
    long = [entry for entry in entries if entry["kind"] == "code" and entry["prompt_tokens"] > 60]
    outputs = server.generate([entry["prompt"] for entry in long], GREEDY | {"max_new_tokens": TOKENS})
    assert sum(meta(outputs, "spec_verify_ct")) * 1.5 < TOKENS * len(long)


def test_counters_in_meta_info_and_metrics(server, entries):
    before = metrics_of(server)
    (output,) = server.generate([entries[0]["prompt"]], GREEDY | {"max_new_tokens": TOKENS})
    totals, info = totals_of(output), output["meta_info"]
    assert len(info["ddtree"]) == TOKENS
    assert totals["steps"] == info["spec_verify_ct"] == sum(totals["stops"].values())
    histogram = info["spec_correct_drafts_histogram"]
    by_depth = [0] * len(histogram)
    for stop, count in totals["stops"].items():
        by_depth[int(stop.partition(":")[0])] += count
    assert by_depth == histogram
    assert totals["tree_tokens"] == sum(count * (depth + 1) for depth, count in enumerate(histogram))
    assert totals["steps"] <= totals["chain_tokens"]
    assert totals["tree_tokens"] <= totals["nodes_built"] <= totals["nodes_verified"]
    after = metrics_of(server)
    for name, total in (
        ("steps_total", "steps"), ("nodes_built_total", "nodes_built"), ("nodes_verified_total", "nodes_verified"),
        ("tree_accept_length_sum", "tree_tokens"), ("chain_accept_length_sum", "chain_tokens"),
        ("chain_longer_total", "chain_longer"), ("stops_total", "steps"),
    ):  # fmt: skip
        assert after.get(name, 0) - before.get(name, 0) == totals[total], name


def metrics_of(server):
    """{name: sum over its labels} of our metrics."""
    sums = {}
    for line in requests.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        name, _, rest = line.partition("{")
        if name.startswith("sglang:ddtree_"):
            name = name.removeprefix("sglang:ddtree_")
            sums[name] = sums.get(name, 0) + float(rest.rpartition(" ")[2])
    return sums


def test_a_stream_ends_with_the_totals(server, entries):
    response = requests.post(
        f"{server.url}/generate", timeout=120, stream=True,
        json={"text": entries[0]["prompt"], "sampling_params": GREEDY | {"max_new_tokens": TOKENS}, "stream": True},
    )  # fmt: skip
    import json

    chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith(b"data: {")]
    assert len(chunks) > 2
    assert [chunk["meta_info"]["ddtree"][-1] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["output_ids"] == entries[0]["tokens"][:TOKENS]
    assert totals_of(chunks[-1])["steps"] == chunks[-1]["meta_info"]["spec_verify_ct"]


def test_the_context_ends_inside_a_reservation(server, entries, expected):
    """Twice the widest tree is reserved behind each request, also where the context has less room. The request beside
    it in the table of slots, a row further, keeps its own."""
    longest = sorted((e for e in expected if e["prompt_tokens"] < CONTEXT - 40), key=lambda e: -e["prompt_tokens"])[:4]
    short = sorted(entries, key=lambda e: e["prompt_tokens"])[:4]
    mixed = [entry for pair in zip(longest, short, strict=True) for entry in pair]
    limits = [GREEDY | {"max_new_tokens": min(128, CONTEXT - entry["prompt_tokens"])} for entry in mixed]
    outputs = server.generate([entry["prompt"] for entry in mixed], limits)
    for output, entry in zip(outputs, mixed, strict=True):
        room = min(128, CONTEXT - entry["prompt_tokens"] - 2)  # upstream keeps two
        assert output["output_ids"] == entry["tokens"][:room]
        assert output["meta_info"]["finish_reason"]["type"] == "length"
    assert any(len(output["output_ids"]) < 128 for output in outputs), "no request reached the end of the context"


def test_a_stop_token_inside_an_accepted_path(server, entries):
    """As an end-of-sequence token: the answer ends there, and what was accepted beyond it is dropped."""
    cut_inside = 0
    for entry in entries[:6]:
        tokens = entry["tokens"][:TOKENS]
        stop = tokens[len(tokens) // 2]
        (output,) = server.generate(
            [entry["prompt"]], {"temperature": 0, "max_new_tokens": TOKENS, "stop_token_ids": [stop]}
        )
        end = tokens.index(stop) + 1
        assert output["output_ids"] == tokens[:end]
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        cut_inside += end > 1 and totals_of(output)["tree_tokens"] + 1 > end
    assert cut_inside, "no stop token fell inside an accepted path"


def test_a_logit_bias_holds_at_every_node(server, entries):
    prompt, tokens = entries[0]["prompt"], entries[0]["tokens"]
    (output,) = server.generate([prompt], GREEDY | {"max_new_tokens": 24, "logit_bias": {str(tokens[0]): 1000}})
    assert output["output_ids"] == [tokens[0]] * 24
    banned = {str(token): -1000 for token in set(tokens[:8])}
    (output,) = server.generate([prompt], GREEDY | {"max_new_tokens": 24, "logit_bias": banned})
    assert not {int(token) for token in banned} & set(output["output_ids"])


def test_sampling_without_a_seed(server, entries):
    """A sampled request keeps to its filters: where min_p leaves one token, the draw is the greedy one. A request
    without filters is drawn in the same steps."""
    some = entries[:4]
    free = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    prompts = [entry["prompt"] for entry in [*some, some[0]]]
    outputs = server.generate(prompts, [free | {"min_p": 1.0}] * len(some) + [free])
    assert token_ids(outputs[:-1]) == [entry["tokens"][:24] for entry in some]
    assert len(outputs[-1]["output_ids"]) == 24


def test_a_penalty_breaks_a_loop(server, entries):
    """That of the committed tokens applies at every node: a token may repeat inside one tree, not over many steps."""
    looping = min(entries, key=lambda entry: len(set(entry["tokens"][:TOKENS])))
    parameters = GREEDY | {"max_new_tokens": TOKENS, "frequency_penalty": 2.0}
    (output,) = server.generate([looping["prompt"]], parameters)
    assert len(set(output["output_ids"])) > len(set(looping["tokens"][:TOKENS]))


def test_min_new_tokens_ends(server, entries):
    """A stop token is held back until enough is committed, and then no longer."""
    tokens = entries[0]["tokens"]
    common = max(set(tokens[8:40]), key=tokens[8:40].count)
    asked = {"temperature": 0, "max_new_tokens": 70, "min_new_tokens": 8, "stop_token_ids": [common]}
    (output,) = server.generate([entries[0]["prompt"]], asked)
    assert len(output["output_ids"]) >= 8
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": common}


def test_a_grammar_holds_over_any_width(server):
    (output,) = server.generate(*workloads.grammar_batch())
    assert re.fullmatch("[a-c]{3}(x|yz)*y?[0-9]{0,4}", output["text"])
    assert totals_of(output)["steps"] >= 1
