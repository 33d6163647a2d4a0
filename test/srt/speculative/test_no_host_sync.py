# SPDX-License-Identifier: Apache-2.0
"""Nothing of a DDTREE step reads a tensor back to the host, where on a GPU the scheduler would wait for it.

Every torch operator of the step is watched while it runs on the CPU; the operators of sgl_kernel_sm120, which are not
torch's on a GPU, are not.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sgl_kernel_sm120
from sglang.srt.layers.attention.kdtree_metadata import combined_indices, combined_indptr
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_draft import top_candidates
from sglang.srt.speculative.ddtree_sampling import adjust_logits, target_tokens
from sglang.srt.speculative.ddtree_worker import DDTreeWorker
from sglang.srt.speculative.eagle_utils import TreeMaskMode

BATCH, NODES, DEPTH, RANKS, VOCAB, HIDDEN = 2, 8, 3, 4, 32, 16

# A value, or a shape that depends on values.
READ_BACK = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "is_nonzero",
    "repeat_interleave.Tensor",
)


class NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        assert not by_mask and not name.startswith(READ_BACK), f"{func} reads its tensor back to the host"
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_a_read():
    with pytest.raises(AssertionError, match="reads its tensor back"), NoReadBack():
        int(torch.ones(1))
    with pytest.raises(AssertionError, match="reads its tensor back"), NoReadBack():
        torch.arange(4)[torch.arange(4) > 2]
    with NoReadBack():
        torch.arange(4)[torch.arange(2)].sum()


def make_info(greedy):
    return SamplingBatchInfo(
        temperatures=torch.ones(BATCH, 1), top_ps=torch.ones(BATCH), top_ks=torch.full((BATCH,), VOCAB),
        min_ps=torch.zeros(BATCH), is_all_greedy=greedy, is_any_greedy=greedy, need_top_p_sampling=False,
        need_top_k_sampling=False, need_min_p_sampling=False, vocab_size=VOCAB, device="cpu",
        logit_bias=torch.zeros(BATCH, VOCAB), acc_additive_penalties=torch.zeros(BATCH, VOCAB),
    )  # fmt: skip


class GumbelSampler:
    """Stands for the device's sampler, which is upstream's."""

    def _sample_from_probs(self, probs, info, positions, unfiltered):
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1), None


class Plan:
    """A step's window of slots, as KVLocPlan hands it out."""

    def write_ids(self, translator):
        return torch.arange(BATCH * NODES)


class Worker(SimpleNamespace):
    """What a step reads of a worker. The drafter's KV writer is upstream's: its inputs are kept instead."""

    node_rows, tree_mask, commit = DDTreeWorker.node_rows, DDTreeWorker.tree_mask, DDTreeWorker.commit

    def _draft_write_ids(self, plan):
        return plan.write_ids(None)

    def _append_target_hidden_to_draft_kv_by_loc(self, **written):
        self.written = written


def make_backend(layout):
    if layout == "FULL_MASK":  # a stock backend, without a layout of its own
        return SimpleNamespace(verify_mask=None)
    buffer = torch.zeros(BATCH * NODES * NODES, dtype=torch.uint8)
    static = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=BATCH)
    return SimpleNamespace(verify_mask=static, tree_mask_mode=TreeMaskMode.QLEN_ONLY)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("layout", ["QLEN_ONLY", "FULL_MASK"])
def test_a_step(greedy, layout):
    prefix, rows = torch.tensor([5, 2]), torch.tensor([1, 0])
    table = torch.arange(60, dtype=torch.int32).view(2, 30)
    head = SimpleNamespace(weight=torch.randn(VOCAB, HIDDEN))
    draft_hidden, logits = torch.randn(BATCH * DEPTH, HIDDEN), torch.randn(BATCH * NODES, VOCAB)
    root, info = torch.tensor([3, 4]), make_info(greedy)
    step = SimpleNamespace(
        prefix_lens=prefix, batch_size=BATCH, plan=Plan(), num_nodes=NODES, max_path=DEPTH + 1,
        max_lens_cpu=SimpleNamespace(sum=lambda: 13 + 10),  # a host tensor on a GPU too: may be read
    )  # fmt: skip
    kv = [torch.randn(BATCH * NODES + 1, 4) for _ in range(3)]
    runner = SimpleNamespace(attn_backend=make_backend(layout), kv_index_translator=None)
    worker = Worker(num_nodes=NODES, max_path=DEPTH + 1, model_runner=runner, kv_buffers=kv)
    hidden = torch.arange(BATCH * NODES, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
    before = [buffer.clone() for buffer in kv]
    with NoReadBack():
        log_probs, ids = top_candidates(draft_hidden, head, RANKS, SimpleNamespace(world_size=1))
        shape = (BATCH, DEPTH, RANKS)
        tree = sgl_kernel_sm120.ddtree_build(root, ids.view(shape), log_probs.view(shape), NODES)
        mask, _ = worker.tree_mask(step, tree)
        combined_indices(table, rows, combined_indptr(prefix, NODES), 40)
        adjust_logits(logits, info, NODES, None)
        positions = (prefix[:, None] + tree.depth).reshape(-1)
        wanted = target_tokens(logits, info, positions, NODES, GumbelSampler())
        # Of the two requests the first accepts a path, whatever the target wanted.
        child = tree.tokens.gather(1, tree.first_child.clamp(min=0).long())
        wanted = torch.where(torch.tensor([[True], [False]]), child, wanted)
        accepted = sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, wanted, DEPTH + 1)
        worker.commit(step, accepted, hidden)
    assert mask.numel() == (BATCH * NODES * NODES if layout == "QLEN_ONLY" else (13 + 10) * NODES)
    assert int(accepted.accept_len[0]) > 1
    for request, path in enumerate(accepted.path.tolist()):
        for column, node in enumerate(path):
            to, source = request * NODES + column, request * NODES + node
            assert all(torch.equal(now[to], then[source]) for now, then in zip(kv, before, strict=True))
            assert int(worker.written["target_hidden"][request * (DEPTH + 1) + column, 0]) == source
    assert worker.written["positions"].view(BATCH, -1).tolist() == [[5, 6, 7, 8], [2, 3, 4, 5]]
