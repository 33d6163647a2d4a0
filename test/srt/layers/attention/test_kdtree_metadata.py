# SPDX-License-Identifier: Apache-2.0
"""Index lists and masks of a verification against loops that write them entry by entry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.attention.kdtree_metadata import (
    chain_visible,
    combined_indices,
    combined_indptr,
    full_mask,
    full_mask_indptr,
)

MAX_TOKENS = 9
ROW_LENGTH = 40


@st.composite
def batches(draw):
    """(req_to_token, rows, prefix lengths, N): ragged, prefixes of 0 among them, any index width."""
    num_tokens = draw(st.integers(1, MAX_TOKENS))
    prefixes = draw(st.lists(st.integers(0, ROW_LENGTH - MAX_TOKENS), min_size=1, max_size=5))
    rows = draw(st.permutations(range(7)))[: len(prefixes)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    table = torch.randint(0, 10_000, (7, ROW_LENGTH), generator=generator, dtype=torch.int32)
    index_type = draw(st.sampled_from([torch.int32, torch.int64]))
    return table, torch.tensor(rows), torch.tensor(prefixes, dtype=index_type), num_tokens


@given(batches(), st.integers(0, 50))
@settings(max_examples=150, deadline=None)
def test_the_list_is_prefix_slots_then_draft_slots(batch, slack):
    table, rows, prefixes, num_tokens = batch
    expected, starts = [], [0]
    for row, prefix in zip(rows.tolist(), prefixes.tolist(), strict=True):
        expected += table[row, : prefix + num_tokens].tolist()
        starts.append(len(expected))

    indptr = combined_indptr(prefixes, num_tokens)
    indices = combined_indices(table, rows, indptr, len(expected) + slack)

    assert indptr.dtype == torch.int64
    assert indptr.tolist() == starts
    assert indices.shape == (len(expected) + slack,)
    assert indices[: len(expected)].tolist() == expected
    # A kernel may prefetch past the end: what is there has to be a slot of some row.
    assert set(indices[len(expected) :].tolist()) <= set(table.flatten().tolist())


def test_lists_are_written_into_buffers_of_the_caller():
    table = torch.arange(60, dtype=torch.int32).view(2, 30)
    prefixes, rows = torch.tensor([3, 0]), torch.tensor([1, 0])
    indptr_buffer = torch.full((3,), -1, dtype=torch.int64)
    indices_buffer = torch.full((12,), -1, dtype=torch.int32)

    indptr = combined_indptr(prefixes, 2, out=indptr_buffer)
    indices = combined_indices(table, rows, indptr, 12, out=indices_buffer)

    assert indptr.data_ptr() == indptr_buffer.data_ptr()
    assert indices.data_ptr() == indices_buffer.data_ptr()
    assert indptr_buffer.tolist() == [0, 5, 7]
    assert indices_buffer[:7].tolist() == [30, 31, 32, 33, 34, 0, 1]


@given(batches(), st.integers(0, 30), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_full_mask_has_rows_of_prefix_plus_draft(batch, slack, random):
    _, _, prefixes, num_tokens = batch
    visible = torch.tensor(
        [[[random.random() < 0.5 for _ in range(num_tokens)] for _ in range(num_tokens)] for _ in prefixes]
    )
    expected, starts = [], [0]
    for request, prefix in enumerate(prefixes.tolist()):
        for i in range(num_tokens):
            expected += [True] * prefix + visible[request, i].tolist()
        starts.append(len(expected))

    mask = full_mask(visible, prefixes, len(expected) + slack)

    assert mask[: len(expected)].tolist() == expected
    assert full_mask_indptr(prefixes, num_tokens).tolist() == starts


def test_mask_indptr_has_one_entry_a_request_and_the_end():
    """A slice that is one entry too long would shift every later block."""
    prefixes = torch.tensor([5, 0, 7])
    indptr = full_mask_indptr(prefixes, 4)
    assert indptr.shape == (4,)
    assert indptr.tolist() == [0, 4 * 9, 4 * 9 + 4 * 4, 4 * 9 + 4 * 4 + 4 * 11]


@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_a_chain_sees_itself_and_what_is_before(num_tokens):
    visible = chain_visible(2, num_tokens, torch.device("cpu"))
    for i in range(num_tokens):
        for j in range(num_tokens):
            assert visible[:, i, j].tolist() == [j <= i] * 2
