# SPDX-License-Identifier: Apache-2.0
"""The best tokens of each draft position, with log-probabilities over the whole
vocabulary, from a head whose vocabulary is split over the ranks."""

from __future__ import annotations

import torch

from sglang.srt.speculative.dflash_utils import is_dense_head_weight


def top_candidates(
    hidden: torch.Tensor, lm_head: torch.nn.Module, num_ranks: int, tp_group
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, d] -> (log-probabilities fp32 [n, k], token ids int64 [n, k]), best first.

    k is num_ranks, or the vocabulary where that is smaller. A rank of the group sends its
    own k best and its log-sum-exp, never its logits.
    """
    logits, first_token = local_logits(hidden, lm_head)
    norm = logits.logsumexp(dim=-1, keepdim=True)
    best, token = logits.topk(min(num_ranks, logits.shape[-1]), dim=-1)
    token = token + first_token
    if tp_group.world_size == 1:
        return best - norm, token
    # Shards may differ in width, an all-gather may not.
    short = num_ranks - best.shape[-1]
    best = torch.nn.functional.pad(best, (0, short), value=float("-inf"))
    token = torch.nn.functional.pad(token, (0, short))
    best = tp_group.all_gather(best, dim=-1)
    token = tp_group.all_gather(token, dim=-1)
    norm = tp_group.all_gather(norm, dim=-1).logsumexp(dim=-1, keepdim=True)
    best, order = best.topk(num_ranks, dim=-1)
    return best - norm, token.gather(-1, order)


def local_logits(
    hidden: torch.Tensor, lm_head: torch.nn.Module
) -> tuple[torch.Tensor, int]:
    """fp32 logits of this rank's real vocabulary entries, and the id of the first."""
    weight = getattr(lm_head, "weight", None)
    shard = getattr(lm_head, "shard_indices", None)
    size = None if shard is None else int(shard.num_org_elements)
    if is_dense_head_weight(weight):
        logits = hidden.to(weight.dtype) @ weight[:size].T
    else:
        logits = lm_head.quant_method.apply(lm_head, hidden, None)[:, :size]
    return logits.float(), 0 if shard is None else int(shard.org_vocab_start_index)
