# SPDX-License-Identifier: Apache-2.0
"""Which slots to move where: a pure function over host integers.

Every rank computes the same plan from the same lengths and the same free list.
A unit is a slot, or a whole page where the page size is above 1.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import numpy as np


class Row(NamedTuple):
    """Units [first, first + len(units)) of one request's row."""

    key: int
    first: int
    units: np.ndarray
    before: int  # The unit in front of ``first``, -1 at the start of the row.


class FreeRun(NamedTuple):
    position: int  # In the free list; what ``FreeRuns.lend`` takes.
    start: int
    length: int


class Move(NamedTuple):
    """Units [lo, hi) of row ``key`` go to the free list's [position, position + n)."""

    key: int
    lo: int
    hi: int
    position: int


class Plan(NamedTuple):
    moves: list[Move]
    # key -> up to where the row needs no second look.
    settled: dict[int, int]


def run_bounds(units: np.ndarray) -> np.ndarray:
    """Offsets at which a run starts, and the length at the end."""
    breaks = np.flatnonzero(units[1:] != units[:-1] + 1) + 1
    return np.concatenate(([0], breaks, [len(units)]))


def short_spans(
    row: Row, *, block: int, planned: Optional[np.ndarray] = None
) -> list[tuple[int, int]]:
    """Maximal offset ranges of ``row`` that consist of runs shorter than ``block``.

    A first run that continues the unit before the row is part of a run that was
    looked at before, and is not short. Units whose entry in ``planned`` (bool, by
    unit) is set are not short either: another request that shares them moves them.
    """
    units = row.units
    if len(units) == 0:
        return []
    bounds = run_bounds(units)
    lengths = bounds[1:] - bounds[:-1]
    short = lengths < block
    if row.before >= 0 and units[0] == row.before + 1:
        short[0] = False
    if planned is not None and (taken := planned[units]).any():
        # A run may be planned in part: each unit stands for itself.
        short = np.repeat(short, lengths) & ~taken
        bounds = np.arange(len(units) + 1)
    if not short.any():
        return []
    inside = np.concatenate(([False], short, [False]))
    edges = bounds[np.flatnonzero(inside[1:] != inside[:-1])]
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


class _Targets:
    """The free runs, as they are used up.

    The allocator hands out the front of the list, under overlap also between the
    snapshot and the loan. So of the run at the front the end is taken.
    """

    def __init__(self, runs: Sequence[FreeRun]):
        table = np.array(runs, dtype=np.int64).reshape(-1, 3)
        self.position, self.start, self.length = table[table[:, 2] > 0].T.copy()
        self.front = int(self.position.argmin()) if len(self.position) else -1

    def take(self, *, need: int, after: int, block: int) -> Optional[FreeRun]:
        """A target of at most ``need`` units and at least ``block``: the run right
        behind unit ``after``, else the shortest that holds all, else the longest."""
        index = self._choose(need, after, block)
        if index is None:
            return None
        size = min(need, int(self.length[index]))
        position, start = int(self.position[index]), int(self.start[index])
        self.length[index] -= size
        if index == self.front:
            rest = int(self.length[index])
            return FreeRun(position + rest, start + rest, size)
        self.position[index] += size
        self.start[index] += size
        return FreeRun(position, start, size)

    def _choose(self, need: int, after: int, block: int) -> Optional[int]:
        length = self.length
        if not len(length) or length.max() < block:
            return None
        for behind in np.flatnonzero(self.start == after + 1):
            if behind != self.front and length[behind] >= block:
                return int(behind)
        fits = np.flatnonzero(length >= max(need, block))
        # Of equals the first, both times.
        return int(fits[length[fits].argmin()] if len(fits) else length.argmax())


def make_plan(
    rows: Sequence[Row], free: Sequence[FreeRun], *, block: int, max_units: int
) -> Plan:
    """Moves that turn spans of short runs into runs of at least ``block`` units.

    A span shorter than ``block`` stays: at the end of a row it is still growing,
    inside a row no move makes a block of it. At most ``max_units`` are moved. ``free``
    may be an int64 array [n, 3] of the runs' fields.
    """
    targets = _Targets(free)
    moves: list[Move] = []
    settled: dict[int, int] = {}
    planned = np.zeros(
        1 + max((int(row.units.max()) for row in rows if len(row.units)), default=0),
        dtype=bool,
    )
    left = max_units
    for row in rows:
        end = len(row.units)
        settled[row.key] = row.first + end
        for lo, hi in short_spans(row, block=block, planned=planned):
            while hi - lo >= block and left >= block:
                after = int(row.units[lo - 1]) if lo else row.before
                taken = targets.take(need=min(hi - lo, left), after=after, block=block)
                if taken is None:
                    break
                moves.append(
                    Move(
                        row.key,
                        row.first + lo,
                        row.first + lo + taken.length,
                        taken.position,
                    )
                )
                planned[row.units[lo : lo + taken.length]] = True
                lo += taken.length
                left -= taken.length
            if hi - lo >= block or (hi == end and lo < hi):
                settled[row.key] = row.first + lo
                break
    return Plan(moves, settled)
