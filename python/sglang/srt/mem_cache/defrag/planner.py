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


def short_spans(rows: Sequence[Row], *, block: int) -> list[tuple[int, int, int]]:
    """(index of the row, lo, hi) of each maximal range of offsets [lo, hi) that
    consists of runs shorter than ``block``, in order.

    A first run that continues the unit before the row is part of a run that was
    looked at before, and is not short.
    """
    sizes = np.array([len(row.units) for row in rows])
    begins = sizes.cumsum() - sizes
    units = np.concatenate([row.units for row in rows])
    at = begins[sizes > 0]
    starts = np.ones(len(units), dtype=bool)
    starts[1:] = units[1:] != units[:-1] + 1
    starts[at] = True
    bounds = np.append(np.flatnonzero(starts), len(units))
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
    edges = (lo + 1 + np.flatnonzero(planned[1:] != planned[:-1])).tolist()
    edges = [lo] * (not planned[0]) + edges + [hi] * (not planned[-1])
    return list(zip(edges[::2], edges[1::2]))


class _Targets:
    """The free runs, as they are used up.

    The allocator hands out the front of the list, under overlap also between the
    snapshot and the loan. So of the run at the front the end is taken.
    """

    def __init__(self, runs: Sequence[FreeRun]):
        table = np.array(runs, dtype=np.int64).reshape(-1, 3)
        self.position, self.start, self.length = table[table[:, 2] > 0].T.copy()
        self.front = int(self.position.argmin()) if len(self.position) else -1
        self.longest = int(self.length.max(initial=0))

    def take(self, *, need: int, after: int, block: int) -> Optional[FreeRun]:
        """A target of at most ``need`` units and at least ``block`` <= ``need``: the run
        right behind unit ``after``, else the shortest that holds all, else the longest."""
        if self.longest < block:
            return None
        length = self.length
        behind = (self.start == after + 1) & (length >= block)
        behind[self.front] = False
        # Of equals the first.
        if behind.any():
            index = int(behind.argmax())
        elif need <= self.longest:
            index = int(np.where(length < need, need + self.longest, length).argmin())
        else:
            index = int(length.argmax())
        size = min(need, int(length[index]))
        position, start = int(self.position[index]), int(self.start[index])
        length[index] -= size
        self.longest = int(length.max())
        if index == self.front:
            rest = int(length[index])
            return FreeRun(position + rest, start + rest, size)
        self.position[index] += size
        self.start[index] += size
        return FreeRun(position, start, size)


def make_plan(
    rows: Sequence[Row], free: Sequence[FreeRun], *, block: int, max_units: int
) -> Plan:
    """Moves that turn spans of short runs into runs of at least ``block`` units.

    A span shorter than ``block`` stays: at the end of a row it is still growing,
    inside a row no move makes a block of it. Where no free run holds a block, half or a
    quarter of one has to do, and what is settled is what would be without free runs. At
    most ``max_units`` are moved. ``free`` may be an int64 array [n, 3] of the runs' fields.
    """
    targets = _Targets(free)
    smaller = [b for b in (block // 2, block // 4) if 1 < b <= targets.longest < block]
    if smaller:
        settled = make_plan(rows, [], block=block, max_units=0).settled
        moves = make_plan(rows, free, block=smaller[0], max_units=max_units).moves
        return Plan(moves, settled)
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
