# SPDX-License-Identifier: Apache-2.0
"""How contiguous the slots of running requests are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BLOCK = 64


class Contiguity(NamedTuple):
    runs_per_request: float
    runs_per_1k_tokens: float
    longest_run: int
    block_share: float  # Of the whole aligned 64-token blocks, those of one run.


def measure(rows: np.ndarray, lengths: np.ndarray) -> Contiguity:
    """``rows`` [n, width] holds slots, of which the first ``lengths`` [n] count."""
    width = int(lengths.max())
    rows = rows[:, :width]
    column = np.arange(width)
    inside = column < lengths[:, None]
    joined = np.zeros(rows.shape, dtype=bool)
    joined[:, 1:] = rows[:, 1:] == rows[:, :-1] + 1
    joined &= inside
    starts = np.flatnonzero(inside & ~joined)
    # Of each run: where it starts, and where the next one, or the tokens that do not count, begin.
    ends = starts // width * width + lengths[starts // width]
    ends[:-1] = np.minimum(ends[:-1], starts[1:])
    whole, blocks = lengths // BLOCK, width // BLOCK
    share = 1.0
    if whole.sum():
        inner = joined[:, : blocks * BLOCK].reshape(len(rows), blocks, BLOCK)
        one_run = inner[:, :, 1:].all(2) & (np.arange(blocks) < whole[:, None])
        share = float(one_run.sum() / whole.sum())
    return Contiguity(
        len(starts) / len(rows),
        float(1000 * len(starts) / lengths.sum()),
        int((ends - starts).max()),
        share,
    )
