# SPDX-License-Identifier: Apache-2.0
"""Draft verification of an MLA layer by sgl_kernel_sm120, whatever the stock backend is.

One TreeVerifier serves all layers of a runner: ``plan_step`` builds the step's metadata
once, ``run`` is called by every layer, ``VerifyErrors`` counts how far two results are
apart without a host sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import msgspec
import torch
from sgl_kernel_sm120 import MaskLayout, mla_tree_verify
from sgl_kernel_sm120.attention import MAX_PAGE_SIZE
from sgl_kernel_sm120.reference import D_QK as QK_HEAD_DIM
from sgl_kernel_sm120.reference import D_V as V_HEAD_DIM

from sglang.srt.layers.attention.kdtree_metadata import (
    combined_indices,
    combined_indptr,
)

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

# Of the KV cache, on a GPU.
KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


class VerifyStep(msgspec.Struct, frozen=True):
    """What all layers of one verification share."""

    num_tokens: int
    indptr: torch.Tensor  # int32 or int64 [b + 1]
    indices: torch.Tensor  # slots: prefix, then draft tokens, a request
    tree_mask: Optional[torch.Tensor]  # uint8 or bool [b, N, N]; None = a chain
    plan: Optional[torch.Tensor] = None  # of mla_tree_verify_plan, on a GPU
    rows: Optional[torch.Tensor] = None  # [b] rows of req_to_token; 0 = padding

    @property
    def batch_size(self) -> int:
        return self.indptr.numel() - 1


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
            rows=req_pool_indices,
        )

    def run(
        self,
        step: VerifyStep,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: RadixAttention,
        *,
        workspace: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """q [at least b * N, h * 576], KV of the draft tokens already in kv_cache.

        -> [rows of q, h * 512]; rows past b * N are padding and give 0.
        """
        num_heads, num_rows = layer.tp_q_head_num, step.batch_size * step.num_tokens
        out = q.new_empty(q.shape[0], num_heads * V_HEAD_DIM)
        out[num_rows:].zero_()
        scaled = layer.k_scale is not None and layer.v_scale is not None
        shape = (step.batch_size, step.num_tokens, num_heads)
        mla_tree_verify(
            q[:num_rows].view(*shape, QK_HEAD_DIM),
            kv_cache,
            step.indptr,
            step.indices,
            sm_scale=layer.scaling,
            tree_mask=step.tree_mask,
            mask_layout=(
                MaskLayout.CAUSAL if step.tree_mask is None else MaskLayout.QLEN
            ),
            logit_cap=layer.logit_cap,
            k_scale=layer.k_scale_float if scaled else 1.0,
            v_scale=layer.v_scale_float if scaled else 1.0,
            page_size=self.page_size,
            out=out[:num_rows].view(*shape, V_HEAD_DIM),
            workspace=workspace,
            plan=step.plan,
        )
        return out


class LayerErrors(msgspec.Struct, frozen=True):
    """One layer's counters, read back."""

    layer_index: int
    max_abs: float
    max_rel: float  # of a row's largest error to its largest element
    mean_rel: float  # sum of errors to sum of elements
    rows: int
    rows_over_ulp: int
    mismatches: int


def bf16_step(size: torch.Tensor) -> torch.Tensor:
    """fp32, not negative -> the distance of neighbouring bf16 numbers at it: 2**-7 of
    the power of two below."""
    exponent_bits = size.view(torch.int32) & 0x7F800000
    return exponent_bits.view(torch.float32) * 2.0**-7


class VerifyErrors:
    """How far kdtree_sm120 is from the stock backend, a row of counters a layer.

    A row (one draft token of one layer) is over the limit beyond one bf16 rounding step
    of its largest element. Updated by tensor arithmetic alone, so that a captured step
    can do it; ``report`` reads the counters back.
    """

    # Two kernels that both round to bf16 may differ by a few steps; a row beyond this
    # is a mismatch. Chosen, not derived.
    MISMATCH_LIMIT = 2.0**-6
    # fp8 e4m3 rounds by 2**-4, and with it the stock kernels round q and the softmax's
    # weights, too: of 56,592 rows of one run, two were beyond 2**-3, the worst at 0.1262.
    MISMATCH_LIMIT_FP8 = 2.0**-2
    _COLUMNS = (
        "max_abs",
        "max_rel",
        "sum_abs",
        "sum_reference",
        "rows",
        "rows_over_ulp",
        "mismatches",
    )

    def __init__(
        self,
        num_layers: int,
        device: torch.device,
        mismatch_limit: float = MISMATCH_LIMIT,
    ):
        self.mismatch_limit = mismatch_limit
        self.counters = torch.zeros(
            num_layers, len(self._COLUMNS), dtype=torch.float64, device=device
        )

    def update(
        self,
        layer_index: int,
        ours: torch.Tensor,
        reference: torch.Tensor,
        counted: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Rows of ``counted`` (bool; None = all) enter the counters.

        -> bool [rows]: which are mismatches. No host sync.
        """
        error = (ours.float() - reference.float()).abs()
        size = reference.float().abs()
        if counted is not None:
            error = error.masked_fill(~counted[:, None], 0.0)
            size = size.masked_fill(~counted[:, None], 0.0)
        worst, largest = error.amax(dim=-1), size.amax(dim=-1)
        # "not <" counts a NaN as over a limit.
        over = ~((worst <= bf16_step(largest)) & (worst < torch.inf))
        mismatch = ~((worst <= self.mismatch_limit * largest) & (worst < torch.inf))
        num_rows = error.shape[0] if counted is None else counted.sum()
        relative = worst / largest.clamp_min(torch.finfo(torch.float32).tiny)
        row = self.counters[layer_index]
        row[0] = torch.maximum(row[0], worst.amax().double())
        row[1] = torch.maximum(row[1], relative.amax().double())
        row[2] += error.sum(dtype=torch.float64)
        row[3] += size.sum(dtype=torch.float64)
        row[4] += num_rows
        row[5] += over.sum()
        row[6] += mismatch.sum()
        return mismatch

    @classmethod
    def summary(cls, counters: torch.Tensor) -> list[LayerErrors]:
        """Of a copy of ``counters`` on the host."""
        layers = [dict(zip(cls._COLUMNS, row)) for row in counters.tolist()]
        return [
            LayerErrors(
                layer_index=index,
                max_abs=row["max_abs"],
                max_rel=row["max_rel"],
                mean_rel=row["sum_abs"] / (row["sum_reference"] or 1.0),
                rows=int(row["rows"]),
                rows_over_ulp=int(row["rows_over_ulp"]),
                mismatches=int(row["mismatches"]),
            )
            for index, row in enumerate(layers)
        ]

    @classmethod
    def describe(cls, counters: torch.Tensor, first_layer: int = 0) -> str:
        layers = cls.summary(counters)
        # A NaN stays one in a tensor's maximum, not in max().
        most = dict(zip(cls._COLUMNS, counters.amax(dim=0).tolist()))
        total = dict(zip(cls._COLUMNS, counters.sum(dim=0).tolist()))
        relative = total["sum_abs"] / (total["sum_reference"] or 1.0)
        worst = max(layers, key=lambda e: (e.mismatches, e.rows_over_ulp, e.max_abs))
        return (
            f"{total['rows']:.0f} rows compared, "
            f"{total['rows_over_ulp']:.0f} over the limit, max abs error "
            f"{most['max_abs']:.3e}, relative error mean {relative:.3e} max "
            f"{most['max_rel']:.3e}, {total['mismatches']:.0f} mismatches, worst layer "
            f"{first_layer + worst.layer_index}"
        )

    def report(self) -> str:
        return self.describe(self.counters.cpu())
