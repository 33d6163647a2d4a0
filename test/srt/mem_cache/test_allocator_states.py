# SPDX-License-Identifier: Apache-2.0
"""Tier 0's allocator against a dictionary: slot -> owner.

Prefills, decode steps, frees one by one and in groups, views that are overwritten,
merges, loans, moves and recalls, in any order. After every call each slot is free or
has its one owner, and the count of the free ones is exact.
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from srt.mem_cache.slot_model import build_allocator

from sglang.srt.mem_cache.defrag import host_runs, slot_runs

SIZE = 96
EXAMPLES, CALLS = 35, 50
anyone = st.integers(0, 99)


class NoCache:
    def supports_prefix_sharing(self):
        return False


class Request:
    """Its slots in order; the allocator looks at nothing of it."""

    def __init__(self, index):
        self.index = index
        self.slots = []


class Machine(RuleBasedStateMachine):
    lists = host_runs

    def __init__(self):
        super().__init__()
        self.allocator = build_allocator(SIZE, 1)
        self.allocator.runs._lists = self.lists
        self.requests = []
        self.created = 0
        self.owner = {}

    def give(self, request, slots):
        for slot in slots.tolist():
            assert slot not in self.owner, f"slot {slot} belongs to {self.owner[slot]}"
            self.owner[slot] = request.index
            request.slots.append(slot)

    def take_from(self, request, lo, hi):
        """A tensor such as callers free: a view of a row of 32-bit slots."""
        row = torch.tensor(request.slots, dtype=torch.int32)
        for slot in request.slots[lo:hi]:
            del self.owner[slot]
        del request.slots[lo:hi]
        return row[lo:hi]

    @rule(count=st.integers(1, 24), announced=st.booleans())
    def prefill(self, count, announced):
        if announced:
            self.allocator.create_prefill_budget(NoCache())
        free = self.allocator.available_size()
        slots = self.allocator.alloc(count)
        assert (slots is None) == (count > free)
        if slots is not None:
            request = Request(self.created)
            self.created += 1
            self.give(request, slots)
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(steps=st.integers(1, 6), tokens=st.sampled_from([1, 1, 1, 3]))
    def decode(self, steps, tokens):
        """A slot each in the order of the batch, or several each as speculation does."""
        for _ in range(steps):
            need = tokens * len(self.requests)
            announced = self.requests if tokens == 1 else None
            if not self.allocator.check_decode_capacity(num_tokens=need, tree_cache=None, requests=announced):
                assert self.allocator.available_size() < need
                return
            slots = self.allocator.alloc(need)
            for request, own in zip(self.requests, slots.split(tokens), strict=True):
                self.give(request, own)

    @precondition(lambda self: self.requests)
    @rule(which=anyone, at=anyone)
    def free_a_tail(self, which, at):
        request = self.requests[which % len(self.requests)]
        view = self.take_from(request, at % (len(request.slots) + 1), None)
        self.allocator.free(view)
        view.fill_(0)

    @precondition(lambda self: self.requests)
    @rule(which=st.sets(anyone, min_size=1, max_size=2))
    def end_some_in_a_group(self, which):
        chosen = {index % len(self.requests) for index in which}
        before = self.allocator.available_size()
        self.allocator.free_group_begin()
        for index in chosen:
            view = self.take_from(self.requests[index], 0, None)
            self.allocator.free(view)
            view.fill_(0)
        assert self.allocator.available_size() == before
        self.allocator.free_group_end()
        self.requests = [r for i, r in enumerate(self.requests) if i not in chosen]

    @precondition(lambda self: self.requests)
    @rule(leaves=anyone, joins=st.integers(1, 4), steps=st.integers(1, 4))
    def a_batch_changes_between_steps(self, leaves, joins, steps):
        self.decode(steps, 1)
        self.end_some_in_a_group({leaves})
        if self.requests:
            self.decode(steps, 1)
        self.prefill(joins, True)
        if self.requests:
            self.decode(steps, 1)

    @rule(aged_only=st.booleans())
    def merge(self, aged_only):
        self.allocator.runs.rearrange(aged_only=aged_only)

    @rule()
    def age(self):
        self.allocator.runs.age()

    @rule(count=st.integers(1, 3))
    def lend(self, count):
        runs = self.allocator.runs
        spans = [(p, n) for p, _, n in runs.longest(count).T.tolist() if n]
        lent = runs.lend(spans, arrangement=runs.arrangement) if spans else None
        if lent is not None:
            assert lent.numel() == sum(n for _, n in spans)

    @precondition(lambda self: self.requests and self.allocator.runs.lent is not None)
    @rule(which=anyone, count=st.integers(1, 12), skip=st.integers(0, 4))
    def move(self, which, count, skip):
        """The front of a row goes to lent slots; then some are not needed after all."""
        runs, request = self.allocator.runs, self.requests[which % len(self.requests)]
        count = min(count, len(request.slots), runs.lent.numel())
        sources = torch.tensor(request.slots[:count], dtype=torch.int64)
        targets = runs.lent[:count].tolist()
        runs.take_lent(count)
        for source, target in zip(sources.tolist(), targets, strict=True):
            assert target not in self.owner
            self.owner[target] = self.owner.pop(source)
        request.slots[:count] = targets
        runs.push(sources)
        runs.skip_lent(min(skip, runs.lent.numel()))

    @rule()
    def end_loan(self):
        self.allocator.runs.end_loan()

    @rule()
    def idle(self):
        self.allocator.runs.end_stripes()
        self.allocator.runs.rearrange()

    @invariant()
    def each_slot_is_free_or_has_its_owner(self):
        free = self.allocator.get_all_free_pages().tolist()
        assert self.allocator.available_size() == len(free)
        assert sorted([*free, *self.owner]) == list(range(1, SIZE + 1))


class OnADevice(Machine):
    lists = slot_runs


class TestAnyOrderOfCalls(Machine.TestCase):
    settings = settings(max_examples=EXAMPLES, stateful_step_count=CALLS, deadline=None)


class TestAnyOrderOfCallsOnADevice(OnADevice.TestCase):
    settings = settings(max_examples=EXAMPLES, stateful_step_count=CALLS, deadline=None)
