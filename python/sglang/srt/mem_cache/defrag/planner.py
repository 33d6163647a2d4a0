# SPDX-License-Identifier: Apache-2.0
"""Which slots to move where: a pure function over host integers.

Every rank computes the same plan from the same lengths and the same free list.
A unit is a slot, or a whole page where the page size is above 1.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import numpy as np

from sglang.srt.mem_cache.defrag.host_runs import run_bounds


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


def short_spans(rows: Sequence[Row], *, block: int) -> list[tuple[int, int, int]]:
    """(index of the row, lo, hi) of each maximal range of offsets [lo, hi) that
    consists of runs shorter than ``block``, in order.

    A first run that continues the unit before the row is part of a run that was
    looked at before, and is not short.
    """
    sizes = np.array([len(row.units) for row in rows])
    begins = sizes.cumsum() - sizes
    units = np.concatenate([row.units for row in rows])
    bounds = np.union1d(run_bounds(units), begins)
    at = begins[sizes > 0]
    short = bounds[1:] - bounds[:-1] < block
    first = np.searchsorted(bounds, at)  # Of each row that has units, its first run.
    before = np.array([row.before for row in rows])[sizes > 0]
    short[first[(before >= 0) & (units[at] == before + 1)]] = False
    opens, closes = short.copy(), short.copy()
    opens[1:] &= ~short[:-1]
    opens[first] |= short[first]
    closes[:-1] &= opens[1:] | ~short[1:]
    los, his = bounds[:-1][opens], bounds[1:][closes]
    index = np.searchsorted(begins, los, side="right") - 1
    los, his = los - begins[index], his - begins[index]
    return list(zip(index.tolist(), los.tolist(), his.tolist()))


def _parts_left(lo: int, hi: int, planned: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of [lo, hi) that are not ``planned`` [hi - lo]: of a shared prefix another
    request moves those."""
    if not planned.any():
        return [(lo, hi)]
    edges = lo + np.flatnonzero(np.diff(planned, prepend=True, append=True))
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
    settled = {row.key: row.first + len(row.units) for row in rows}
    highest = np.concatenate([row.units for row in rows]).max(initial=0)
    planned = np.zeros(1 + highest, dtype=bool)
    left, stopped = max_units, -1
    for index, begin, end in short_spans(rows, block=block):
        row = rows[index]
        for lo, hi in _parts_left(begin, end, planned[row.units[begin:end]]):
            if index == stopped:
                break
            while hi - lo >= block and left >= block:
                after = int(row.units[lo - 1]) if lo else row.before
                taken = targets.take(need=min(hi - lo, left), after=after, block=block)
                if taken is None:
                    break
                size, at = taken.length, row.first + lo
                moves.append(Move(row.key, at, at + size, taken.position))
                planned[row.units[lo : lo + size]] = True
                lo += size
                left -= size
            if hi - lo >= block or (hi == len(row.units) and lo < hi):
                settled[row.key] = row.first + lo
                stopped = index
    return Plan(moves, settled)
