# SPDX-License-Identifier: Apache-2.0
"""Parts of the DDTREE worker that need no model; test/e2e runs the whole of it."""

from types import SimpleNamespace

import pytest
import torch

import sgl_kernel_sm120
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.speculative import ddtree_checks
from sglang.srt.speculative.ddtree_checks import check_tree_ops, kv_buffers_of, refuse_verify_backend
from sglang.srt.speculative.ddtree_step import chain_tree, host_lens, node_rows, usable_ranks
from sglang.srt.speculative.ddtree_worker import DDTreeWorker
from sglang.srt.speculative.eagle_utils import TreeMaskMode

PREFIXES, NODES = [5, 2], 4


@pytest.fixture
def tree():
    ids = torch.arange(2 * 2 * 3).view(2, 2, 3)
    log_probs = torch.tensor([-0.5, -1.0, -3.0]).expand(2, 2, 3).contiguous()
    return sgl_kernel_sm120.ddtree_build(torch.tensor([100, 200]), ids, log_probs, NODES)


def make_step():
    return SimpleNamespace(
        prefix_lens=torch.tensor(PREFIXES),
        batch_size=2,
        num_nodes=NODES,
        max_lens_sum=11 + 7,  # an upper bound
    )


def tree_mask(backend, tree):
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    return DDTreeWorker.tree_mask(worker, make_step(), tree)


def test_a_backend_of_ours_gets_which_node_sees_which(tree):
    mask, mode = tree_mask(SimpleNamespace(tree_mask_mode=TreeMaskMode.QLEN_ONLY, verify_mask=None), tree)
    assert mode == TreeMaskMode.QLEN_ONLY
    assert torch.equal(mask.view(2, NODES, NODES), tree.visible)


def test_a_static_buffer_is_filled_in_place(tree):
    buffer = torch.zeros(3 * NODES * NODES, dtype=torch.uint8)
    static = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=3)
    mask, _ = tree_mask(SimpleNamespace(tree_mask_mode=TreeMaskMode.QLEN_ONLY, verify_mask=static), tree)
    assert mask.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[: 2 * NODES * NODES].view(2, NODES, NODES).bool(), tree.visible)
    assert not buffer[2 * NODES * NODES :].any()


def test_a_batch_that_does_not_fit_the_buffer_brings_its_own_mask(tree):
    """One buffer, sized for a smaller captured batch, must not be written past its end."""
    buffer = torch.zeros(NODES * NODES, dtype=torch.uint8)
    static = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=1)
    mask, _ = tree_mask(SimpleNamespace(tree_mask_mode=TreeMaskMode.QLEN_ONLY, verify_mask=static), tree)
    assert mask.numel() == 2 * NODES * NODES
    assert not buffer.any()


def test_a_stock_backend_gets_rows_of_prefix_and_draft(tree):
    mask, mode = tree_mask(SimpleNamespace(verify_mask=None), tree)
    assert mode == TreeMaskMode.FULL_MASK
    expected = []
    for request, prefix in enumerate(PREFIXES):
        for node in range(NODES):
            expected += [True] * prefix + tree.visible[request, node].tolist()
    assert mask.numel() == (11 + 7) * NODES
    assert mask[: len(expected)].tolist() == expected


def test_accepted_nodes_are_rows_of_the_packed_batch():
    assert node_rows(torch.tensor([[0, 2], [0, 1]]), NODES).tolist() == [[0, 2], [4, 5]]


def test_a_chain_is_what_the_builder_makes_of_the_best_candidates():
    ids = torch.arange(2 * 5 * 3).view(2, 5, 3)
    root, log_probs = torch.tensor([100, 200]), torch.full((2, 5, 3), -0.5)
    for width in (2, 4, 6):
        want = sgl_kernel_sm120.ddtree_build(root, ids[..., :1], log_probs[..., :1], width)
        got = chain_tree(root, ids, width)
        want = want._replace(path_log_probs=want.path_log_probs[:, :1])
        for name, ours, theirs in zip(want._fields, got, want, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (width, name)


def test_kv_buffers_have_a_row_a_slot():
    common = dict(size=8, page_size=1, dtype=torch.float32, layer_num=2, device="cpu", enable_memory_saver=False)
    latent = MLATokenToKVPool(kv_lora_rank=512, qk_rope_head_dim=64, **common)
    assert [tuple(b.shape) for b in kv_buffers_of(latent)] == [(9, 1, 576)] * 2
    grouped = MHATokenToKVPool(head_num=2, head_dim=4, enable_kv_cache_copy=False, **common)
    assert [tuple(b.shape) for b in kv_buffers_of(grouped)] == [(9, 2, 4)] * 4
    with pytest.raises(ValueError, match="cannot move accepted KV in a SimpleNamespace"):
        kv_buffers_of(SimpleNamespace())


@pytest.mark.parametrize("name", ["MHATokenToKVPoolFP4", "MLATokenToKVPoolFP4", "DSATokenToKVPool"])
def test_a_pool_that_keeps_more_for_a_slot_is_refused(name):
    """Its scales or index keys would stay at the slot that the token left."""
    pool = object.__new__(getattr(memory_pool, name))
    with pytest.raises(ValueError, match=f"cannot move accepted KV in a {name}"):
        kv_buffers_of(pool)


def test_a_backend_without_a_mask_is_refused():
    with pytest.raises(ValueError, match="FlashBackend verifies drafts here and carries no tree mask"):
        refuse_verify_backend(type("FlashBackend", (), {})())


def test_a_hybrid_target_is_refused(monkeypatch):
    monkeypatch.setattr(ddtree_checks, "mambaish_config", lambda config: object())
    runner = SimpleNamespace(model=SimpleNamespace(lm_head=object()), model_config=None)
    with pytest.raises(ValueError, match="does not support hybrid"):
        ddtree_checks.refuse_target(runner)


def test_a_target_without_a_head_is_refused():
    runner = SimpleNamespace(model=SimpleNamespace(), model_config=None)
    with pytest.raises(ValueError, match="drafts with the target's lm_head, and SimpleNamespace has none"):
        ddtree_checks.refuse_target(runner)


@pytest.mark.parametrize("part", ["selector", "lilicorr", "_is_domino"])
def test_a_drafter_with_a_chain_head_is_refused(part):
    worker = SimpleNamespace(selector=None, lilicorr=None, _is_domino=False)
    ddtree_checks.refuse_drafter(worker)
    setattr(worker, part, True)
    with pytest.raises(ValueError, match="needs a plain DFlash drafter"):
        ddtree_checks.refuse_drafter(worker)


def test_the_tree_ops_are_tried_at_start_up(monkeypatch):
    check_tree_ops(torch.device("cpu"))

    def missing(*args):
        raise NotImplementedError("tree_accept has no kernel")

    monkeypatch.setattr(sgl_kernel_sm120, "tree_accept", missing)
    with pytest.raises(NotImplementedError, match="tree_accept has no kernel"):
        check_tree_ops(torch.device("cpu"))


def test_lengths_on_the_host_are_upper_bounds():
    """The scheduler keeps none where no backend asks for them; then what is reserved bounds them."""

    def told(*arguments):
        lens, total = host_lens(*arguments, NODES)
        assert total == int(lens.sum())
        return lens.tolist()

    nothing = SimpleNamespace(nxt_kv_lens_cpu=None)
    exact = SimpleNamespace(seq_lens_cpu=torch.tensor([5, 2]), reqs=[])
    assert told(exact, nothing) == [9, 6]
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=n)) for n in (16, 11)]
    bound = SimpleNamespace(seq_lens_cpu=None, reqs=reqs)
    assert told(bound, SimpleNamespace(nxt_kv_lens_cpu=torch.tensor([13, 10]), nxt_kv_lens_sum=23)) == [13, 10]
    assert told(bound, nothing) == [16, 11]


@pytest.mark.parametrize(
    ("wanted", "nodes", "vocab", "ranks", "said"),
    [(None, 16, 2000, 15, False), (4, 16, 2000, 4, False), (60, 16, 2000, 15, False), (None, 128, 2000, 64, True),
     (64, 128, 2000, 64, False), (None, 128, 40, 40, False)],
)  # fmt: skip
def test_ranks_that_the_kernel_does_not_take_are_logged(caplog, wanted, nodes, vocab, ranks, said):
    caplog.set_level("INFO")
    assert usable_ranks(wanted, nodes, vocab) == ranks
    assert ("could use 127 ranks of a draft position; it gets 64" in caplog.text) == said
