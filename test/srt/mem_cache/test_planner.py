# SPDX-License-Identifier: Apache-2.0
"""The planner, against a dictionary that the moves are applied to."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.defrag.host_runs import run_bounds
from sglang.srt.mem_cache.defrag.planner import (
    FreeRun,
    Row,
    make_plan,
    short_spans,
)


def row(units, *, key=0, first=0, before=-1):
    return Row(key, first, np.array(units, dtype=np.int64), before)


def free_runs(free):
    """Runs of a sorted free set, in list positions of the ascending list."""
    runs, position = [], 0
    for unit in free:
        if runs and unit == runs[-1].start + runs[-1].length:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(FreeRun(position, unit, 1))
        position += 1
    return sorted(runs, key=lambda run: (-run.length, run.position))


@st.composite
def pools(draw):
    """A pool cut up among two rows that share a prefix, and the free list."""
    order = draw(st.permutations(range(1, 49)))
    shared = draw(st.integers(0, 12))
    own = draw(st.integers(0, 14))
    other = draw(st.integers(0, 14))
    first = order[: shared + own]
    second = order[:shared] + order[shared + own : shared + own + other]
    return first, second, sorted(order[shared + own + other :]), shared


def in_short_runs(units, block):
    lengths = np.diff(run_bounds(np.array(units, dtype=np.int64)))
    return int(lengths[lengths < block].sum())


def reached(block, free):
    """What a plan takes for a block: of this, its half and its quarter the first that a free run holds."""
    longest = max((run.length for run in free_runs(free)), default=0)
    return next((b for b in (block, block // 2, block // 4) if 1 < b <= longest), block)


@given(pools(), st.integers(2, 9), st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_moves_lose_nothing_and_leave_fewer_short_runs(pool, block, budget):
    first, second, free, shared = pool
    rows = [row(first, key=0), row(second, key=1)]
    plan = make_plan(rows, free_runs(free), block=block, max_units=budget)
    assert plan == make_plan(rows, free_runs(free), block=block, max_units=budget)
    if reached(block, free) < block:
        assert plan.settled == make_plan(rows, [], block=block, max_units=budget).settled
    block = reached(block, free)

    where = {unit: unit for unit in first + second}
    targets = []
    for move in plan.moves:
        units = rows[move.key].units[move.lo : move.hi].tolist()
        taken = free[move.position : move.position + len(units)]
        assert taken == list(range(taken[0], taken[0] + len(units))), "not one run"
        assert len(units) >= block
        targets += taken
        for source, target in zip(units, taken, strict=True):
            assert where[source] == source, f"unit {source} is moved twice"
            where[source] = target
    assert len(targets) == len(set(targets)) <= budget
    assert len(set(where.values())) == len(where)
    if not shared:
        for key, units in enumerate((first, second)):
            before = in_short_runs(units, block)
            moved = sum(m.hi - m.lo for m in plan.moves if m.key == key)
            after = in_short_runs([where[unit] for unit in units], block)
            assert after <= before - moved


@given(pools(), st.integers(2, 9))
@settings(max_examples=200, deadline=None)
def test_a_second_plan_has_nothing_to_do(pool, block):
    """Unless what is left of the free runs is too short, and half a block has to do from then on."""
    first, _, free, _ = pool
    units = np.array(first, dtype=np.int64)
    settled, last = 0, block + 1
    for _ in range(4):
        rest = row(units[settled:], first=settled, before=int(units[settled - 1]) if settled else -1)
        plan = make_plan([rest], free_runs(free), block=block, max_units=1000)
        if not plan.moves:
            return
        assert reached(block, free) < last
        last = reached(block, free)
        gone = set()
        for move in plan.moves:
            taken = free[move.position : move.position + move.hi - move.lo]
            gone |= set(taken)
            units[move.lo : move.hi] = taken
        free = [unit for unit in free if unit not in gone]
        settled = plan.settled[0]
    raise AssertionError("plans do not come to an end")


def test_nothing_is_moved_where_nothing_is_fragmented():
    whole = row(range(10, 200))
    blocks = row([*range(300, 364), *range(500, 564), *range(400, 464)])
    free = free_runs(range(600, 1000))
    assert make_plan([whole, blocks], free, block=64, max_units=9999).moves == []


def test_a_growing_end_waits_until_it_is_a_block():
    end = [*range(10, 74), 81, 83, 85]
    plan = make_plan([row(end)], free_runs(range(100, 300)), block=4, max_units=99)
    assert plan.moves == [] and plan.settled == {0: 64}
    plan = make_plan(
        [row([81, 83, 85, 87], first=64, before=73)],
        free_runs(range(100, 300)),
        block=4,
        max_units=99,
    )
    # The end of the run: the allocator takes from the front of the list.
    assert [(m.lo, m.hi, m.position) for m in plan.moves] == [(64, 68, 196)]


def test_the_run_behind_the_row_is_taken_first():
    """Then one run grows instead of a second one starting."""
    fragmented = row([20, 22, 24, 26], first=64, before=99)
    free = [FreeRun(0, 200, 4), FreeRun(4, 100, 50)]
    plan = make_plan([fragmented], free, block=4, max_units=99)
    assert [m.position for m in plan.moves] == [4]


def test_a_span_is_split_over_runs_when_none_holds_it():
    units = list(range(2, 40, 2))
    plan = make_plan(
        [row(units)],
        [FreeRun(0, 100, 8), FreeRun(8, 200, 6), FreeRun(14, 300, 3)],
        block=4,
        max_units=99,
    )
    assert [(m.lo, m.hi, m.position) for m in plan.moves] == [(0, 8, 0), (8, 14, 8)]
    # Five units are left that no run of a block takes: they are looked at again.
    assert plan.settled == {0: 14}


def test_where_no_free_run_holds_a_block_half_of_one_has_to_do():
    """And the row is looked at again: a whole block may be free by then."""
    units = [*range(2, 26, 2), *range(40, 45), *range(60, 68)]
    free = [FreeRun(0, 100, 5), FreeRun(5, 200, 4), FreeRun(9, 300, 3)]
    plan = make_plan([row(units)], free, block=8, max_units=99)
    assert [(m.lo, m.hi, m.position) for m in plan.moves] == [(0, 5, 0), (5, 9, 5)]
    assert plan.settled == {0: 0}
    assert make_plan([row(units)], [FreeRun(0, 300, 1)], block=8, max_units=99).moves == []
    # A run of half a block stays where another is free.
    assert make_plan([row(range(10, 14))], free, block=8, max_units=99).moves == []


def test_a_shared_prefix_is_moved_once():
    shared = [2, 4, 6, 8]
    plan = make_plan(
        [row([*shared, 30, 31, 32, 33], key=0), row([*shared, 40, 41, 42, 43], key=1)],
        free_runs(range(100, 140)),
        block=4,
        max_units=99,
    )
    assert [(m.key, m.lo, m.hi) for m in plan.moves] == [(0, 0, 4)]


def test_spans_of_a_row_that_continues():
    assert short_spans([row([5, 6, 9, 11], before=4)], block=4) == [(0, 2, 4)]
    assert short_spans([row([5, 6, 9, 11], before=7)], block=4) == [(0, 0, 4)]
    assert short_spans([row([])], block=4) == []


def test_a_span_ends_with_its_row():
    """Also where the next row begins with the unit behind it, or is empty."""
    rows = [row([]), row([1, 3, 4]), row([5, 6, 7, 8, 20]), row([]), row([21], before=20), row([30]), row([])]
    assert short_spans(rows, block=3) == [(1, 0, 3), (2, 4, 5), (5, 0, 1)]
