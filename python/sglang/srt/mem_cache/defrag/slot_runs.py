# SPDX-License-Identifier: Apache-2.0
"""Runs of consecutive slots in a list, computed with fixed shapes.

No function here reads a value back to the host, so none waits for the device:
what depends on the values stays in tensors as long as the list.
"""

from __future__ import annotations

from typing import Optional

import torch


def run_of_each(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of its run, length of its run) for each entry, both int32 [n].

    A run is a maximal stretch of the list in which each entry is one more than
    the entry before it.
    """
    n = units.numel()
    first = torch.ones(n, dtype=torch.int32, device=units.device)
    first[1:] = (units[1:] != units[:-1] + 1).to(torch.int32)
    run = torch.cumsum(first, 0) - 1
    lengths = torch.zeros(n, dtype=torch.int32, device=units.device)
    lengths.scatter_add_(0, run, torch.ones_like(lengths))
    return run.to(torch.int32), lengths[run]


def arrange(
    units: torch.Tensor, *, need: Optional[int], short_runs_first: bool
) -> torch.Tensor:
    """``units`` run by run, each run ascending.

    With ``need``, the shortest run that holds ``need`` entries comes first (of
    equals the lowest); when none does, the longest runs come first, which is the
    fewest pieces, and the first ``need`` entries are ascending. The other runs
    follow by length, the shortest or the longest first.
    """
    n = units.numel()
    if n == 0:
        return units
    ascending = torch.sort(units).values
    run, length = run_of_each(ascending)
    longest_first = n + 1 - length
    key = length if short_runs_first else longest_first
    if need:
        candidate = torch.where(length >= need, length, n + 1)
        best = candidate.min()
        chosen = torch.where(candidate == best, run, n).min()
        key = torch.where(best > n, longest_first, torch.where(run == chosen, 0, key))
    arranged = ascending[torch.sort(key, stable=True).indices]
    if need:
        arranged[:need] = torch.sort(arranged[:need]).values
    return arranged


def longest_runs(units: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [3, count]: position in the list, first entry and length of its
    ``count`` longest runs, longest first, of equals the earlier; length 0 pads."""
    table = torch.zeros((3, count), dtype=torch.int64, device=units.device)
    n = units.numel()
    if n == 0:
        return table
    run, length = run_of_each(units)
    is_first = torch.ones(n, dtype=torch.bool, device=units.device)
    is_first[1:] = run[1:] != run[:-1]
    # One integer ranks by length, then by position, so that no tie is left to topk.
    backwards = torch.arange(n - 1, -1, -1, device=units.device)
    rank = torch.where(is_first, length.to(torch.int64), 0) * n + backwards
    k = min(count, n)
    position = torch.topk(rank, k).indices
    table[0, :k] = position
    table[1, :k] = units[position]
    table[2, :k] = torch.where(is_first[position], length[position].to(torch.int64), 0)
    return table
