# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 on a CPU: verification and plain decoding by the kernel's torch form,
the rest by the torch reference. The same modes, counters and reproducers as on a GPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

from sgl_kernel_sm120 import __version__ as kernel_version
from sgl_kernel_sm120.attention import MAX_B

from sglang.srt.layers.attention.kdtree_serving import KDTreeServing
from sglang.srt.layers.attention.kdtree_verify import VerifyStep
from sglang.srt.layers.attention.torch_reference_backend import (
    TorchReferenceAttnBackend,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ddtree_info import verify_mask_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class KDTreeVerifyBackend(KDTreeServing, TorchReferenceAttnBackend):
    def __init__(self, runner: ModelRunner):
        super().__init__(runner)
        self.init_serving(
            runner,
            num_heads=runner.model_config.get_max_num_attention_heads()
            // get_parallel().attn_tp_size,
            width=int(runner.decode_num_tokens_per_req()),
        )
        # On every rank: the check that all of them run it.
        logger.info(
            "kdtree_sm120 in torch, tp rank %d: verify %s, sgl_kernel_sm120 %s, "
            "%d verified tokens, page size %d.",
            get_parallel().tp_rank,
            self.mode,
            kernel_version,
            self.width,
            runner.page_size,
        )

    def serves(self, mode: ForwardMode) -> bool:
        return mode.is_target_verify() or mode.is_decode()

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.step = None
        if self.mode != "off" and self.serves(forward_batch.forward_mode):
            self.step = self.plan_step(forward_batch)
        if self.step is not None:
            self.tick()

    def plan_step(self, forward_batch: ForwardBatch) -> Optional[VerifyStep]:
        """None = the torch reference's, which has planned the step as well."""
        lens, num_tokens, tree_mask = forward_batch.seq_lens, 1, None
        verifies = forward_batch.forward_mode.is_target_verify()
        if verifies:
            num_tokens = int(forward_batch.spec_info.draft_token_num)
        if not self.can_serve_batch(lens.numel(), num_tokens, MAX_B):
            return None
        if verifies:
            lens = lens + num_tokens  # a batch's lengths do not count them
            tree_mask = verify_mask_of(forward_batch.spec_info, lens.numel())
        return self.verifier.plan_step(
            req_pool_indices=forward_batch.req_pool_indices,
            prefix_lens=lens - num_tokens,
            num_tokens=num_tokens,
            # Free on a CPU. A device form takes the host's bound.
            max_indices=int(lens.sum()),
            tree_mask=tree_mask,
        )
