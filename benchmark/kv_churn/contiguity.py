# SPDX-License-Identifier: Apache-2.0
"""How contiguous the slots of running requests are."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 64


class Contiguity(NamedTuple):
    runs_per_request: float
    runs_per_1k_tokens: float
    longest_run: int
    block_share: float  # Of the whole aligned 64-token blocks, those of one run.


def measure(rows: torch.Tensor, lengths: torch.Tensor) -> Contiguity:
    """``rows`` [n, width] holds slots, of which the first ``lengths`` [n] count."""
    width = int(lengths.max())
    rows = rows[:, :width].to(torch.int64)
    column = torch.arange(width)
    inside = column < lengths[:, None]
    joined = torch.zeros_like(inside)
    joined[:, 1:] = rows[:, 1:] == rows[:, :-1] + 1
    joined &= inside
    runs = (inside & ~joined).sum(1)
    # Tokens since the last break, by a running maximum over break positions.
    last_break = torch.where(joined, 0, column).cummax(1).values
    longest = int(torch.where(inside, column - last_break + 1, 0).max())
    whole = lengths // BLOCK
    blocks = width // BLOCK
    share = 1.0
    if int(whole.sum()):
        inner = joined[:, : blocks * BLOCK].reshape(len(rows), blocks, BLOCK)
        one_run = inner[:, :, 1:].all(2) & (torch.arange(blocks) < whole[:, None])
        share = float(one_run.sum() / whole.sum())
    return Contiguity(
        float(runs.float().mean()),
        float(1000 * runs.sum() / lengths.sum()),
        longest,
        share,
    )
