# SPDX-License-Identifier: Apache-2.0
"""Runs and orders of a slot list, on a device and in host memory, against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.defrag import host_runs, slot_runs

both = pytest.mark.parametrize("lists", [slot_runs, host_runs], ids=["device", "host"])
slot_sets = st.sets(st.integers(1, 60), min_size=1, max_size=40)


def runs_of(slots):
    runs = []
    for slot in slots:
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


@both
@given(slots=slot_sets, random=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_runs_follow_each_other_by_length(lists, slots, random):
    shuffled = random.sample(sorted(slots), len(slots))
    got = lists.arrange(torch.tensor(shuffled))
    runs = sorted(runs_of(sorted(slots)), key=lambda run: (-len(run), run[0]))
    assert got.tolist() == [slot for run in runs for slot in run]


@both
@given(slots=slot_sets, need=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_need_gets_the_tightest_run_or_the_fewest(lists, slots, need):
    need = min(need, len(slots))
    arranged = lists.arrange(torch.tensor(list(slots)))
    got = lists.bring_forward(arranged, need)
    assert sorted(got.tolist()) == sorted(slots)
    runs = runs_of(sorted(slots))
    head = got[:need].tolist()
    assert head == sorted(head)
    fitting = [run for run in runs if len(run) >= need]
    if fitting:
        best = min(fitting, key=lambda run: (len(run), run[0]))
        assert head == best[:need]
        assert got.tolist() == best + [slot for slot in arranged.tolist() if slot not in best]
        return
    assert got[need:].tolist() == [slot for slot in arranged.tolist() if slot not in head]
    fewest, left = 0, need
    for run in sorted(runs, key=len, reverse=True):
        if left <= 0:
            break
        fewest, left = fewest + 1, left - len(run)
    assert len(runs_of(head)) == fewest


@both
@given(slots=slot_sets, count=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_longest_runs_are_found_where_they_are(lists, slots, count):
    arranged = lists.arrange(torch.tensor(list(slots)))
    table = lists.longest_runs(arranged, count)
    expected = sorted((len(run) for run in runs_of(arranged.tolist())), reverse=True)
    assert [n for n in table[2].tolist() if n] == expected[:count]
    for position, start, length in table.T.tolist():
        here = arranged[position : position + length].tolist()
        assert here == list(range(start, start + length))


@given(st.permutations(range(1, 40)), st.integers(0, 39), st.integers(0, 30), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_a_list_in_any_order_is_treated_alike_on_a_device_and_on_the_host(order, size, need, count):
    units = torch.tensor(order[:size], dtype=torch.int64)
    need = min(need, size)
    assert torch.equal(slot_runs.arrange(units), host_runs.arrange(units))
    assert torch.equal(slot_runs.bring_forward(units, need), host_runs.bring_forward(units, need))
    tables = [lists.longest_runs(units, count).T.tolist() for lists in (slot_runs, host_runs)]
    assert [run for run in tables[0] if run[2]] == [run for run in tables[1] if run[2]]


def test_no_value_decides_a_shape():
    """The functions run on tensors that have no values, so they cannot wait for one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        units = torch.empty(1000, dtype=torch.int64)
        assert slot_runs.bring_forward(slot_runs.arrange(units), 64).shape == (1000,)
        assert slot_runs.longest_runs(units, 8).shape == (3, 8)
