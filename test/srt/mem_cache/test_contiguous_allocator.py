# SPDX-License-Identifier: Apache-2.0
"""Tier 0: what is handed out, what it costs, and that nothing is lost."""

import functools
import sys
from unittest import mock

import pytest
import torch
from srt.mem_cache.slot_model import SlotModel, build_allocator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import (
    _MAX_PIECES,
    FREE_RESERVE,
    STRIPE_STEPS,
    ContiguousTokenAllocator,
)
from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.slot_runs import arrange
from sglang.srt.mem_cache.defrag.tier0 import Tier0Defragmenter


class NoCache:
    def supports_prefix_sharing(self):
        return False


@functools.cache
def request(index):
    """The allocator tells requests apart, and looks at nothing of them."""
    return object()


def token_allocator(size=1000):
    return build_allocator(size, 1)


def prefill(allocator, count):
    allocator.create_prefill_budget(NoCache())
    return allocator.alloc(count)


def decode(allocator, rows):
    assert allocator.check_decode_capacity(num_tokens=len(rows), tree_cache=None, requests=[request(i) for i in rows])
    return allocator.alloc(len(rows))


def census(allocator, *held):
    slots = torch.cat([allocator.get_all_free_pages(), *held])
    assert len(allocator.get_all_free_pages()) == allocator.available_size()
    assert torch.equal(torch.sort(slots).values, torch.arange(1, allocator.size + 1))


def test_a_prefill_gets_the_tightest_hole():
    allocator = token_allocator()
    held = allocator.alloc(1000).clone()
    for lo, hi in ((100, 150), (300, 320), (500, 600)):
        allocator.free(held[lo:hi])
    assert prefill(allocator, 18).tolist() == list(range(301, 319))
    assert prefill(allocator, 45).tolist() == list(range(101, 146))
    assert prefill(allocator, 100).tolist() == list(range(501, 601))


def test_what_is_freed_is_used_again_in_order():
    """Upstream's order decays to that of the frees; after a merge ours does not."""
    allocator = token_allocator()
    held = allocator.alloc(1000).clone()
    for index in torch.randperm(1000).split(7):
        allocator.free(held[index])
    assert prefill(allocator, 1000).tolist() == list(range(1, 1001))


def test_lists_are_merged_at_prefill_and_at_idle_and_by_no_decode_step():
    allocator = token_allocator(size=400)
    runs = allocator.runs
    defragmenter = Tier0Defragmenter(
        allocator=allocator, req_to_token_pool=None, metrics=DefragMetrics(None), running_requests=list
    )
    held = list(allocator.alloc(400)[torch.randperm(400)].split(4))
    with mock.patch.object(runs, "rearrange", side_effect=AssertionError("a sort")):
        for step in range(120):
            allocator.free(held.pop(0))
            if step >= 20:
                held.append(decode(allocator, range(4)))
            defragmenter.after_batch()
    defragmenter.on_idle()
    free = runs.head.tolist()
    assert len(free) == 80 and runs.num_released == 0
    assert free == arrange(torch.tensor(sorted(free))).tolist()
    with mock.patch.object(runs, "rearrange", side_effect=AssertionError("idle goes on")):
        defragmenter.on_idle()
    for piece in held:
        allocator.free(piece)
    assert prefill(allocator, 390).tolist() == list(range(1, 391))


def test_requests_that_decode_together_do_not_interleave():
    allocator = token_allocator()
    steps = torch.stack([decode(allocator, [3, 1, 2]) for _ in range(STRIPE_STEPS)])
    for column in steps.T:
        assert column.tolist() == list(range(column[0], column[0] + STRIPE_STEPS))
    census(allocator, steps.reshape(-1))


def test_a_request_keeps_its_column_when_the_batch_changes():
    allocator = token_allocator()
    steps = [decode(allocator, [3, 1, 2]) for _ in range(4)]
    left = [decode(allocator, [2, 3]) for _ in range(4)]
    joined = [decode(allocator, [2, 9, 3]) for _ in range(4)]
    row_2 = torch.stack([*[s[2] for s in steps], *[s[0] for s in left + joined]])
    row_3 = torch.stack([*[s[0] for s in steps], *[s[1] for s in left]])
    row_3 = torch.cat([row_3, torch.stack([s[2] for s in joined])])
    row_9 = torch.stack([s[1] for s in joined])
    for row in (row_2, row_3, row_9):
        assert (row[1:] == row[:-1] + 1).all(), row
    census(allocator, *steps, *left, *joined)


def test_who_joins_goes_on_with_the_column_of_who_left():
    """Given back, it would be cut off, and the next prefill would get a crumb."""
    allocator = token_allocator()
    steps = [decode(allocator, [3, 1, 2]) for _ in range(4)]
    later = [decode(allocator, [3, 2, 9, 8]) for _ in range(4)]
    row = torch.stack([*[s[1] for s in steps], *[s[2] for s in later]])
    assert (row[1:] == row[:-1] + 1).all(), row
    assert allocator.runs.num_released == 0
    census(allocator, *steps, *later)


def test_a_nearly_full_pool_is_used_to_the_last_slot():
    allocator = token_allocator(size=100)
    held = [prefill(allocator, 90)]
    while allocator.available_size() >= 3:
        held.append(decode(allocator, [1, 2, 3]))
    assert allocator.available_size() == 1
    census(allocator, *held)
    assert allocator.alloc(2) is None
    held.append(allocator.alloc(1))
    assert allocator.available_size() == 0
    census(allocator, *held)


def test_slots_on_loan_are_free_until_the_last_moment():
    allocator = token_allocator(size=100)
    runs = allocator.runs
    runs.rearrange()
    lent = runs.lend([(10, 20)], arrangement=runs.arrangement)
    assert lent.tolist() == list(range(11, 31))
    loan = runs.loan
    assert allocator.available_size() == 100
    assert runs.lend([(0, 1)], arrangement=runs.arrangement) is None, "one loan at a time"
    held = allocator.alloc(95)
    assert held is not None and runs.loan != loan and runs.lent is None
    census(allocator, held)


def test_a_loan_of_slots_that_were_handed_out_is_refused():
    allocator = token_allocator(size=100)
    runs = allocator.runs
    runs.rearrange()
    arrangement = runs.arrangement
    allocator.alloc(15)
    assert runs.lend([(10, 20)], arrangement=arrangement) is None
    assert runs.lend([(15, 20)], arrangement=arrangement).tolist() == list(range(16, 36))
    runs.end_loan()
    runs.rearrange()
    assert runs.lend([(50, 20)], arrangement=arrangement) is None, "another order"


def test_a_freed_view_may_be_overwritten():
    """A row of req_to_token is freed as a view and then reused."""
    allocator = token_allocator(size=10)
    row = allocator.alloc(4).to(torch.int32)
    allocator.free(row[:2])
    allocator.free_group_begin()
    allocator.free(row[2:])
    row.fill_(99)
    allocator.free_group_end()
    census(allocator)


def test_clear_brings_back_every_slot():
    allocator = token_allocator(size=50)
    decode(allocator, [1, 2])
    allocator.free(allocator.alloc(9))
    allocator.runs.rearrange()
    allocator.runs.lend([(0, 3)], arrangement=allocator.runs.arrangement)
    allocator.clear()
    census(allocator)


def test_many_small_frees_are_joined():
    allocator = token_allocator(size=4 * _MAX_PIECES)
    held = allocator.alloc(4 * _MAX_PIECES)
    for slot in held.split(1):
        allocator.free(slot)
    assert len(allocator.runs.fresh) < _MAX_PIECES
    census(allocator)


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_pages_are_whole_ascending_and_counted(page_size):
    allocator = build_allocator(64 * page_size, page_size)

    def extend(prefix, end, last):
        allocator.create_prefill_budget(NoCache())
        lens = [torch.tensor([n]) for n in (prefix, end)]
        return allocator.alloc_extend(lens[0], lens[0], lens[1], lens[1], torch.tensor([last]), end - prefix)

    rows = [extend(0, 5 * page_size - 1, -1) for _ in range(8)]
    for row in rows[::2]:
        allocator.free_segment(row, start_pos=0)
    # Holes of five pages: a row of ten takes none of them, a row of three the first.
    ten = extend(0, 10 * page_size, -1)
    three = extend(0, 3 * page_size, -1)
    assert ten.tolist() == list(range(41 * page_size, 51 * page_size))
    assert three.tolist() == list(range(page_size, 4 * page_size))
    assert allocator.available_size() == (64 - 4 * 5 - 10 - 3) * page_size
    # A partly filled page is filled before another one is taken.
    more = extend(5 * page_size - 1, 5 * page_size + 1, int(rows[1][-1]))
    assert int(more[0]) == int(rows[1][-1]) + 1
    for row in (*rows[1::2], ten, three):
        allocator.free(row)
    allocator.free_page_ids(more[-1:] // page_size)
    free = torch.sort(allocator.get_all_free_pages()).values
    assert torch.equal(free, torch.arange(1, 65))


def test_frees_of_pages_come_back_through_a_group():
    allocator = build_allocator(160, 16)
    slots = allocator.alloc(160)
    assert allocator.alloc(16) is None
    allocator.free_group_begin()
    allocator.free_segment(slots[:64], start_pos=0)
    allocator.free(slots[64:])
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 160
    assert allocator.alloc(160) is not None


@pytest.fixture(params=[1, 4], ids=["slots", "pages"])
def full(request):
    """A pool that is full of what the prefix cache keeps."""
    model = SlotModel(page_size=request.param)
    for first in range(1, 9):
        model.stop(model.start([first] * 32))
        assert model.allocator.available_size() + model.tree.evictable_size() == model.pool.size
    return model


def test_a_prefill_leaves_a_reserve_of_what_the_cache_could_give(full):
    full.start([50] * 20)
    unheld = full.allocator.available_size() + full.tree.evictable_size()
    assert full.pool.size - 40 < unheld < full.pool.size
    assert full.allocator.available_size() >= int(full.pool.size * FREE_RESERVE)
    assert full.tree.evictable_size() > unheld / 2, "and no more than that"
    full.check_all()


def test_the_reserve_is_at_most_half_of_what_no_request_holds(full):
    allocator, tree, asked = full.allocator, full.tree, []
    for held in range(1, 7):
        assert full.start([50 + held] * 36) is not None
        allocator.create_prefill_budget(tree)
        with mock.patch.object(tree, "evict_for_alloc", lambda params: asked.append(params.num_tokens)):
            allocator.evict_to_free_tokens(tree, 12)
        free = allocator.available_size()
        half = (free + tree.evictable_size() - 12) // 2
        short = 12 + min(full.pool.size // 8, half) - free
        assert asked == [short] * (short > 0)
        asked.clear()
    assert half < full.pool.size // 8


def test_a_decode_step_evicts_what_it_needs(full):
    full.start([50] * 4)
    taken = full.allocator.alloc(full.allocator.available_size())
    cached = full.tree.evictable_size()
    for _ in range(full.page_size):
        assert full.decode()
    leaf = 32
    assert cached - leaf == full.tree.evictable_size()
    full.allocator.free(taken)
    full.check_all()


class Work(TorchDispatchMode):
    """Counts the elements of tensors that operations made or wrote (a view makes none), and the lines of Python run."""

    def __enter__(self):
        self.elements = self.lines = 0
        sys.settrace(self.trace)
        return super().__enter__()

    def __exit__(self, *exception):
        sys.settrace(None)
        return super().__exit__(*exception)

    def trace(self, frame, event, argument):
        self.lines += event == "line"
        return self.trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements += sum(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def work_of_a_pair(allocator, *, warm=64, rounds=200, width=8):
    """The most that an alloc and a free of a decode step do, with frees that arrive a few steps late.
    -> (elements, lines)"""
    late = [allocator.alloc(width).clone() for _ in range(warm)]
    rows = [request(i) for i in range(width)]
    most = (0, 0)
    for _ in range(rounds):
        allocator.check_decode_capacity(num_tokens=width, tree_cache=None, requests=rows)
        with Work() as work:
            slots = allocator.alloc(width)
            allocator.free(late.pop(0))
        most = max(most[0], work.elements), max(most[1], work.lines)
        late.append(slots)
    return most


def test_a_decode_pair_does_not_cost_more_at_a_million_free_slots():
    """Upstream copies its whole free list at each free."""
    size = 1_000_000
    common = (torch.int64, "cpu", None)
    assert work_of_a_pair(TokenToKVPoolAllocator(size, *common, need_sort=False), rounds=20)[0] > size / 2
    ours = work_of_a_pair(ContiguousTokenAllocator(size, *common))
    small = work_of_a_pair(ContiguousTokenAllocator(1_000, *common), rounds=100)
    for what, at_a_million, at_a_thousand in zip(("elements", "lines"), ours, small, strict=True):
        assert 0 < at_a_million <= 2 * at_a_thousand, f"{what} grow with the free list"
