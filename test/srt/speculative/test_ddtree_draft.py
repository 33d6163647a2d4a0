# SPDX-License-Identifier: Apache-2.0
"""Draft candidates of a head that is split over ranks: those of the whole head, whatever the shards' widths."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang.srt.speculative import ddtree_draft
from sglang.srt.speculative.ddtree_draft import DraftCandidates, best_of, top_candidates

HIDDEN = 16


def make_head(weight, start, *, padding=0):
    """A rank's shard of the vocabulary, with rows of padding that would win every comparison."""
    padded = torch.cat([weight, torch.full((padding, HIDDEN), 100.0, device=weight.device)])
    shard = SimpleNamespace(num_org_elements=len(weight), org_vocab_start_index=start)
    return SimpleNamespace(weight=padded, shard_indices=shard)


class Group:
    """One rank's view of an all-gather whose other ranks run in the same process, one after the other."""

    def __init__(self, world_size):
        self.world_size, self.parts = world_size, []

    def all_gather(self, tensor, dim):
        self.parts.append(tensor)
        # The ranks before the last one only add their parts; what they go on with is nobody's.
        return torch.cat(self.parts + [tensor] * (self.world_size - len(self.parts)), dim=dim)


def gather(hidden, heads, num_ranks):
    """What the last rank computes."""
    group = Group(len(heads))
    results = [top_candidates(hidden, head, num_ranks, group) for head in heads]
    assert [part.shape for part in group.parts] == [(len(hidden), 2 * num_ranks + 1)] * len(heads)
    return results[-1]


def make_shards(weight, widths):
    """A head for each width. All are padded to the same number of rows, which would win every comparison."""
    rows = max(widths) + 1
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [make_head(weight[s : s + w], s, padding=rows - w) for s, w in zip(starts, widths, strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 5, 40])
def test_one_rank_ignores_padding(num_ranks):
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, HIDDEN), torch.randn(40, HIDDEN)
    log_probs, ids = top_candidates(hidden, make_head(weight, 0, padding=8), num_ranks, Group(1))
    expected = (hidden @ weight.T).log_softmax(-1).topk(num_ranks)
    torch.testing.assert_close(log_probs, expected.values)
    assert torch.equal(ids, expected.indices)
    assert ids.dtype == torch.int64 and log_probs.dtype == torch.float32


@settings(deadline=None, max_examples=80)
@given(
    widths=st.lists(st.integers(1, 30), min_size=2, max_size=8), rows=st.integers(1, 9), wanted=st.integers(1, 64)
)  # fmt: skip
@example(widths=[38, 2], rows=5, wanted=13)
@example(widths=[1, 1, 1, 37], rows=2, wanted=40)
def test_shards_give_the_whole_vocabulary(widths, rows, wanted):
    """Shards of any widths, with rows of padding. A shard may hold fewer tokens than there are ranks."""
    vocabulary = sum(widths)
    num_ranks = min(wanted, vocabulary)
    generator = torch.Generator().manual_seed(vocabulary * 64 + num_ranks)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (rows, vocabulary))
    log_probs, ids = gather(hidden, make_shards(weight, widths), num_ranks)
    logits = hidden @ weight.T
    whole = logits.log_softmax(-1)
    torch.testing.assert_close(log_probs, whole.topk(num_ranks).values, rtol=1e-5, atol=2e-5)
    # Two logits that differ by rounding may change places: a shard's product rounds in another order.
    torch.testing.assert_close(whole.gather(1, ids), log_probs, rtol=1e-5, atol=2e-5)
    assert all(len(set(row)) == num_ranks for row in ids.tolist())
    assert ids.dtype == torch.int64 and (log_probs <= 0).all()


@settings(deadline=None, max_examples=60)
@given(width=st.integers(5, 90), rows=st.integers(1, 5), wanted=st.integers(1, 64), data=st.data())
def test_chunks_hold_the_best_of_a_wide_row(width, rows, wanted, data):
    """Chunks of 4, the last one often shorter; equal logits, too."""
    k = min(wanted, width)
    values = st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0, 7.25]), min_size=rows * width, max_size=rows * width)
    logits = torch.tensor(data.draw(values)).view(rows, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddtree_draft, "CHUNK", 4)
        patch.setattr(ddtree_draft, "MANY_LOGITS", 1)
        best, token, norm = best_of(logits, k)
    assert torch.equal(best, logits.topk(k).values) and torch.equal(logits.gather(1, token), best)
    assert all(len(set(row)) == k for row in token.tolist())
    torch.testing.assert_close(norm, logits.logsumexp(-1, keepdim=True))


def test_a_chunk_without_a_finite_logit_spoils_no_sum(monkeypatch):
    monkeypatch.setattr(ddtree_draft, "CHUNK", 4)
    monkeypatch.setattr(ddtree_draft, "MANY_LOGITS", 1)
    logits = torch.arange(12.0).view(1, 12)
    logits[:, 4:8] = float("-inf")
    best, _, norm = best_of(logits, 3)
    assert torch.equal(best, logits.topk(3).values)
    torch.testing.assert_close(norm, logits.logsumexp(-1, keepdim=True))


def check_wide_rows(device, dtype, monkeypatch):
    """Widths that fill their chunks and the programs of chunks, and widths that do not."""
    monkeypatch.setattr(ddtree_draft, "MANY_LOGITS", 1)
    generator = torch.Generator().manual_seed(4)
    for width in (128 * 128, 128 * 128 + 1, 20_487):
        logits = (torch.randn(3, width, generator=generator) * 4).to(device, dtype)
        for k in (1, 7, 64):
            best, token, norm = best_of(logits, k)
            assert best.dtype == norm.dtype == torch.float32
            assert torch.equal(best, logits.float().topk(k).values)
            assert torch.equal(logits.gather(1, token).float(), best)
            torch.testing.assert_close(norm, logits.float().logsumexp(-1, keepdim=True), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows(dtype, monkeypatch):
    check_wide_rows("cpu", dtype, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_rows_on_a_gpu(dtype, monkeypatch):
    check_wide_rows("cuda", dtype, monkeypatch)


def run_rank(rank, store, widths, num_ranks, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(widths))

    class Gloo:
        world_size = len(widths)

        def all_gather(self, tensor, dim):
            parts = [torch.empty_like(tensor) for _ in widths]
            dist.all_gather(parts, tensor.contiguous())
            return torch.cat(parts, dim=dim)

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (6, sum(widths)))
    log_probs, ids = top_candidates(hidden, make_shards(weight, widths)[rank], num_ranks, Gloo())
    expected = (hidden @ weight.T).log_softmax(-1).topk(num_ranks)
    close = torch.allclose(log_probs, expected.values, rtol=1e-5, atol=2e-5)
    results.put((rank, close, torch.equal(ids, expected.indices), log_probs.tolist()))
    dist.destroy_process_group()


def test_two_gloo_ranks_get_the_same_whole_vocabulary(tmp_path):
    """Processes and a real collective; the bits of the ids pass through it as float32."""
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    arguments = (str(tmp_path / "store"), [33, 7], 9, results)
    ranks = [fork.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    answers = sorted(results.get(timeout=600) for _ in ranks)
    for process in ranks:
        process.join(timeout=600)
    assert [(rank, close, equal) for rank, close, equal, _ in answers] == [(0, True, True), (1, True, True)]
    assert answers[0][3] == answers[1][3], "ranks must build the same tree: bit for bit the same scores"


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


BLOCK = 4


def make_candidates(head, num_ranks=5, **more):
    return DraftCandidates(
        lm_head=head, block_size=BLOCK, num_ranks=num_ranks, tp_group=Group(1), device=torch.device("cpu"), **more
    )


def test_the_roots_position_has_no_candidates():
    torch.manual_seed(2)
    hidden, weight = torch.randn(3 * BLOCK, HIDDEN), torch.randn(40, HIDDEN)
    log_probs, ids = make_candidates(make_head(weight, 0)).of(hidden)
    expected = (hidden.view(3, BLOCK, HIDDEN)[:, 1:] @ weight.T).log_softmax(-1).topk(5)
    torch.testing.assert_close(log_probs, expected.values)
    assert torch.equal(ids, expected.indices)


def check_tail(device, run):
    """A tail that was built once serves every later batch, smaller ones too, at the same addresses."""
    torch.manual_seed(3)
    head = make_head(torch.randn(40, HIDDEN).to(device), 0)
    candidates = make_candidates(head, max_batch_size=4)
    candidates.log_probs, candidates.ids = candidates.log_probs.to(device), candidates.ids.to(device)
    hidden = torch.randn(4 * BLOCK, HIDDEN, device=device)
    replay = run(lambda: candidates(hidden))
    addresses = [t.data_ptr() for t in candidates.captured(4)]
    for batch_size in (4, 1, 3):
        hidden.copy_(torch.randn(4 * BLOCK, HIDDEN))
        replay()
        for captured, eager in zip(candidates.captured(batch_size), candidates.of(hidden), strict=True):
            assert torch.equal(captured, eager[:batch_size])
    assert [t.data_ptr() for t in candidates.captured(4)] == addresses


def test_the_tail_of_a_draft_graph():
    check_tail("cpu", lambda step: step)


@pytest.mark.gpu
def test_the_tail_of_a_captured_draft_graph():
    def capture(step):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    check_tail("cuda", capture)
