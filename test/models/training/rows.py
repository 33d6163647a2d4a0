# SPDX-License-Identifier: Apache-2.0
"""Draw training rows from the token stream: plain windows, and rows that teach copying.

Everything is computed with tensors of fixed shape on the stream's device, so that a training step that
draws its own rows can be captured in a CUDA graph. Copying needs three skills, hence three kinds of rows:
a tiled span (the commit-length probe), a tiled span of random tokens (nothing but the repetition helps),
and blocks of which some are copies of earlier blocks (copying from a distance).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.architecture import BOS_ID, FIRST_TEXT_ID, VOCAB_SIZE

IGNORED = -100  # label of a position that nothing could predict


@dataclass(frozen=True)
class RowMix:
    """How many rows of a batch are of which kind; the rest are plain windows of the stream."""

    tiled: int = 0
    tiled_random: int = 0
    block_copy: int = 0
    block_copy_random: int = 0

    @property
    def total(self) -> int:
        """Rows that are not plain windows."""
        return self.tiled + self.tiled_random + self.block_copy + self.block_copy_random


def _log_uniform(rows: int, low: int, high: int, device: torch.device) -> Tensor:
    """Integers in [low, high], log-uniform, [rows, 1]."""
    u = torch.rand(rows, 1, device=device)
    return (low * ((high + 1) / low) ** u).long().clamp_(low, high)


def _windows(stream: Tensor, rows: int, length: int) -> Tensor:
    """Start offsets of random windows, [rows, 1]."""
    last = stream.numel() - length
    return (torch.rand(rows, 1, device=stream.device, dtype=torch.float64) * last).long()


def _tile(positions: Tensor, rows: int, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
    """Source position of each position and whether it repeats an earlier one."""
    period = _log_uniform(rows, shortest, longest, positions.device)
    return positions % period, positions >= period


def _copy_blocks(positions: Tensor, rows: int, shortest: int, longest: int) -> tuple[Tensor, Tensor]:
    """Rows of blocks of equal length: odd blocks copy a random earlier even block."""
    shortest = min(shortest, longest)
    length = _log_uniform(rows, shortest, longest, positions.device)
    block, inside = positions // length, positions % length
    num_blocks = int(positions.shape[-1]) // shortest + 1
    choice = torch.rand(rows, num_blocks, device=positions.device)
    pairs = (block + 1) // 2  # even blocks before an odd block
    source = (choice.gather(1, block) * pairs).long() * 2
    is_copy = block % 2 == 1
    return torch.where(is_copy, source, block) * length + inside, is_copy


def sample_rows(stream: Tensor, rows: int, length: int, mix: RowMix) -> tuple[Tensor, Tensor]:
    """Token rows [rows, length] that begin with ``<s>``, and their labels.

    Labels are the tokens themselves; random tokens at their first occurrence are ``IGNORED``.
    """
    device = stream.device
    positions = torch.arange(length, device=device)
    plain = rows - mix.total
    parts_ids = [stream[_windows(stream, plain, length) + positions].long()] if plain else []
    parts_labels = list(parts_ids)
    longest_tile, longest_block = length // 4, length // 3
    for count, repeat, shortest, longest, is_random in (
        (mix.tiled, _tile, 2, longest_tile, False),
        (mix.tiled_random, _tile, 2, longest_tile, True),
        (mix.block_copy, _copy_blocks, 16, longest_block, False),
        (mix.block_copy_random, _copy_blocks, 8, longest_block, True),
    ):
        if not count:
            continue
        source, repeated = repeat(positions.expand(count, -1), count, shortest, longest)
        if is_random:
            noise = torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, (count, length), device=device)
            ids = noise.gather(1, source)
            labels = torch.where(repeated, ids, IGNORED)
        else:
            ids = stream[_windows(stream, count, length) + source].long()
            labels = ids
        parts_ids.append(ids)
        parts_labels.append(labels)
    ids, labels = torch.cat(parts_ids), torch.cat(parts_labels).clone()
    # A tiled row keeps its period: the begin token is put in front and the last token dropped.
    begin = torch.full((rows, 1), BOS_ID, device=device)
    ids = torch.cat((begin, ids[:, :-1]), 1)
    labels = torch.cat((begin, labels[:, :-1]), 1)
    return ids, labels
