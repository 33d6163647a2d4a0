# SPDX-License-Identifier: Apache-2.0
"""The input of a tree verification, and the mask contract between worker and backend.

The worker fills ``custom_mask`` in the layout that ``tree_mask_mode`` names and that the
verifying backend asked for:
  QLEN_ONLY   [b * N * N], which draft token sees which; the prefix is visible
  FULL_MASK   per request N rows of prefix + N columns, flat
A backend with a static buffer (``verify_mask``) owns it; the worker writes it in place.
At graph capture ``spec_info`` is a plain DFlashVerifyInput without these fields: there a
backend looks at its own buffer alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.spec_info import SpecInput


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """Remains a DFLASH_VERIFY: preparation, padding and capture are inherited."""

    topk: int = -1  # a tree of any shape, for backends that ask
    tree_mask_mode: TreeMaskMode = TreeMaskMode.QLEN_ONLY
    max_tree_depth: int = 0

    @property
    def tree_topk(self) -> int:
        return self.topk


def verify_mask_of(spec_info: SpecInput, batch_size: int) -> Optional[torch.Tensor]:
    """[b, N, N] of a QLEN_ONLY verification; None = a chain.

    For backends whose ``tree_mask_mode`` is QLEN_ONLY.
    """
    mask = spec_info.custom_mask
    if mask is None:
        return None
    if not isinstance(spec_info, DDTreeVerifyInput):
        raise NotImplementedError(
            f"{type(spec_info).__name__} carries a custom mask of unknown layout; "
            "this attention backend verifies DFLASH and DDTREE only."
        )
    if spec_info.tree_mask_mode != TreeMaskMode.QLEN_ONLY:
        raise ValueError(
            f"tree mask in layout {spec_info.tree_mask_mode.name}, but this "
            "attention backend asked for QLEN_ONLY."
        )
    n = int(spec_info.draft_token_num)
    if mask.numel() != batch_size * n * n:
        raise ValueError(
            f"tree mask of {mask.numel()} cells, but {batch_size} requests of {n} "
            f"tokens need {batch_size * n * n}."
        )
    return mask.view(batch_size, n, n)
