# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 for a DFLASH drafter: its block attends to the prefix by split KV.

The positions of a draft block see one another, so every query of a request reads the
same keys. The block is then one decode step of that request whose heads are the query
heads of all its positions, and Triton's grouped decode kernel, which splits the KV
over the SMs, serves it. Its extend kernel walks the prefix once a head with a
handful of blocks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.kdtree_report import KDTreeMetrics, metric_labels
from sglang.srt.layers.attention.kdtree_serving import CountsFallbacks
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_spec

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

TILE = 16  # heads that one block of the grouped decode kernel takes
MAX_SPLITS = 64  # a query's partial sums are merged one after another

# indptr int32 [b + 1] and indices int64: a request's slots, prefix, then block.
Lists = tuple[torch.Tensor, torch.Tensor]


class KDTreeDraftBlockBackend(CountsFallbacks, TritonAttnBackend):
    part = "draft block"

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        self.init_fallbacks(KDTreeMetrics(metric_labels(), part=self.part))
        self.width = int(model_runner.decode_num_tokens_per_req())
        # Every slot of a request, those of its block among them, is in its row.
        self.row_width = self.req_to_token.shape[1]
        self.lists: Optional[Lists] = None  # of this step; None = Triton's
        self.graph_lists: Optional[Lists] = None
        self.rows = folded_rows(self.num_head // self.num_kv_head, self.width)
        tiles = -(-self.rows // TILE) * self.num_kv_head
        self.tiles_at_once = max(1, self.device_core_count // tiles)
        # All scratch, once: a captured step must not allocate it.
        max_bs = self.req_to_token_pool.size
        splits = [self.splits_of(size) for size in range(1, max_bs + 1)]
        self.num_splits = {
            count: torch.full((max_bs,), count, dtype=torch.int32, device=self.device)
            for count in set(splits)
        }
        sums = max(size * count for size, count in enumerate(splits, start=1))
        sums *= self.num_kv_head * self.rows
        self.sums, self.lses = (
            torch.empty(sums * dim, dtype=torch.float32, device=self.device)
            for dim in (self.v_head_dim, 1)
        )
        logger.info(
            "kdtree_sm120 %s over Triton: %d tokens of %d heads in %d rows a KV head.",
            self.part,
            self.width,
            self.num_head,
            self.rows,
        )

    def splits_of(self, batch_size: int) -> int:
        """A power of two, because the merging kernel is compiled for each."""
        wanted = max(1, min(MAX_SPLITS, self.tiles_at_once // batch_size))
        return 1 << (wanted.bit_length() - 1)

    # Lists.

    def fill(
        self, lists: Lists, plan: KVLocPlan, rows: torch.Tensor, lens: torch.Tensor
    ) -> None:
        """lens int [b]: of the prefixes; rows int [b] of req_to_token."""
        indptr, indices = lists
        torch.cumsum(lens + self.width, dim=0, dtype=indptr.dtype, out=indptr[1:])
        self.kv_index_translator.pack_read_stream(
            plan,
            req_pool_indices=rows,
            seq_lens=lens + self.width,
            indptr=indptr,
            out=indices,
            num_token_blocks=None,
        )

    def serves(self, batch: ForwardBatch) -> bool:
        return (
            batch.forward_mode.is_target_verify()
            and self._target_verify_num_tokens_per_req(batch.spec_info) == self.width
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.lists = None
        if not self.serves(forward_batch):
            return
        rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        bs, bound = rows.numel(), forward_batch.seq_lens_sum
        if bound is None:  # kept on the device; the tail of the list is never read
            bound = bs * self.max_context_len
        self.lists = (
            rows.new_zeros(bs + 1, dtype=torch.int32),
            rows.new_empty(bound + bs * self.width, dtype=torch.int64),
        )
        self.fill(self.lists, forward_batch.kv_loc_plan, rows, lens)

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: Optional[torch.Tensor] = None,
        cuda_graph_num_kv_splits_buf: Optional[torch.Tensor] = None,
    ) -> None:
        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        # By requests; the stock ones are by tokens.
        size = max_bs * self.row_width
        self.graph_lists = zeros(max_bs + 1, torch.int32), zeros(size, torch.int64)
        if kv_indices_buf is None:
            kv_indices_buf = zeros(size, torch.int64)
        super().init_cuda_graph_state(
            max_bs, max_num_tokens, kv_indices_buf, cuda_graph_num_kv_splits_buf
        )

    def lists_of_bucket(self, bs: int) -> Lists:
        indptr, indices = self.graph_lists
        return indptr[: bs + 1], indices

    def _init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool
    ) -> None:
        super()._init_forward_metadata_out_graph(forward_batch, in_capture)
        if in_capture:
            served = self.serves(forward_batch)
            bs = forward_batch.batch_size
            self.lists = self.lists_of_bucket(bs) if served else None

    def _update_target_verify_buffers(
        self, plan, bs, seq_lens, spec_info, req_pool_indices
    ):
        self.fill(self.lists_of_bucket(bs), plan, req_pool_indices[:bs], seq_lens[:bs])
        return super()._update_target_verify_buffers(
            plan, bs, seq_lens, spec_info, req_pool_indices
        )

    # Layers.

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options,
    ) -> torch.Tensor:
        """q [b * L, h * d] -> [b * L, h * d], KV of the block written on the way."""
        if forward_batch.forward_mode.is_target_verify():
            given = [name for name, value in options.items() if value is not None]
            if k is None or not save_kv_cache:
                given.append("KV from the pool")
            reason = given[0] if given else self.reason_unserved(layer, q.shape[0])
            if reason is None:
                return self.attend(q, k, v, layer, forward_batch)
            self.count_fallback(f"{reason} (layer {layer.layer_id})", reason)
        return super().forward_extend(
            q, k, v, layer, forward_batch, save_kv_cache, **options
        )

    def reason_unserved(self, layer: RadixAttention, num_tokens: int) -> Optional[str]:
        if self.lists is None or num_tokens % self.width:
            return "another width than the block's"
        if num_tokens != (self.lists[0].numel() - 1) * self.width:
            return "number of tokens"
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            return "sliding window"
        if layer.attn_type != AttentionType.ENCODER_ONLY:
            return "causal block"
        heads = layer.tp_q_head_num, layer.tp_k_head_num
        dims = layer.qk_head_dim, layer.v_head_dim
        if heads != (self.num_head, self.num_kv_head) or set(dims) != {self.v_head_dim}:
            return "heads"
        if layer.xai_temperature_len > 0:
            return "temperature by length"
        if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
            return "logit cap method"
        return None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        swa_loc = self.forward_metadata.swa_out_cache_loc
        self._set_kv_buffer(
            forward_batch,
            layer,
            KVWriteLoc.for_batch(forward_batch, swa_loc=swa_loc),
            k,
            v,
            layer.k_scale,
            layer.v_scale,
        )
        folded = fold(q, self.width, self.num_kv_head, self.rows, layer.v_head_dim)
        out = torch.empty_like(folded)
        splits = self.splits_of(folded.shape[0])
        shape = (*folded.shape[:2], splits)
        count = shape[0] * shape[1] * splits
        scaled = layer.k_scale is not None and layer.v_scale is not None
        self.decode_attention_fwd(
            folded,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            out,
            *self.lists,
            self.sums[: count * layer.v_head_dim].view(*shape, layer.v_head_dim),
            self.lses[:count].view(shape),
            self.num_splits[splits],
            splits,
            layer.scaling,
            layer.k_scale_float if scaled else 1.0,
            layer.v_scale_float if scaled else 1.0,
            logit_cap=layer.logit_cap,
            use_pdl=self.use_pdl,
            page_size=self.page_size,
        )
        return unfold(out, self.width, self.num_kv_head, layer.tp_q_head_num)


def folded_rows(group: int, width: int) -> int:
    """Rows a KV head: more than one tile of them are whole tiles, because the decode
    kernel finds the KV head of a tile by its number."""
    rows = group * width
    return rows if rows <= TILE else -(-rows // TILE) * TILE


def fold(
    q: torch.Tensor, width: int, num_kv_heads: int, rows: int, dim: int
) -> torch.Tensor:
    """[b * L, h * d] -> [b, h_kv * rows, d]: of each KV head the query heads that read
    it, of one position after another, then zeros."""
    heads = q.view(-1, width, num_kv_heads, q.shape[1] // (num_kv_heads * dim), dim)
    heads = heads.transpose(1, 2).flatten(2, 3)
    if heads.shape[2] < rows:
        heads = torch.nn.functional.pad(heads, (0, 0, 0, rows - heads.shape[2]))
    return heads.reshape(-1, num_kv_heads * rows, dim)


def unfold(
    out: torch.Tensor, width: int, num_kv_heads: int, num_heads: int
) -> torch.Tensor:
    """[b, h_kv * rows, d] -> [b * L, h * d]"""
    group = num_heads // num_kv_heads
    heads = out.unflatten(1, (num_kv_heads, -1))[:, :, : width * group]
    heads = heads.unflatten(2, (width, group)).transpose(1, 2)
    return heads.reshape(-1, num_heads * out.shape[-1])


def create_block_backend(runner: ModelRunner) -> AttentionBackend:
    """Triton's own for a drafter of another kind, and where kdtree_sm120 is not on."""
    if (
        get_exec().kernel.kdtree_verify == "on"
        and get_spec().speculative_algorithm in ("DFLASH", "DDTREE")
        and not runner.use_mla_backend
    ):
        return KDTreeDraftBlockBackend(runner)
    return TritonAttnBackend(runner)
