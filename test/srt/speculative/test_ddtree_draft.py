# SPDX-License-Identifier: Apache-2.0
"""Draft candidates of a head that is split over ranks: those of the whole head, whatever the shards' widths."""

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.speculative.ddtree_draft import top_candidates

HIDDEN = 16


def make_head(weight, start, *, padding=0):
    """A rank's shard of the vocabulary, with rows of padding that would win every comparison."""
    padded = torch.cat([weight, torch.full((padding, HIDDEN), 100.0)])
    shard = SimpleNamespace(num_org_elements=len(weight), org_vocab_start_index=start)
    return SimpleNamespace(weight=padded, shard_indices=shard)


class Group:
    """One rank's view of an all-gather whose other ranks run in the same process, one after the other."""

    def __init__(self, world_size):
        self.world_size, self.parts, self.calls = world_size, {}, 0

    def rank(self):
        self.calls = 0
        return self

    def all_gather(self, tensor, dim):
        parts = self.parts.setdefault(self.calls, [])
        parts.append(tensor)
        self.calls += 1
        return torch.cat(parts, dim=dim)


def gather(hidden, heads, num_ranks):
    """What the last rank computes; the ranks before it only add their parts."""
    group = Group(len(heads))
    for head in heads[:-1]:
        top_candidates(hidden, head, num_ranks, group.rank())
    return top_candidates(hidden, heads[-1], num_ranks, group.rank())


@pytest.mark.parametrize("num_ranks", [1, 5, 40])
def test_one_rank_ignores_padding(num_ranks):
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, HIDDEN), torch.randn(40, HIDDEN)
    log_probs, ids = top_candidates(hidden, make_head(weight, 0, padding=8), num_ranks, Group(1))
    expected = (hidden @ weight.T).log_softmax(-1).topk(num_ranks)
    torch.testing.assert_close(log_probs, expected.values)
    assert torch.equal(ids, expected.indices)
    assert ids.dtype == torch.int64 and log_probs.dtype == torch.float32


@pytest.mark.parametrize("widths", [(20, 20), (25, 15), (38, 2), (14, 13, 13)])
@pytest.mark.parametrize("num_ranks", [1, 6, 13])
def test_shards_give_the_whole_vocabulary(widths, num_ranks):
    """Uneven shards and padded rows. A shard may hold fewer tokens than there are ranks."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(5, HIDDEN), torch.randn(40, HIDDEN)
    heads, start = [], 0
    for width in widths:
        heads.append(make_head(weight[start : start + width], start, padding=max(widths) - width))
        start += width
    log_probs, ids = gather(hidden, heads, num_ranks)
    expected = (hidden @ weight.T).log_softmax(-1).topk(num_ranks)
    torch.testing.assert_close(log_probs, expected.values)
    assert torch.equal(ids, expected.indices)


def test_a_quantised_head_goes_through_its_method():
    hidden = torch.randn(3, HIDDEN)
    weight = torch.randn(10, HIDDEN)

    def apply(head, x, bias):
        return x @ weight.T

    head = SimpleNamespace(weight=torch.zeros(10, HIDDEN, dtype=torch.int8), quant_method=SimpleNamespace(apply=apply))
    log_probs, ids = top_candidates(hidden, head, 4, Group(1))
    expected = (hidden @ weight.T).log_softmax(-1).topk(4)
    torch.testing.assert_close(log_probs, expected.values)
    assert torch.equal(ids, expected.indices)
