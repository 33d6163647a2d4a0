# SPDX-License-Identifier: Apache-2.0
"""Requests that every server is given, so that their answers can be compared, and checks that hold for any server."""

import contextlib
import json
import random

import requests
from e2e.servers import REQUEST_TIMEOUT_S

GREEDY = {"temperature": 0, "ignore_eos": True}

# A conversation in turns: every turn's prompt begins with the last one's prompt and answer.
TURNS = ["import os\n\n\ndef main(", "\n\n\nclass Reader:\n", "\n    def close(self):\n", "\nif __name__"]
TURN_TOKENS = 24


def converse(server):
    """-> (token ids of each turn's answer, cached tokens of each turn)"""
    text, answers, cached = "", [], []
    for turn in TURNS:
        text += turn
        (output,) = server.generate([text], GREEDY | {"max_new_tokens": TURN_TOKENS})
        text += output["text"]
        answers.append(output["output_ids"])
        cached.append(output["meta_info"]["cached_tokens"])
    return answers, cached


def ragged_batch():
    """16 prompts of 5 to 110 tokens, many with a common beginning, and answers of 5 to 90."""
    rng = random.Random(1)
    shared = [[rng.randrange(40, 2000) for _ in range(rng.choice([5, 40, 90]))] for _ in range(6)]
    prompts = [
        rng.choice(shared)[: rng.randrange(4, 90)] + [rng.randrange(40, 2000) for _ in range(rng.randrange(1, 20))]
        for _ in range(16)
    ]
    return prompts, [GREEDY | {"max_new_tokens": rng.randrange(5, 90)} for _ in prompts]


def grammar_batch():
    """A short head, then what may go on for ever: a path of any depth meets the grammar."""
    return ["value = "], {"temperature": 0, "max_new_tokens": 24, "regex": "[a-c]{3}(x|yz)+[0-9]{4}"}


def seeded_batch():
    """Sampled requests, a seed each: without filters, and with top-p and top-k."""
    texts = [
        "def f(a, b):\n    return",
        "import os\ndef main(",
        "The tree is verified in one pass because",
        "x = [1, 2, 3]\n",
    ]
    kinds = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20}]
    prompts, parameters = [], []
    for seed, text in enumerate(texts):
        for kind in kinds:
            prompts.append(text)
            parameters.append(kind | {"max_new_tokens": 32, "ignore_eos": True, "sampling_seed": 100 + seed})
    return prompts, parameters


SAMPLED_PROMPT = "class Reader:\n    def __init__(self"
SAMPLED_TOKENS = 4


def sampled_batch(samples, first_seed):
    """The same prompt many times at temperature 1, each time with another seed: the answers are the same in every run,
    and samples of two servers are independent where their seeds are."""
    common = {"temperature": 1.0, "max_new_tokens": SAMPLED_TOKENS, "ignore_eos": True}
    return [SAMPLED_PROMPT] * samples, [common | {"sampling_seed": first_seed + i} for i in range(samples)]


def check_stop_strings(server, prompt, num_tokens, ends):
    """The answer ends at a string although the step accepted tokens beyond it. ends: where the strings begin in the
    answer without one."""
    (whole,) = server.generate([prompt], GREEDY | {"max_new_tokens": num_tokens})
    text = whole["text"]
    cut_inside = 0
    for start in ends:
        stop = text[start : start + 3]
        (output,) = server.generate([prompt], GREEDY | {"max_new_tokens": num_tokens, "stop": stop})
        assert output["text"] == text[: text.index(stop)]
        assert output["meta_info"]["finish_reason"]["matched"] == stop
        histogram = output["meta_info"]["spec_correct_drafts_histogram"]
        committed = sum(count * (drafts + 1) for drafts, count in enumerate(histogram)) + 1
        cut_inside += committed > output["meta_info"]["completion_tokens"]
    assert cut_inside, "no stop string fell inside an accepted path"


def check_abort(server, prompt, beside, num_tokens):
    """A request is aborted once it has answered something: its stream ends early and says so. -> the token ids of the
    greedy answer to the prompt `beside`, which ran meanwhile"""
    with stream(server, beside, num_tokens) as other, stream(server, prompt, 3500, rid="aborted") as aborted:
        next(other)
        assert next(aborted)["meta_info"]["finish_reason"] is None
        assert server.load()["num_used_tokens"] > 0
        assert server.post("/abort_request", rid="aborted").status_code == 200
        last = list(aborted)[-1]["meta_info"]
        answer = list(other)[-1]["output_ids"]
    assert last["finish_reason"]["type"] == "abort"
    assert last["completion_tokens"] < min(3500, server.free_at_start - last["prompt_tokens"] - 8)
    return answer


@contextlib.contextmanager
def stream(server, prompt, num_tokens, **fields):
    """The chunks of a greedy answer, as they come."""
    request = {"text": prompt, "stream": True, "sampling_params": GREEDY | {"max_new_tokens": num_tokens}} | fields
    with requests.post(f"{server.url}/generate", json=request, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith(b"data: {"))
