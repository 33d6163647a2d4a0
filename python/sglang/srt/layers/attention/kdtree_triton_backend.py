# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 over the stock Triton backend: TARGET_VERIFY and plain DECODE of MLA
layers run on sgl_kernel_sm120, eager and captured; the rest is inherited.

What has run where: this form has served through the real Engine on an H200 (sm_90), with
graphs and without. On sm_120 it is compiled only. On a CPU TRITON_INTERPRET=1 interprets
the stock kernels and the op takes its torch form; capture and replay are imitated there
(static buffers filled for other batches).

kdtree_triton_serving has the lists, the plan and the static buffers of a step,
kdtree_triton_masks the tree mask, kdtree_serving the choice of kernel for each layer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

import msgspec
import torch

from sglang.srt.layers.attention.kdtree_serving import unserved_mla_layers
from sglang.srt.layers.attention.kdtree_triton_masks import TreeMasks
from sglang.srt.layers.attention.kdtree_triton_serving import KDTreeTritonServing
from sglang.srt.layers.attention.kdtree_verify import VerifyStep
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput

logger = logging.getLogger(__name__)


class Maskless(msgspec.Struct, frozen=True):
    """A spec_info that shows the base class the width of a verification, not its mask,
    which is in a layout that it does not read."""

    num_tokens_per_req: int
    custom_mask: None = None


class KDTreeTritonBackend(KDTreeTritonServing):
    def __init__(self, model_runner: ModelRunner):
        # Verified tokens a request, or 1.
        super().__init__(
            model_runner, width=int(model_runner.decode_num_tokens_per_req())
        )
        self.speculates = get_spec().speculative_algorithm is not None
        self.in_capture = False
        self.masks: Optional[TreeMasks] = None
        # What a speculative worker puts into spec_info.custom_mask.
        self.tree_mask_mode = TreeMaskMode.FULL_MASK
        if self.mode != "off":
            unserved = unserved_mla_layers(model_runner.model)
            for reason, layers in unserved.items():
                logger.warning(
                    "kdtree_sm120: %d MLA layer(s) go to Triton: %s",
                    len(layers),
                    reason,
                )
            if self.speculates:
                self.tree_mask_mode = TreeMaskMode.QLEN_ONLY
                self.masks = TreeMasks(
                    max_bs=self.req_to_token_pool.size,
                    width=self.width,
                    keeps_full=self.mode == "validate" or bool(unserved),
                    device=torch.device(self.device),
                )
        self.log_start()

    def log_start(self) -> None:
        mask = self.tree_mask_mode.name if self.speculates else "none"
        super().log_start(f"mask {mask}, {self.width} verified tokens")

    def serves(self, mode: ForwardMode) -> bool:
        return mode.is_target_verify() or mode.is_decode()

    # Eager steps.

    def plan_eager(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        if forward_batch.forward_mode.is_decode():
            bs = forward_batch.batch_size
            if not self.can_serve_batch(bs, 1, self.max_batch):
                return None
            return self.decode_step(
                bs, self.forward_metadata.kv_indices, forward_batch.req_pool_indices
            )
        spec_info, prefix_lens = forward_batch.spec_info, forward_batch.seq_lens
        bs = forward_batch.req_pool_indices.numel()
        width = self._target_verify_num_tokens_per_req(spec_info)
        visible = None
        if self.masks is not None:
            visible = self.masks.of_eager(spec_info, prefix_lens, bs, width)
        self.set_stock_mask(forward_batch, visible)
        if not self.can_serve_batch(bs, width, self.max_batch):
            return None
        return self.eager_step(forward_batch, prefix_lens + width, width, visible)

    def set_stock_mask(
        self, forward_batch: ForwardBatch, visible: Optional[torch.Tensor]
    ) -> None:
        """Replace the mask that the base class took from spec_info, whose layout it
        does not read."""
        mask = None
        if visible is not None and self.masks.keeps_full:
            bound = forward_batch.seq_lens_sum
            if bound is None:
                bound = visible.shape[0] * self.max_context_len
            mask = self.masks.full_of(visible, forward_batch.seq_lens, bound)
        self.forward_metadata.custom_mask = mask

    def decode_step(
        self, batch_size: int, kv_indices: torch.Tensor, rows: torch.Tensor
    ) -> VerifyStep:
        """The stock list of a decode step ends with the token of the step."""
        return VerifyStep(
            num_tokens=1,
            indptr=self.kv_indptr[: batch_size + 1],
            indices=kv_indices,
            tree_mask=None,
            plan=self.plan,
            rows=rows,
        )

    # Captured steps.

    @property
    def verify_mask(self) -> Optional[VerifyMask]:
        """The buffer that EAGLE's and DDTREE's workers fill in place."""
        return self._verify_mask if self.masks is None else self.masks.qlen

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, *buffers, **named_buffers
    ) -> None:
        masks_before = 0 if self.masks is None else self.masks.nbytes
        num_draft_tokens = self.num_draft_tokens
        if self.mode != "off":
            self.num_draft_tokens = None  # the base class allocates no mask then
        # A target that speculates captures no decode step.
        super().init_cuda_graph_state(
            max_bs,
            max_num_tokens,
            *buffers,
            **named_buffers,
            decode_tokens=1 if self.speculates else max_num_tokens,
        )
        self.num_draft_tokens = num_draft_tokens
        if self.masks is not None:
            self.graph_bytes += self.masks.nbytes - masks_before
        self.log_start()

    def init_graph_masks(self, max_bs: int) -> None:
        if self.masks is not None:
            self.masks.allocate_full(max_bs, self.row_width, self.device)

    def plan_captured(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        bs = forward_batch.batch_size
        if forward_batch.forward_mode.is_decode():
            if not self.can_serve_batch(bs, 1, self.max_batch):
                return None
            return self.decode_step(
                bs, self.cuda_graph_kv_indices, self.graph.rows[:bs]
            )
        if not self.can_serve_batch(bs, self.width, self.max_batch):
            return None
        return self.captured_step(bs, self.width, self.masks.of_bucket(bs))

    def _init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool
    ) -> None:
        self.in_capture = in_capture
        super()._init_forward_metadata_out_graph(forward_batch, in_capture)
        self.in_capture = False

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self.step is not None and self.masks is not None:
            self.masks.refill_full(self.step)
        super().init_forward_metadata_in_graph(forward_batch)

    def _update_decode_kv_buffers(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
    ):
        if self.graph is not None:
            self.graph.rows[:bs].copy_(req_pool_indices[:bs])
        return super()._update_decode_kv_buffers(plan, bs, seq_lens, req_pool_indices)

    def _update_target_verify_buffers(
        self,
        plan: KVLocPlan,
        bs: int,
        seq_lens: torch.Tensor,
        spec_info: Optional[SpecInput],
        req_pool_indices: torch.Tensor,
    ):
        if self.mode == "off":
            return super()._update_target_verify_buffers(
                plan, bs, seq_lens, spec_info, req_pool_indices
            )
        width = self._target_verify_num_tokens_per_req(spec_info)
        if width != self.width:
            raise RuntimeError(
                f"kdtree_sm120: graphs were captured for {self.width} tokens a "
                f"request, and this verification has {width}."
            )
        stock = super()._update_target_verify_buffers(
            plan, bs, seq_lens, Maskless(width), req_pool_indices
        )
        self.fill_graph_lists(plan, req_pool_indices[:bs], seq_lens[:bs] + width)
        # At a capture spec_info holds a dummy mask.
        self.masks.write_bucket(None if self.in_capture else spec_info, seq_lens, bs)
        return stock

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: SpecInput, cuda_graph_bs: Optional[int]
    ) -> None:
        """The draft has finished: read its mask again. An eager batch (no bucket) is
        planned after this call."""
        if self.masks is None or cuda_graph_bs is None:
            return
        prefix_lens = self.graph.indptr[: cuda_graph_bs + 1].diff() - self.width
        self.masks.write_bucket(spec_info, prefix_lens, cuda_graph_bs)

    def _build_cuda_graph_forward_metadata(
        self, bs, forward_mode, spec_info, swa_out_cache_loc=None
    ):
        metadata = super()._build_cuda_graph_forward_metadata(
            bs, forward_mode, spec_info, swa_out_cache_loc
        )
        if forward_mode.is_target_verify():
            if self.masks is not None:
                metadata.custom_mask = self.masks.full
            elif get_spec().speculative_algorithm == "DFLASH":
                # A chain is captured without a mask on stock backends alone,
                # which it knows by the name of their class; no replay brings one.
                metadata.custom_mask = None
        return metadata

    # Layers.

    def refuse_lost_mask(
        self, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> None:
        """Triton without the mask would verify a tree as a chain."""
        if (
            forward_batch.forward_mode.is_target_verify()
            and forward_batch.spec_info is not None
            and forward_batch.spec_info.custom_mask is not None
            and self.forward_metadata.custom_mask is None
            and get_spec().speculative_algorithm != "DFLASH"
        ):
            raise NotImplementedError(
                f"kdtree_sm120 cannot serve layer {layer.layer_id} here "
                f"({', '.join(self.fallbacks)}), and --kdtree-verify on keeps no mask "
                "that Triton reads. Use --kdtree-verify off."
            )
