# SPDX-License-Identifier: Apache-2.0
"""An untrained target whose tokens depend on their context, an untrained drafter for it, and what it answers."""

import sys

import torch
from e2e.servers import MODELS

from sglang.kernels.ops.sampling.murmur_hash_torch import murmur_hash32_torch

sys.path.insert(0, str(MODELS))
from training.architecture import NUM_DRAFTS, VOCAB_SIZE, Drafter, KVCache, Target  # noqa: E402
from training.checkpoint import load_target, save_drafter, save_target  # noqa: E402

# No prompt begins with another one. Those of the second half are sampled, by a seed each.
GREEDY_PROMPTS = [
    "import os\ndef main(",
    "The tree is verified in one pass because",
    "x = [1, 2, 3]\n",
    "def f(a, b):",
]
SAMPLED_PROMPTS = ["class Reader:\n", "for i in range(10):", "It was late, and", "return {"]
SEEDS = [11, 12, 13, 2**31 + 7]
# The untrained target is unsure: at 1 the noise alone would choose, and no wrong row of KV would show.
TEMPERATURE = 0.2
NUM_TOKENS = 48
DRAFT_DEPTH = NUM_DRAFTS  # of a block: its tokens but the root


def make_models(directory):
    """Write directory/target and directory/drafter. -> the target, as it was rounded"""
    torch.manual_seed(5)
    target = Target()
    # As initialised, a token depends little on anything but the one before it. Louder attention makes every wrong
    # row of a mask, and every wrong row of KV, change what follows.
    for layer in target.layers:
        layer.self_attn.o_proj.weight.data *= 12
    save_target(target, directory / "target", MODELS / "target" / "tokenizer.json")
    save_drafter(Drafter(1, 128), directory / "drafter")
    return load_target(directory / "target")


def truth_of(target, tokenizer):
    """[(prompt ids, the next NUM_TOKENS ids)] of all prompts, the greedy ones first; in torch alone."""
    kinds = [(prompt, None) for prompt in GREEDY_PROMPTS] + list(zip(SAMPLED_PROMPTS, SEEDS, strict=True))
    prompts = [tokenizer.encode(prompt).ids for prompt, _ in kinds]
    return [(ids, continuation(target, ids, seed)) for ids, (_, seed) in zip(prompts, kinds, strict=True)]


@torch.no_grad()
def continuation(target, ids, seed):
    """The next NUM_TOKENS ids; greedy without a seed, else sampled at TEMPERATURE."""
    cache = [KVCache(1, len(ids) + NUM_TOKENS, torch.float32, torch.device("cpu")) for _ in target.layers]
    tokens, given = list(ids), list(ids)
    for _ in range(NUM_TOKENS):
        hidden, _ = target(torch.tensor([given]), cache, len(tokens) - len(given))
        logits = target.lm_head(hidden[0, -1])
        if seed is not None:
            logits = (logits / TEMPERATURE).double() + gumbel_noise(seed, position=len(tokens) - 1)
        given = [int(logits.argmax())]
        tokens += given
    return tokens[len(ids) :]


def gumbel_noise(seed, position):
    """float64 [vocabulary]: SGLang's, of a seed and the position of the token before the drawn one."""
    bits = murmur_hash32_torch(torch.tensor([seed]), torch.tensor([position]), torch.arange(VOCAB_SIZE))[0]
    return -(-(bits.double() / (2**32 - 1)).log()).log()
