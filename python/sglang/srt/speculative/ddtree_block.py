# SPDX-License-Identifier: Apache-2.0
"""The draft block of a step: what of the prefix it reads, and its forward batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.ddtree_step import TreeStep
from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker


class DraftReads(msgspec.Struct, frozen=True):
    """What of the prefix the draft block attends to."""

    lens: torch.Tensor  # [b]
    max_lens_cpu: torch.Tensor  # [b] on the host: an upper bound
    max_lens_sum: int
    plan: KVLocPlan


def draft_forward_batch(worker: DDTreeWorker, step: TreeStep) -> ForwardBatch:
    """The block [root, mask, mask, ...] behind each prefix."""
    length, batch = step.block_size, step.batch
    num_tokens = step.batch_size * length
    ids = step.block_ids
    embedding = unwrap_lora_layer(
        _resolve_dflash_embedding_module(
            worker.draft_model, worker.target_worker.model_runner.model
        )
    )
    embeds = embedding(ids)
    if worker._noise_embed_scale != 1.0:
        embeds = embeds * worker._noise_embed_scale
    reads = draft_reads(worker, step)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=step.batch_size,
        input_ids=ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=reads.lens,
        out_cache_loc=None,
        seq_lens_sum=reads.max_lens_sum,
        seq_lens_cpu=reads.max_lens_cpu,
        positions=step.positions[:, :length].reshape(-1),
        input_embeds=embeds.view(num_tokens, -1),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker._draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), num_tokens, dtype=torch.int32, device=worker.device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=num_tokens,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    reads.plan.bind(
        forward_batch,
        worker.draft_model_runner.kv_index_translator,
        cols=slice(0, length),
    )
    return forward_batch


def draft_reads(worker: DDTreeWorker, step: TreeStep) -> DraftReads:
    """All of the prefix, or with --speculative-draft-window-size its end, for which
    the drafter has a table of slots of its own."""
    if not worker.use_compact_draft_cache:
        return DraftReads(
            step.prefix_lens, step.max_lens_cpu, step.max_lens_sum, step.plan
        )
    worker._ensure_draft_block_buffers(step.batch_size)
    batch, bound = step.batch, worker._draft_seq_lens_cpu_buf[: step.batch_size]
    lens = worker._compute_compact_draft_seq_lens(step.prefix_lens)
    worker._fill_compact_seq_lens_cpu_bound(
        batch_seq_lens_cpu=batch.seq_lens_cpu,
        nxt_kv_lens_cpu=step.carried.nxt_kv_lens_cpu,
        out=bound,
    )
    window = step.plan.write_virtual.view(step.batch_size, step.window)
    worker._rebuild_compact_draft_cache(
        req_pool_indices=batch.req_pool_indices,
        prefix_lens=step.prefix_lens,
        draft_prefix_lens=lens,
        verify_out_cache_loc_2d=window[:, : step.block_size].contiguous(),
        bs=step.batch_size,
        block_size=step.block_size,
    )
    plan = step.plan.reads_from(
        worker.draft_model_runner.kv_index_translator,
        seq_lens=lens,
        seq_lens_cpu=bound,
        read_extent=step.block_size,
    )
    return DraftReads(lens, bound, int(bound.sum()), plan)
