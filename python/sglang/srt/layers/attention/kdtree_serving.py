# SPDX-License-Identifier: Apache-2.0
"""Which attention calls of a runner go to sgl_kernel_sm120, whatever the stock backend.

``KDTreeServing`` stands in front of a stock backend in a class's bases. The stock
backend prepares a step as ever; the class puts what the kernel reads into ``step``, and
leaves it None where the kernel takes no part. Each layer then either runs on the kernel
or, with a reason that is logged and counted, on the stock backend.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

import torch
from sgl_kernel_sm120.attention import MAX_H_Q

from sglang.kernels.ops.attention import set_mla_kv_concat_q as mla_rows
from sglang.srt.environ import envs
from sglang.srt.layers.attention.kdtree_report import (
    KDTreeMetrics,
    Validation,
    metric_labels,
)
from sglang.srt.layers.attention.kdtree_verify import (
    QK_HEAD_DIM,
    V_HEAD_DIM,
    TreeVerifier,
    VerifyStep,
)
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class CountsFallbacks:
    # What is served, in a log line and in the metrics: "" for a target.
    part = ""

    def init_fallbacks(self, metrics: KDTreeMetrics) -> None:
        self.metrics = metrics
        self.fallbacks: Dict[str, int] = {}

    def count_fallback(self, what: str, reason: Optional[str] = None) -> None:
        """``what`` is logged the first time, ``reason`` is the metric's label."""
        if what not in self.fallbacks:
            logger.warning(
                "kdtree_sm120%s: to the stock backend: %s",
                f" {self.part}" if self.part else "",
                what,
            )
        self.fallbacks[what] = self.fallbacks.get(what, 0) + 1
        self.metrics.fell_back(reason or what)


class KDTreeServing(CountsFallbacks):
    def init_serving(self, runner: ModelRunner, *, num_heads: int, width: int) -> None:
        """width: the most tokens a request has in a step that is served."""
        self.mode: str = get_exec().kernel.kdtree_verify
        self.width = width
        self.served_heads = num_heads
        # Models that scale q by position do so where they join it.
        config = getattr(runner.model_config, "hf_text_config", None)
        self.joins = getattr(config, "llama_4_scaling", None) is None
        self.step: Optional[VerifyStep] = None
        self.workspace: Optional[torch.Tensor] = None  # uint8, on a GPU
        self.init_fallbacks(KDTreeMetrics(metric_labels(), part=self.part))
        self.validation: Optional[Validation] = None
        self.verifier = TreeVerifier(
            req_to_token=runner.req_to_token_pool.req_to_token,
            page_size=runner.page_size,
        )
        if self.mode == "validate":
            pool = runner.token_to_kv_pool
            self.validation = Validation(
                first_layer=pool.start_layer,
                num_layers=pool.layer_num,
                num_tokens=width,
                num_heads=num_heads,
                dtype=runner.dtype,
                kv_dtype=pool.get_key_buffer(pool.start_layer).dtype,
                device=torch.device(runner.device),
                page_size=self.verifier.page_size,
                req_to_token=runner.req_to_token_pool.req_to_token,
                tp_rank=get_parallel().tp_rank,
                metrics=self.metrics,
                dump_dir=get_exec().kernel.kdtree_dump_dir,
                part=self.part,
            )

    def serves(self, mode: ForwardMode) -> bool:
        """Whether calls in this forward mode may be the kernel's at all."""
        raise NotImplementedError

    def refuse_lost_mask(
        self, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> None:
        """Before the stock backend runs in the kernel's place: raise if it has not the
        tree's mask. Most have."""

    def tick(self) -> None:
        """Once a served step, outside any capture. A replay has no ``step``."""
        if self.validation is not None:
            self.validation.tick()

    def takes_parts(self, layer: RadixAttention, forward_batch: ForwardBatch) -> bool:
        """Whether this layer's q and k are to come in two parts each, the rotary ones
        apart: joining q and writing KV are then one launch."""
        return (
            self.mode == "on"
            and self.joins
            and self.step is not None
            and self.serves(forward_batch.forward_mode)
            and layer.tp_q_head_num == self.served_heads
            and reason_unserved_layer(layer) is None
        )

    def forward_extend(self, *args, **options) -> torch.Tensor:
        return self.attend(super().forward_extend, *args, **options)

    def forward_decode(self, *args, **options) -> torch.Tensor:
        return self.attend(super().forward_decode, *args, **options)

    def attend(
        self,
        method: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: Optional[torch.Tensor],
        v: Optional[torch.Tensor],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: Optional[torch.Tensor] = None,
        k_rope: Optional[torch.Tensor] = None,
        **options,
    ) -> torch.Tensor:
        """q [rows, h * 576] -> [rows, h * 512], KV of the rows written on the way.

        ``method`` is the stock backend's. With q_rope [rows, h, 64] and k_rope
        [rows, 1, 64], q is [rows, h, 512] and k [rows, 1, 512].
        """
        if q_rope is not None:
            joined = None
            if save_kv_cache and not options and self.takes_parts(layer, forward_batch):
                slots = forward_batch.out_cache_loc
                joined = self.write_and_join(layer, slots, q, k, q_rope, k_rope)
            if joined is None:
                q, k = torch.cat([q, q_rope], dim=-1), torch.cat([k, k_rope], dim=-1)
            else:
                q, save_kv_cache = joined, False
        stock = functools.partial(
            method, q, k, v, layer, forward_batch, save_kv_cache, **options
        )
        if self.mode == "off" or not self.serves(forward_batch.forward_mode):
            return stock()
        reason = reason_unserved(layer, k, v, options)
        if reason is None and layer.tp_q_head_num != self.served_heads:
            reason = "number of heads"  # the plan is made for one
        if reason is not None:
            self.count_fallback(f"{reason} (layer {layer.layer_id})", reason)
        if reason is not None or self.step is None:
            self.refuse_lost_mask(layer, forward_batch)
            return stock()
        flat_q = q.reshape(-1, layer.tp_q_head_num * QK_HEAD_DIM)
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self.mode == "validate":
            compared = None
            if (
                kv_cache.dtype.itemsize == 1
                and not forward_batch.forward_mode.is_decode()
            ):
                # The stock kernel reads the rows of this step before they are rounded
                # to fp8, ours after. Compare what both make of the same numbers.
                held = as_fp8_cache_holds(layer, k, v, kv_cache.dtype)
                compared = method(q, *held, layer, forward_batch, False, **options)
                compared = compared.clone()  # the next call may have the same output
            reference = stock()  # writes the KV
            if compared is None:
                compared = reference
            ours = self.verifier.run(
                self.step, flat_q, kv_cache, layer, workspace=self.workspace
            )
            self.validation.compare(layer, self.step, flat_q, kv_cache, ours, compared)
            return reference
        if save_kv_cache:
            self.write_latent(layer, forward_batch, k, v)
        return self.verifier.run(
            self.step, flat_q, kv_cache, layer, workspace=self.workspace
        )

    def write_and_join(
        self, layer: RadixAttention, slots: torch.Tensor, *parts: torch.Tensor
    ) -> Optional[torch.Tensor]:
        """parts: q, k, q_rope, k_rope -> q [rows, h, 576]; None, and nothing written,
        where the stock kernel does not serve, or the pool is to check the slots."""
        q, k, q_rope, k_rope = parts
        if not q.is_cuda or layer.k_scale is not None:
            return None
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).flatten(1)
        rows = (kv_cache, slots, k.flatten(1), k_rope.flatten(1), q, q_rope)
        if envs.SGLANG_ENABLE_ASYNC_ASSERT.get() or not mla_rows.covered(*rows):
            return None
        return mla_rows.set_mla_kv_concat_q(*rows)

    def write_latent(
        self,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """An MLA pool takes the row of k alone; it takes no scale."""
        if layer.k_scale is not None:
            k = k / layer.k_scale
        self.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc.for_batch(forward_batch), k, v
        )

    def can_serve_batch(self, batch_size: int, width: int, max_batch: int) -> bool:
        reason = None
        if batch_size > max_batch:
            reason = f"more than {max_batch} requests"
        elif width not in (1, self.width):  # what scratch is made for
            reason = f"neither 1 nor {self.width} tokens a request"
        if reason is not None:
            self.count_fallback(reason)
        return reason is None


def as_fp8_cache_holds(
    layer: RadixAttention, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as a kernel reads them from an MLA cache of this dtype: v is a part of
    k's row there, and only both scales together are applied."""
    rows = k if layer.k_scale is None else k / layer.k_scale
    rows = rows.to(dtype).to(k.dtype)
    values = rows[..., : v.shape[-1]]
    if layer.k_scale is None or layer.v_scale is None:
        return rows, values
    return rows * layer.k_scale_float, values * layer.v_scale_float


def reason_unserved_layer(layer: RadixAttention) -> Optional[str]:
    if (layer.qk_head_dim, layer.v_head_dim) != (QK_HEAD_DIM, V_HEAD_DIM):
        return "head size"
    if layer.tp_k_head_num != 1 or layer.tp_q_head_num > MAX_H_Q:
        return "number of heads"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "sliding window"
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type != AttentionType.DECODER:
        return "attention type"
    if layer.xai_temperature_len > 0:
        return "temperature by length"
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        return "logit cap method"
    return None


def reason_unserved(
    layer: RadixAttention,
    k: Optional[torch.Tensor],
    v: Optional[torch.Tensor],
    options: dict,
) -> Optional[str]:
    for name, value in options.items():
        if value is not None:
            return name.replace("_", " ")
    if k is None or v is None:
        return "KV from the pool"
    return reason_unserved_layer(layer)


def unserved_mla_layers(model: torch.nn.Module) -> Dict[str, List[int]]:
    """Absorbed MLA layers by why they are not served. Others (the dense form of MLA
    layers) take part in prefill only."""
    unserved: Dict[str, List[int]] = {}
    for module in model.modules():
        if isinstance(module, RadixAttention) and module.qk_head_dim == QK_HEAD_DIM:
            reason = reason_unserved_layer(module)
            if reason is not None:
                unserved.setdefault(reason, []).append(module.layer_id)
    return unserved
