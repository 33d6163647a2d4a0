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
from sglang.srt.layers.attention.kdtree_metadata import combined_indices, combined_indptr, full_mask
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_draft import top_candidates
from sglang.srt.speculative.ddtree_sampling import adjust_logits, target_tokens
from sglang.srt.speculative.ddtree_worker import DDTreeWorker

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


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("layout", ["QLEN_ONLY", "FULL_MASK"])
def test_a_step(greedy, layout):
    prefix, rows = torch.tensor([5, 2]), torch.tensor([1, 0])
    table = torch.arange(60, dtype=torch.int32).view(2, 30)
    head = SimpleNamespace(weight=torch.randn(VOCAB, HIDDEN))
    hidden, logits = torch.randn(BATCH * DEPTH, HIDDEN), torch.randn(BATCH * NODES, VOCAB)
    root, info = torch.tensor([3, 4]), make_info(greedy)
    worker = SimpleNamespace(num_nodes=NODES)
    with NoReadBack():
        log_probs, ids = top_candidates(hidden, head, RANKS, SimpleNamespace(world_size=1))
    shape = (BATCH, DEPTH, RANKS)
    tree = sgl_kernel_sm120.ddtree_build(root, ids.view(shape), log_probs.view(shape), NODES)
    with NoReadBack():
        if layout == "FULL_MASK":
            full_mask(tree.visible, prefix, 300)
        combined_indices(table, rows, combined_indptr(prefix, NODES), 40)
        adjust_logits(logits, info, NODES, None)
        positions = (prefix[:, None] + tree.depth).reshape(-1)
        wanted = target_tokens(logits, info, positions, NODES, GumbelSampler())
    accepted = sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, wanted, DEPTH + 1)
    with NoReadBack():
        DDTreeWorker.node_rows(worker, accepted.path)
    assert int(accepted.accept_len.min()) >= 1
