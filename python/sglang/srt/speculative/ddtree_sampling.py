# SPDX-License-Identifier: Apache-2.0
"""The target's token after every node of a tree.

Each one is the argmax, or an exact sample, of the request's adjusted distribution at that
node. Walking the tree along these tokens therefore keeps the distribution of plain
decoding, and needs no rejection step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch

from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler


def adjust_logits(
    logits: torch.Tensor, info: SamplingBatchInfo, num_nodes: int, grammar_mask
) -> None:
    """Apply processors, penalties, grammar and bias, in plain decoding's order. In place.

    Penalties are those of the committed tokens, at every node: the rule for
    speculative decoding.
    """
    if info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, info, num_tokens_in_batch=num_nodes)
    sanitize_nan_logits(logits, "DDTREE verify: target logits")
    if info.acc_additive_penalties is not None:
        logits.add_(per_node(info.acc_additive_penalties, num_nodes))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, per_node(info.acc_scaling_penalties, num_nodes))
    penalizers = info.penalizer_orchestrator
    if penalizers is not None and penalizers.is_required:
        penalizers.apply(logits, repeat=num_nodes)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        logits.add_(per_node(info.logit_bias, num_nodes))


def target_tokens(
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    num_nodes: int,
    sampler: Sampler,
) -> torch.Tensor:
    """Adjusted logits [b * N, vocab], positions [b * N] of the nodes -> int64 [b, N].

    A request's seed is used together with the position, so a seeded request draws at each
    position what plain decoding draws there.
    """
    if info.is_all_greedy:
        return logits.argmax(dim=-1).view(-1, num_nodes)
    expanded = expand_sampling_info(info, num_nodes)
    probs = (logits.float() / expanded.temperatures).softmax(dim=-1)
    unfiltered = not (
        info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    )
    tokens, _ = sampler._sample_from_probs(probs, expanded, positions, unfiltered)
    return tokens.long().view(-1, num_nodes)


def expand_sampling_info(info: SamplingBatchInfo, num_nodes: int) -> SamplingBatchInfo:
    """The parameters of drawing a token, a row a node."""
    return SamplingBatchInfo(
        temperatures=per_node(info.temperatures, num_nodes),
        top_ps=per_node(info.top_ps, num_nodes),
        top_ks=per_node(info.top_ks, num_nodes),
        min_ps=per_node(info.min_ps, num_nodes),
        sampling_seed=per_node(info.sampling_seed, num_nodes),
        is_all_greedy=info.is_all_greedy,
        is_any_greedy=info.is_any_greedy,
        need_top_p_sampling=info.need_top_p_sampling,
        need_top_k_sampling=info.need_top_k_sampling,
        need_min_p_sampling=info.need_min_p_sampling,
        max_top_k=info.max_top_k,
        vocab_size=info.vocab_size,
        device=info.device,
    )


def per_node(values: Optional[torch.Tensor], num_nodes: int) -> Optional[torch.Tensor]:
    return None if values is None else values.repeat_interleave(num_nodes, dim=0)
