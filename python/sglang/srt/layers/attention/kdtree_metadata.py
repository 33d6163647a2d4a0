# SPDX-License-Identifier: Apache-2.0
"""Index lists and masks of a draft verification, as pure functions on tensors.

b requests, each with ``prefix`` committed tokens and N = num_tokens draft tokens, whose
slots are in req_to_token already, behind the prefix. No host sync: sizes that depend on
lengths come in as bounds, and what lies past the last request is unspecified. The same
functions fill the buffers of an eager step and of a captured one.
"""

from __future__ import annotations

from typing import Optional

import torch


def combined_indptr(
    prefix_lens: torch.Tensor, num_tokens: int, out: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """[b + 1]: where each request's list of prefix and draft slots starts."""
    lengths = prefix_lens + num_tokens
    if out is None:
        out = lengths.new_empty(lengths.numel() + 1, dtype=torch.int64)
    out[:1].zero_()  # out[0] = 0 would copy a number of the host
    torch.cumsum(lengths, dim=0, out=out[1:])
    return out


def combined_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    indptr: torch.Tensor,
    max_indices: int,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """[max_indices] of req_to_token's dtype: the lists, prefix slots then draft slots.

    max_indices is at least indptr[-1]. Entries past indptr[-1] repeat some slot of the
    last request's row, so that every entry can be read.
    """
    place = torch.arange(max_indices, device=indptr.device)
    request = torch.searchsorted(indptr, place, right=True) - 1
    request = request.clamp(max=indptr.numel() - 2)
    column = (place - indptr[request]).clamp(max=req_to_token.shape[1] - 1)
    return torch.take(
        req_to_token,
        req_pool_indices.long()[request] * req_to_token.shape[1] + column,
        **({} if out is None else {"out": out}),
    )


def full_mask_indptr(prefix_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 [b + 1]: where each request's block of a FULL mask starts.

    A block has num_tokens rows of prefix + num_tokens columns.
    """
    return combined_indptr(prefix_lens, num_tokens) * num_tokens


def draft_cells(prefix_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 [b, N, N]: where a FULL mask, flat, holds the draft columns of each row."""
    row_stride = (prefix_lens.long() + num_tokens)[:, None, None]
    block = full_mask_indptr(prefix_lens, num_tokens)[:-1, None, None]
    token = torch.arange(num_tokens, device=prefix_lens.device)
    draft_columns = prefix_lens.long()[:, None, None] + token
    return block + token[:, None] * row_stride + draft_columns


def full_mask(
    visible: torch.Tensor, prefix_lens: torch.Tensor, max_cells: int
) -> torch.Tensor:
    """bool [max_cells]: a FULL mask, flat; every prefix column is visible.

    visible is bool [b, N, N]; max_cells is at least the sum of N * (prefix + N).
    """
    cells = draft_cells(prefix_lens, visible.shape[1])
    mask = torch.ones(max_cells, dtype=torch.bool, device=visible.device)
    return mask.scatter_(0, cells.flatten(), visible.flatten())


def visible_of_full_mask(
    mask: torch.Tensor, prefix_lens: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """[b, N, N]: the draft columns of a FULL mask.

    Requests past the mask's end (a batch that was padded after it was built) read its
    last cell.
    """
    cells = draft_cells(prefix_lens, num_tokens).clamp_(max=mask.numel() - 1)
    return mask[cells]


def chain_visible(
    batch_size: int, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """bool [b, N, N] of a chain: every token sees itself and those before it."""
    ones = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    return ones.tril().expand(batch_size, -1, -1)
