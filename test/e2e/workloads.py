# SPDX-License-Identifier: Apache-2.0
"""Requests that every server is given, so that their answers can be compared."""

import random

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
SAMPLES = 400
SAMPLED_TOKENS = 4


def sampled_batch(first_seed):
    """The same prompt many times at temperature 1, each time with another seed: the answers are the same in every run,
    and samples of two servers are independent where their seeds are."""
    common = {"temperature": 1.0, "max_new_tokens": SAMPLED_TOKENS, "ignore_eos": True}
    return [SAMPLED_PROMPT] * SAMPLES, [common | {"sampling_seed": first_seed + i} for i in range(SAMPLES)]
