# SPDX-License-Identifier: Apache-2.0
"""Reference attention in fp32 torch: dense, grouped and absorbed MLA heads; decode,
extend behind a cached prefix, draft verification (chain or tree), sliding windows,
blocks that see themselves both ways. The specification of attention on the torch CPU
platform, one request at a time; not a fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

import msgspec
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
)
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.speculative.ddtree_info import verify_mask_of
from sglang.srt.speculative.eagle_utils import TreeMaskMode

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# This backend reads the latent pool, so MLA layers take the absorbed form always.
AttentionBackendRegistry.register(
    "torch_reference", lambda attn, forward_batch: AttnForwardMethod.MLA
)

_BIDIRECTIONAL = (AttentionType.ENCODER_ONLY, AttentionType.DECODER_BIDIRECTIONAL)


class RequestRows(msgspec.Struct, frozen=True):
    """One request's rows of the packed query, and what they attend to."""

    start: int
    num_queries: int
    prefix_len: int
    slots: torch.Tensor  # int64 [prefix_len + num_queries]
    visible: Optional[torch.Tensor]  # bool [n, n] between the queries; None = causal


class TorchReferenceAttnBackend(AttentionBackend):
    needs_cpu_seq_lens = True
    # What a speculative worker has to put into spec_info.custom_mask.
    tree_mask_mode = TreeMaskMode.QLEN_ONLY

    def __init__(self, runner):
        super().__init__()
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.forward_metadata: List[RequestRows] = []

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.forward_metadata = build_request_rows(forward_batch, self.req_to_token)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        check_layer(layer, kwargs)
        if save_kv_cache and k is not None:
            self.write_kv(layer, forward_batch, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for rows in self.forward_metadata:
            here = slice(rows.start, rows.start + rows.num_queries)
            out[here] = attend(
                q[here],
                keys[rows.slots],
                values[rows.slots],
                visible_keys(rows, layer),
                layer,
            )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def write_kv(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        if layer.k_scale is not None:
            k = k / layer.k_scale
        if layer.v_scale is not None:
            v = v / layer.v_scale
        self.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc.for_batch(forward_batch), k, v
        )


def build_request_rows(
    forward_batch: ForwardBatch, req_to_token: torch.Tensor
) -> List[RequestRows]:
    mode = forward_batch.forward_mode
    if mode.is_idle() or forward_batch.batch_size == 0:
        return []
    seq_lens = forward_batch.seq_lens.tolist()
    visible = [None] * len(seq_lens)
    if mode.is_decode():
        queries = [1] * len(seq_lens)
    elif mode.is_target_verify():
        num_tokens = int(forward_batch.spec_info.draft_token_num)
        queries = [num_tokens] * len(seq_lens)
        # The batch's lengths do not count the tokens under verification.
        seq_lens = [length + num_tokens for length in seq_lens]
        mask = verify_mask_of(forward_batch.spec_info, len(seq_lens))
        visible = visible if mask is None else list(mask.bool())
    else:
        queries = forward_batch.extend_seq_lens.tolist()
    rows, start = [], 0
    for row, length, num_queries, mask in zip(
        forward_batch.req_pool_indices.tolist(), seq_lens, queries, visible
    ):
        rows.append(
            RequestRows(
                start=start,
                num_queries=num_queries,
                prefix_len=length - num_queries,
                slots=req_to_token[row, :length].long(),
                visible=mask,
            )
        )
        start += num_queries
    return rows


def visible_keys(rows: RequestRows, layer: RadixAttention) -> torch.Tensor:
    """bool [n, prefix + n]. The prefix is visible up to a sliding window."""
    n, length = rows.num_queries, rows.prefix_len + rows.num_queries
    device = rows.slots.device
    visible = torch.ones(n, length, dtype=torch.bool, device=device)
    if layer.attn_type not in _BIDIRECTIONAL:
        visible[:, rows.prefix_len :] = (
            visible.new_ones(n, n).tril() if rows.visible is None else rows.visible
        )
    if layer.sliding_window_size > -1:
        key = torch.arange(length, device=device)
        visible &= key[rows.prefix_len :, None] - key <= layer.sliding_window_size
    return visible


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    layer: RadixAttention,
) -> torch.Tensor:
    """q [n, h, d], k [m, h_kv, d], v [m, h_kv, d_v], visible [n, m] -> [n, h, d_v].

    A row that sees no key gives 0. A key that no row sees has no effect, NaN included.
    """
    n, num_heads, head_dim = q.shape
    m, num_kv_heads, _ = k.shape
    hidden = ~visible
    used = visible.any(dim=0)[:, None, None]
    k = torch.where(used, k.float(), 0.0) * (layer.k_scale_float or 1.0)
    v = torch.where(used, v.float(), 0.0) * (layer.v_scale_float or 1.0)
    q = q.float().view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
    score = torch.einsum("nhgd,mhd->hgnm", q, k) * layer.scaling
    if layer.logit_cap > 0:
        score = layer.logit_cap * torch.tanh(score / layer.logit_cap)
    score = score.masked_fill(hidden, float("-inf"))
    prob = score.softmax(dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("hgnm,mhd->nhgd", prob, v).reshape(n, num_heads, -1)


def check_layer(layer: RadixAttention, options: dict) -> None:
    """Refuse what this backend would otherwise leave out of the result."""
    unknown = sorted(name for name, value in options.items() if value is not None)
    if unknown:
        raise NotImplementedError(
            f"torch_reference cannot serve the attention option(s) {', '.join(unknown)}."
        )
    if layer.is_cross_attention or layer.xai_temperature_len > 0:
        raise NotImplementedError(
            "torch_reference serves neither cross attention nor temperature scaling "
            f"by length (layer {layer.layer_id})."
        )
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise NotImplementedError(
            "torch_reference caps logits by tanh only, not by "
            f"{layer.logit_capping_method!r} (layer {layer.layer_id})."
        )
