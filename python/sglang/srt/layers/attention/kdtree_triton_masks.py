# SPDX-License-Identifier: Apache-2.0
"""The tree mask of a verification, from whatever a worker hands over to what the
kernels read.

    a worker's   QLEN_ONLY bytes in our buffer (DDTREE, EAGLE), QLEN_ONLY elsewhere, FULL
                 with its prefix columns (NGRAM, stand-ins of a capture), or none: a chain
    ours         QLEN_ONLY bytes [b, N, N]; in a graph always there, and every byte of
                 the bucket is rewritten before each replay
    Triton's     FULL, made from ours, and only where a layer or a mode needs it
"""

from __future__ import annotations

from typing import Optional

import torch

from sglang.srt.layers.attention.kdtree_metadata import (
    chain_visible,
    draft_cells,
    full_mask,
    visible_of_full_mask,
)
from sglang.srt.layers.attention.kdtree_verify import VerifyStep
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpecInput


class TreeMasks:
    def __init__(self, *, max_bs: int, width: int, keeps_full: bool, device):
        self.width = width
        self.keeps_full = keeps_full
        self.qlen = VerifyMask(
            buffer=torch.zeros(
                tree_mask_numel(TreeMaskMode.QLEN_ONLY, max_bs, width, 0),
                dtype=torch.uint8,
                device=device,
            ),
            mode=TreeMaskMode.QLEN_ONLY,
            max_bs=max_bs,
        )
        self.chain = chain_visible(1, width, device).to(torch.uint8)
        self.full: Optional[torch.Tensor] = None  # uint8, static

    @property
    def nbytes(self) -> int:
        full = 0 if self.full is None else self.full.nbytes
        return self.qlen.buffer.nbytes + self.chain.nbytes + full

    def allocate_full(self, max_bs: int, row_width: int, device) -> None:
        if self.keeps_full:
            cells = max_bs * self.width * row_width
            self.full = torch.ones(cells, dtype=torch.uint8, device=device)

    def of_bucket(self, bs: int) -> torch.Tensor:
        """[bs, N, N] of the static buffer, which a graph reads."""
        cells = bs * self.width * self.width
        return self.qlen.buffer[:cells].view(bs, self.width, self.width)

    def of_eager(
        self,
        spec_info: Optional[SpecInput],
        prefix_lens: torch.Tensor,
        bs: int,
        width: int,
    ) -> Optional[torch.Tensor]:
        """[bs, N, N]; None = a chain. Requests that were added to the batch after its
        mask was built (padding of data parallelism) are chains."""
        visible = visible_of(spec_info, prefix_lens, bs, width)
        if visible is not None and visible.shape[0] < bs:
            chains = chain_visible(bs - visible.shape[0], width, visible.device)
            visible = torch.cat([visible, chains.to(visible.dtype)])
        return visible

    def full_of(
        self,
        visible: torch.Tensor,
        prefix_lens: torch.Tensor,
        prefix_bound: int,
    ) -> torch.Tensor:
        """bool, flat: the stock kernel's, of an eager batch."""
        bs, width = visible.shape[:2]
        return full_mask(
            visible.bool(), prefix_lens, width * (prefix_bound + bs * width)
        )

    def write_bucket(
        self, spec_info: Optional[SpecInput], prefix_lens: torch.Tensor, bs: int
    ) -> None:
        """Before a replay. spec_info None = a chain."""
        target = self.of_bucket(bs)
        visible = visible_of(spec_info, prefix_lens, bs, self.width)
        if visible is None:
            target.copy_(self.chain.expand_as(target))
            return
        real = visible.shape[0]
        if visible.data_ptr() != target.data_ptr():
            target[:real].copy_(visible)
        target[real:].copy_(self.chain.expand(bs - real, -1, -1))

    def refill_full(self, step: VerifyStep) -> None:
        """Captured: Triton's mask from the static buffers of the step."""
        if self.full is not None and step.tree_mask is not None:
            prefix_lens = step.indptr.diff() - step.num_tokens
            cells = draft_cells(prefix_lens, step.num_tokens)
            self.full.scatter_(0, cells.flatten(), step.tree_mask.flatten())


def visible_of(
    spec_info: Optional[SpecInput], prefix_lens: torch.Tensor, bs: int, width: int
) -> Optional[torch.Tensor]:
    """[up to bs, N, N] bytes of the batch's mask, whatever its layout; None = a chain.

    prefix_lens int [bs]."""
    mask = None if spec_info is None else spec_info.custom_mask
    if mask is None:
        return None
    cells = width * width
    if mask_layout_of(spec_info, mask, bs * cells) == TreeMaskMode.QLEN_ONLY:
        real = min(bs, mask.numel() // cells)
        return mask[: real * cells].view(real, width, width)
    return visible_of_full_mask(mask, prefix_lens[:bs], width)


def mask_layout_of(
    spec_info: SpecInput, mask: torch.Tensor, qlen_cells: int
) -> TreeMaskMode:
    if isinstance(spec_info, DDTreeVerifyInput):
        return spec_info.tree_mask_mode
    # EAGLE's worker builds in the layout of ``verify_mask``; the runner's stand-in for
    # an idle batch is larger, of FULL layout and all ones.
    if isinstance(spec_info, EagleVerifyInput) and (
        mask.numel() <= qlen_cells or mask.dtype == torch.uint8
    ):
        return TreeMaskMode.QLEN_ONLY
    return TreeMaskMode.FULL_MASK
