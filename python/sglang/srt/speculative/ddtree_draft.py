# SPDX-License-Identifier: Apache-2.0
"""The best tokens of each draft position, with log-probabilities over the whole
vocabulary, from a head whose vocabulary is split over the ranks."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl

from sglang.srt.speculative.dflash_utils import is_dense_head_weight

# Entries of the vocabulary whose best one and whose sum are known after one pass.
CHUNK = 128
CHUNKS_OF_A_PROGRAM = 16
# Sums are relative to no less: a chunk of nothing but -inf has the sum 0, not NaN.
LOWEST = torch.finfo(torch.float32).min
# With fewer logits torch's own selection is as fast.
MANY_LOGITS = 4 << 20


def top_candidates(
    hidden: torch.Tensor, lm_head: torch.nn.Module, num_ranks: int, tp_group
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, d] -> (log-probabilities fp32 [n, k], token ids int64 [n, k]), best first.

    k is num_ranks, at most the vocabulary. Capture-safe: fixed shapes, no host read.

    A rank of the group sends its own k best and its log-sum-exp, never its logits: one
    all-gather of 2k + 1 numbers a row. All ranks choose from the same numbers, so they
    choose the same.
    """
    logits, first_token = local_logits(hidden, lm_head)
    best, token, norm = best_of(logits, min(num_ranks, logits.shape[-1]))
    token = token + first_token
    if tp_group.world_size == 1:
        return best - norm, token
    # Shards may differ in width, an all-gather may not.
    short = num_ranks - best.shape[-1]
    best = torch.nn.functional.pad(best, (0, short), value=float("-inf"))
    token = torch.nn.functional.pad(token, (0, short))
    as_bits = token.int().view(torch.float32)
    parts = tp_group.all_gather(torch.cat([best, as_bits, norm], dim=-1), dim=-1)
    parts = parts.unflatten(-1, (tp_group.world_size, 2 * num_ranks + 1))
    best, as_bits, norm = parts.split([num_ranks, num_ranks, 1], dim=-1)
    norm = norm.squeeze(-1).logsumexp(dim=-1, keepdim=True)
    best, order = best.flatten(1).topk(num_ranks, dim=-1)
    token = as_bits.flatten(1).view(torch.int32).gather(-1, order)
    return best - norm, token.long()


def best_of(
    logits: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits [n, v] -> the k best, fp32 [n, k], where they are, and fp32 [n, 1]: the
    log-sum-exp of all. Many are read once: a row's k best are in the k chunks that have
    the best maxima."""
    width = logits.shape[-1]
    if logits.numel() < MANY_LOGITS:
        logits = logits.float()
        return *logits.topk(k, dim=-1), logits.logsumexp(dim=-1, keepdim=True)
    best, total = chunks_of(logits)
    norm = (best + total.log()).logsumexp(dim=-1, keepdim=True)
    chosen = best.topk(min(k, best.shape[-1]), dim=-1).indices
    near = chosen[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)
    near = near.flatten(1)
    values = logits.gather(1, near.clamp(max=width - 1)).float()
    values = values.masked_fill(near >= width, float("-inf"))
    values, at = values.topk(k, dim=-1)
    return values, near.gather(1, at), norm


def chunks_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [n, v] -> of each chunk, fp32 [n, chunks]: its maximum; the sum of the
    exponentials of what its entries are below it."""
    n, width = logits.shape
    chunks = -(-width // CHUNK)
    if not logits.is_cuda:
        rows = torch.nn.functional.pad(
            logits.float(), (0, chunks * CHUNK - width), value=float("-inf")
        ).view(n, chunks, CHUNK)
        best = rows.amax(dim=-1)
        return best, (rows - best.clamp(min=LOWEST)[:, :, None]).exp().sum(dim=-1)
    best, total = logits.new_empty(2, n, chunks, dtype=torch.float32)
    grid = (n, triton.cdiv(chunks, CHUNKS_OF_A_PROGRAM))
    sizes = CHUNK, CHUNKS_OF_A_PROGRAM, LOWEST
    _chunks_kernel[grid](logits, best, total, logits.stride(0), width, chunks, *sizes)
    return best, total


@triton.jit
def _chunks_kernel(
    x,
    best,
    total,
    row_stride,
    width,
    chunks,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
    LOWEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    at = x + row * row_stride + column
    value = tl.load(at, mask=column < width, other=float("-inf")).to(tl.float32)
    most = tl.max(value, axis=1)
    real = chunk < chunks
    tl.store(best + row * chunks + chunk, most, mask=real)
    sums = tl.sum(tl.exp(value - tl.maximum(most, LOWEST)[:, None]), axis=1)
    tl.store(total + row * chunks + chunk, sums, mask=real)


def local_logits(
    hidden: torch.Tensor, lm_head: torch.nn.Module
) -> tuple[torch.Tensor, int]:
    """Logits of this rank's real vocabulary entries, and the id of the first."""
    weight = getattr(lm_head, "weight", None)
    shard = getattr(lm_head, "shard_indices", None)
    size = None if shard is None else int(shard.num_org_elements)
    if is_dense_head_weight(weight):
        logits = hidden.to(weight.dtype) @ weight[:size].T
    else:
        logits = lm_head.quant_method.apply(lm_head, hidden, None)[:, :size]
    return logits, 0 if shard is None else int(shard.org_vocab_start_index)


class DraftCandidates:
    """The candidates of a batch of draft blocks, eager or at the tail of a draft graph.

    ``__call__`` is the tail: it writes buffers of fixed addresses, which ``captured``
    reads after a replay. ``of`` computes the same without them.
    """

    def __init__(
        self,
        *,
        lm_head: torch.nn.Module,
        block_size: int,
        num_ranks: int,
        tp_group,
        device: torch.device,
        max_batch_size: Optional[int] = None,
    ):
        self.lm_head, self.tp_group = lm_head, tp_group
        self.block_size, self.num_ranks = block_size, num_ranks
        if max_batch_size is not None:
            shape = (max_batch_size, block_size - 1, num_ranks)
            self.log_probs = torch.empty(shape, dtype=torch.float32, device=device)
            self.ids = torch.zeros(shape, dtype=torch.int64, device=device)

    def of(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [b * L, d] of blocks of L -> log-probabilities fp32 and token ids int64,
        both [b, L - 1, K], best first. A block's first position is the root: no draft.
        """
        drafts = hidden.view(-1, self.block_size, hidden.shape[-1])[:, 1:]
        log_probs, ids = top_candidates(
            drafts.reshape(-1, hidden.shape[-1]),
            self.lm_head,
            self.num_ranks,
            self.tp_group,
        )
        shape = (drafts.shape[0], self.block_size - 1, self.num_ranks)
        return log_probs.view(shape), ids.view(shape)

    def __call__(self, hidden_states: torch.Tensor, input_ids=None) -> None:
        log_probs, ids = self.of(hidden_states)
        self.log_probs[: log_probs.shape[0]].copy_(log_probs)
        self.ids[: ids.shape[0]].copy_(ids)

    def captured(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last replay wrote; the next one writes over it."""
        return self.log_probs[:batch_size], self.ids[:batch_size]


def is_capture_safe(lm_head: torch.nn.Module) -> bool:
    """Whether the head's product can be part of a graph, as for a chain."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    return is_dense_head_weight(
        getattr(lm_head, "weight", None)
    ) or should_apply_lm_head_quant_method(
        lm_head, getattr(lm_head, "quant_method", None)
    )
