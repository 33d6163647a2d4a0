# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping of slots in req_to_token, in torch, for devices without Triton."""

from __future__ import annotations

import functools
from typing import Callable, Optional

import torch

from sglang.srt.runtime_context import attention_backends
from sglang.srt.utils import support_triton


def write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    slots: torch.Tensor,
    batch_size: Optional[int] = None,
) -> None:
    """req_to_token[row_i, start_i:end_i] = the next end_i - start_i of ``slots``.

    batch_size is that of the Triton form's grid; the tensors say it here."""
    lengths = (end_offset - start_offset).long()
    rows = req_pool_indices.long().repeat_interleave(lengths)
    first = (start_offset.long() - lengths.cumsum(0) + lengths).repeat_interleave(
        lengths
    )
    columns = first + torch.arange(rows.numel(), device=rows.device)
    req_to_token[rows, columns] = slots[: rows.numel()].to(req_to_token.dtype)


def gather_extend_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device,
) -> torch.Tensor:
    """[i * n + j] = req_to_token[row_i, start_i + j]; every request extends by n."""
    columns = start_offset.long()[:, None] + torch.arange(
        draft_token_num, device=device
    )
    return req_to_token[req_pool_indices.long()[:, None], columns].long().reshape(-1)


def on_triton(function: Callable, torch_form: Callable) -> Callable:
    """The function, or its torch form where the platform launches no Triton kernel."""

    @functools.wraps(function)
    def dispatch(*args, **kwargs):
        here = function if support_triton(attention_backends()[0]) else torch_form
        return here(*args, **kwargs)

    return dispatch
