# SPDX-License-Identifier: Apache-2.0
"""An untrained target whose tokens depend on their context, and an untrained drafter for it."""

import sys

import torch
from e2e.servers import MODELS

sys.path.insert(0, str(MODELS))
from training.architecture import NUM_DRAFTS, Drafter, Target, generate  # noqa: E402
from training.checkpoint import load_target, save_drafter, save_target  # noqa: E402

PROMPTS = ["import os\ndef main(", "The tree is verified in one pass because", "x = [1, 2, 3]\n", "def f(a, b):"]
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


def greedy_truth(target, tokenizer):
    """[(prompt ids, the next NUM_TOKENS ids)], in torch alone."""
    truth = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        answer = generate(target, torch.tensor([ids]), NUM_TOKENS, torch.zeros(1))[0, len(ids) :]
        truth.append((ids, answer.tolist()))
    return truth
