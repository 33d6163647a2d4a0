# SPDX-License-Identifier: Apache-2.0
"""The small model of test/models and its drafter's scores along an answer, in torch. Needs test/models on sys.path."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from training.checkpoint import load_drafter, load_target
from training.offline_walk import Continuation, draft_log_probs

from .arm import MODELS

__all__ = ["Continuation", "load_models", "log_probs_of"]


def load_models() -> tuple:
    """-> target, drafter, tokenizer"""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    return load_target(MODELS / "target"), load_drafter(MODELS / "drafter"), tokenizer


def log_probs_of(target, drafter, answer: Continuation) -> torch.Tensor:
    """fp32 [a, D, V]: of the block at each token of the answer but the last."""
    first = len(answer.prompt)
    anchors = list(range(first, first + len(answer.tokens) - 1))
    return draft_log_probs(target, drafter, answer.ids, anchors)
