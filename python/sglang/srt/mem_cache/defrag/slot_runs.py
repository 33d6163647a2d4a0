# SPDX-License-Identifier: Apache-2.0
"""Runs of consecutive slots in a list, computed with fixed shapes.

No function here reads a value back to the host, so none waits for the device:
what depends on the values stays in tensors as long as the list.
"""

from __future__ import annotations

import torch


def run_of_each(units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of its run, length of its run) for each entry, both int64 [n].

    A run is a maximal stretch of the list in which each entry is one more than
    the entry before it. Numbers start at 1.
    """
    n = units.numel()
    first = torch.ones(n, dtype=torch.bool, device=units.device)
    torch.ne(units[1:], units[:-1] + 1, out=first[1:])
    run = torch.cumsum(first, 0)
    lengths = torch.zeros(n + 1, dtype=torch.int64, device=units.device)
    lengths.scatter_add_(0, run, lengths.new_ones(1).expand(n))
    return run, lengths.index_select(0, run)


def arrange(units: torch.Tensor) -> torch.Tensor:
    """``units`` [n] run by run, each run ascending; the longest run first, of
    equals the lowest."""
    n = units.numel()
    if n == 0:
        return units
    ascending = torch.sort(units).values
    _, length = run_of_each(ascending)
    return ascending[torch.sort(n - length, stable=True).indices]


def bring_forward(units: torch.Tensor, need: int) -> torch.Tensor:
    """``units`` [n] with ``need`` <= n entries for one request moved to the front.

    The shortest run that holds them comes first, of equals the first in the list, so
    that what is left of it follows: the request's next slots continue its run. Where
    none holds them, they come from the front, which in a list by ``arrange`` is the
    fewest pieces, ascending. The other entries
    keep their order. No sort but of the ``need`` entries.
    """
    n = units.numel()
    if need == 0:
        return units
    at = torch.arange(n, device=units.device)
    _, length = run_of_each(units)
    # Length and position in one number: a minimum has no ties to decide.
    none = n * n + n
    tightest = torch.where(length >= need, length * n + at, none).min()
    start = torch.where(tightest < none, tightest % n, 0)
    size = torch.where(tightest < none, tightest // n, need)
    behind = at - size  # In the list without the entries that come first.
    source = torch.where(at < size, at + start, behind + size * (behind >= start))
    brought = units.index_select(0, source)
    brought[:need] = torch.sort(brought[:need]).values
    return brought


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
    rank = length * is_first * n + backwards
    k = min(count, n)
    position = torch.topk(rank, k).indices
    table[0, :k] = position
    table[1, :k] = units[position]
    table[2, :k] = (length * is_first)[position]
    return table
