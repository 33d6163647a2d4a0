# SPDX-License-Identifier: Apache-2.0
"""Torch forms of slot bookkeeping against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.torch_slots import gather_extend_slots, write_slots


@st.composite
def ranges(draw):
    count = draw(st.integers(1, 5))
    rows = draw(st.permutations(range(6)))[:count]
    starts = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    return torch.tensor(rows), torch.tensor(starts), torch.tensor(starts) + torch.tensor(lengths)


@given(ranges(), st.integers(0, 4), st.sampled_from([torch.int32, torch.int64]))
@settings(max_examples=100, deadline=None)
def test_ranges_are_written_in_order_and_nothing_else_is(case, spare, index_type):
    rows, starts, ends = case
    total = int((ends - starts).sum())
    slots = torch.randperm(1000)[: total + spare]
    table = torch.full((6, 20), -1, dtype=torch.int32)
    expected = table.clone()
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        expected[row, start:end] = slots[at : at + end - start].int()
        at += end - start

    write_slots(rows, table, starts.to(index_type), ends.to(index_type), slots)

    assert torch.equal(table, expected)


@given(ranges(), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_windows_are_gathered_row_by_row(case, num_tokens):
    rows, starts, _ = case
    table = torch.arange(120, dtype=torch.int32).view(6, 20)
    out = gather_extend_slots(
        req_pool_indices=rows, req_to_token=table, start_offset=starts, end_offset=starts + num_tokens,
        batch_size=len(rows), draft_token_num=num_tokens, device=torch.device("cpu"),
    )  # fmt: skip
    expected = [
        int(table[r, s + j]) for r, s in zip(rows.tolist(), starts.tolist(), strict=True) for j in range(num_tokens)
    ]
    assert out.dtype == torch.int64
    assert out.tolist() == expected
