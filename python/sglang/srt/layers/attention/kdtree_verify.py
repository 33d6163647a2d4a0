# SPDX-License-Identifier: Apache-2.0
"""Draft verification of an MLA layer by sgl_kernel_sm120, whatever the stock backend is.

One TreeVerifier serves all layers of a runner: ``plan_step`` builds the step's metadata
once, ``run`` is called by every layer, ``VerifyErrors`` counts how far two results are
apart without a host sync.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

import msgspec
import torch
from sgl_kernel_sm120 import MaskLayout, mla_tree_verify

from sglang.srt.layers.attention.kdtree_metadata import (
    combined_indices,
    combined_indptr,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

logger = logging.getLogger(__name__)

MAX_DRAFT_TOKENS = 128
MAX_PAGE_SIZE = 64
QK_HEAD_DIM = 576
V_HEAD_DIM = 512


class VerifyStep(msgspec.Struct, frozen=True):
    """What all layers of one verification share."""

    num_tokens: int
    indptr: torch.Tensor  # int64 [b + 1]
    indices: torch.Tensor  # slots: prefix, then draft tokens, a request
    tree_mask: Optional[torch.Tensor]  # uint8 or bool [b, N, N]; None = a chain


class TreeVerifier:
    def __init__(self, *, req_to_token: torch.Tensor, page_size: int):
        self.req_to_token = req_to_token
        # The kernel's promise is about aligned groups; larger pages keep it too.
        self.page_size = min(page_size, MAX_PAGE_SIZE)

    def plan_step(
        self,
        *,
        req_pool_indices: torch.Tensor,
        prefix_lens: torch.Tensor,
        num_tokens: int,
        max_indices: int,
        tree_mask: Optional[torch.Tensor],
    ) -> VerifyStep:
        """prefix_lens [b]; max_indices bounds the sum of prefix + num_tokens."""
        indptr = combined_indptr(prefix_lens, num_tokens)
        return VerifyStep(
            num_tokens=num_tokens,
            indptr=indptr,
            indices=combined_indices(
                self.req_to_token, req_pool_indices, indptr, max_indices
            ),
            tree_mask=tree_mask,
        )

    def run(
        self,
        step: VerifyStep,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: RadixAttention,
    ) -> torch.Tensor:
        """q [b * N, h * 576], KV of the draft tokens already in kv_cache.

        -> [b * N, h * 512]
        """
        q = q.view(-1, step.num_tokens, layer.tp_q_head_num, QK_HEAD_DIM)
        out = mla_tree_verify(
            q,
            kv_cache,
            step.indptr,
            step.indices,
            sm_scale=layer.scaling,
            tree_mask=step.tree_mask,
            mask_layout=(
                MaskLayout.CAUSAL if step.tree_mask is None else MaskLayout.QLEN
            ),
            logit_cap=layer.logit_cap,
            k_scale=layer.k_scale_float or 1.0,
            v_scale=layer.v_scale_float or 1.0,
            page_size=self.page_size,
        )
        return out.view(-1, layer.tp_q_head_num * V_HEAD_DIM)


class VerifyErrors:
    """How far kdtree_sm120 is from the stock backend, a row of counters a layer.

    Updated by tensor arithmetic alone, so that a captured step can do it; ``report``
    reads the counters back.
    """

    # A row (one draft token of one layer) is over the limit beyond one bf16 rounding
    # step of its largest element.
    ROW_LIMIT = 2.0**-8
    _COLUMNS = ("max_abs", "sum_abs", "sum_reference", "rows", "rows_over_limit")

    def __init__(self, num_layers: int, device: torch.device):
        self._counters = torch.zeros(
            num_layers, len(self._COLUMNS), dtype=torch.float64, device=device
        )

    def update(
        self, layer_index: int, ours: torch.Tensor, reference: torch.Tensor
    ) -> None:
        error = (ours.double() - reference.double()).abs()
        size = reference.double().abs()
        # "not <=" counts a NaN as over the limit.
        over = ~(error.amax(dim=-1) <= self.ROW_LIMIT * size.amax(dim=-1))
        row = self._counters[layer_index]
        row[0] = torch.maximum(row[0], error.amax())
        row[1] += error.sum()
        row[2] += size.sum()
        row[3] += error.shape[0]
        row[4] += over.sum()

    def report(self) -> str:
        max_abs, sum_abs, sum_reference, rows, over = self._counters.T.tolist()
        total = sum(rows)
        worst = max(range(len(rows)), key=lambda i: (over[i], max_abs[i]))
        relative = sum(sum_abs) / sum(sum_reference) if sum(sum_reference) else 0.0
        return (
            f"kdtree_sm120 validate: {total:.0f} rows compared, {sum(over):.0f} over the "
            f"limit, max abs error {max(max_abs):.3e}, mean relative error "
            f"{relative:.3e}, worst layer {worst}"
        )
