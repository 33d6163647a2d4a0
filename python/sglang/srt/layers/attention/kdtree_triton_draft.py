# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 for the drafter of the EAGLE family: the draft extend of an MLA drafter
runs on sgl_kernel_sm120, its multi-step drafting and its prefill on Triton.

A draft extend puts the N tokens of the last verification through the drafter, causally,
behind the whole context. Triton's extend kernel walks that context once a head with
a handful of blocks: 30 ms a layer and step at 185k tokens on an H200.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Callable, Dict, Optional, Tuple

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.kdtree_triton_serving import KDTreeTritonServing
from sglang.srt.layers.attention.kdtree_verify import (
    KV_DTYPES,
    QK_HEAD_DIM,
    V_HEAD_DIM,
    VerifyStep,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput

logger = logging.getLogger(__name__)


class KDTreeDraftExtendBackend(KDTreeTritonServing):
    part = "draft extend"

    def __init__(self, model_runner: ModelRunner):
        super().__init__(
            model_runner, width=resolve_num_tokens_per_req(phase="draft_extend")
        )
        super().log_start(f"{self.width} draft tokens")

    def serves(self, mode: ForwardMode) -> bool:
        return mode.is_draft_extend_v2()

    def list_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """seq_lens counts the N tokens already. Padding has 1, and its row of zeros
        holds as many as are asked for: slot 0, the sink."""
        return seq_lens.clamp(min=self.width)

    def plan_eager(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        spec_info = forward_batch.spec_info
        if spec_info is None or spec_info.num_tokens_per_req != self.width:
            self.count_fallback("another width than the tree's")
            return None
        if getattr(spec_info, "num_front_tokens", 0):
            self.count_fallback("tokens before the window")
            return None
        bs = forward_batch.req_pool_indices.numel()
        if not self.can_serve_batch(bs, self.width, self.max_batch):
            return None
        lens = self.list_lens(forward_batch.seq_lens)
        return self.eager_step(forward_batch, lens, self.width, tree_mask=None)

    def plan_captured(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        bs = forward_batch.batch_size
        if not self.can_serve_batch(bs, self.width, self.max_batch):
            return None
        return self.captured_step(bs, self.width, tree_mask=None)

    def init_cuda_graph_state(self, *sizes, **buffers) -> None:
        # No decode step is captured on this backend.
        super().init_cuda_graph_state(*sizes, **buffers, decode_tokens=1)
        super().log_start(f"{self.width} draft tokens")

    def _update_draft_extend_buffers(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        forward_mode: ForwardMode,
        spec_info: Optional[SpecInput],
        req_pool_indices: torch.Tensor,
    ):
        self.fill_graph_lists(
            plan, req_pool_indices[:bs], self.list_lens(seq_lens[:bs])
        )
        return super()._update_draft_extend_buffers(
            plan, bs, seq_lens, forward_mode, spec_info, req_pool_indices
        )


def create_draft_extend_backend(runner: ModelRunner) -> AttentionBackend:
    """Triton's own for what is not served, and in mode off."""
    if get_exec().kernel.kdtree_verify == "off":
        return TritonAttnBackend(runner)
    reason = reason_unserved_drafter(runner)
    if reason is None:
        return KDTreeDraftExtendBackend(runner)
    logger.info("kdtree_sm120: the draft extend stays on Triton: %s.", reason)
    return TritonAttnBackend(runner)


def reason_unserved_drafter(runner: ModelRunner) -> Optional[str]:
    config = runner.model_config
    if not runner.use_mla_backend:
        return "the drafter is no MLA model"
    dims = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    if dims != (QK_HEAD_DIM, V_HEAD_DIM):
        return f"the drafter has MLA heads of {dims[0]} (latent {dims[1]})"
    if runner.device != "cpu" and (
        runner.dtype != torch.bfloat16 or runner.kv_cache_dtype not in KV_DTYPES
    ):
        return f"the drafter runs in {runner.dtype} with KV in {runner.kv_cache_dtype}"
    return None


def offer_draft_backends(
    runner: ModelRunner,
    backends: Dict[str, Callable[[], Tuple[str, AttentionBackend]]],
    *,
    multi_step: bool,
) -> None:
    """Add kdtree_sm120 to the backends that an EAGLE-type drafter may choose from.

    backends: name -> factory of (name that models see, backend); multi_step: those of
    the draft steps, not of the draft extend.
    """
    if multi_step:
        backends["kdtree_sm120"] = backends["triton"]
    else:
        backends["kdtree_sm120"] = lambda: (
            "kdtree_sm120",
            create_draft_extend_backend(runner),
        )
