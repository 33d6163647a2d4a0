# SPDX-License-Identifier: Apache-2.0
"""Nothing of a DDTREE step reads a tensor back to the host, where on a GPU the scheduler would wait for it.

Every torch operator of the step is watched while it runs on the CPU; the operators of sgl_kernel_sm120, which are not
torch's on a GPU, are not. On a GPU torch itself watches, in its sync debug mode: there also whole steps of a server,
with its graphs, its scheduler and the attention backend.
"""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from e2e.servers import MODELS
from torch.utils._python_dispatch import TorchDispatchMode

import sgl_kernel_sm120
from sglang.srt.layers.attention.kdtree_metadata import combined_indices, combined_indptr
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_budget import Decision, Option
from sglang.srt.speculative.ddtree_draft import DraftCandidates
from sglang.srt.speculative.ddtree_report import option_codes
from sglang.srt.speculative.ddtree_sampling import adjust_logits, target_tokens
from sglang.srt.speculative.ddtree_step import TreeStep
from sglang.srt.speculative.ddtree_worker import DDTreeWorker
from sglang.srt.speculative.eagle_utils import TreeMaskMode

BATCH, NODES, DEPTH, RANKS, VOCAB, HIDDEN = 2, 8, 3, 4, 32, 16

PLUGIN = Path(__file__).parents[2] / "e2e" / "sync_plugin" / "no_host_sync.py"

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

    def __init__(self, device):
        self.device = device

    def write_ids(self, translator):
        return torch.arange(BATCH * NODES, device=self.device)


class Worker(SimpleNamespace):
    """What a step reads of a worker. The drafter's KV writer is upstream's: its inputs are kept instead."""

    tree_mask, build_tree, count, commit = (
        DDTreeWorker.tree_mask,
        DDTreeWorker.build_tree,
        DDTreeWorker.count,
        DDTreeWorker.commit,
    )

    def _draft_write_ids(self, plan):
        return plan.write_ids(None)

    def _append_target_hidden_to_draft_kv_by_loc(self, **written):
        self.written = written


def make_backend(layout, device):
    if layout == "FULL_MASK":  # a stock backend, without a layout of its own
        return SimpleNamespace(verify_mask=None)
    buffer = torch.zeros(BATCH * NODES * NODES, dtype=torch.uint8, device=device)
    static = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=BATCH)
    return SimpleNamespace(verify_mask=static, tree_mask_mode=TreeMaskMode.QLEN_ONLY)


@contextlib.contextmanager
def no_read_back(device):
    if device == "cpu":
        with NoReadBack():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


TREE, CHAIN = Option(width=NODES), Option(width=DEPTH + 1, is_chain=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("layout", ["QLEN_ONLY", "FULL_MASK"])
@pytest.mark.parametrize("option", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_step(device, greedy, layout, option, learns):
    with torch.device(device):
        prefix, rows = torch.tensor([5, 2]), torch.tensor([1, 0])
        table = torch.arange(60, dtype=torch.int32).view(2, 30)
        head = SimpleNamespace(weight=torch.randn(VOCAB, HIDDEN))
        draft_hidden = torch.randn(BATCH * (DEPTH + 1), HIDDEN)
        nodes, info = option.width, make_info(greedy)
        logits = torch.randn(BATCH * nodes, VOCAB)
        kv = [torch.randn(BATCH * NODES + 1, 4) for _ in range(3)]
        hidden = torch.arange(BATCH * nodes, dtype=torch.float32)[:, None].expand(-1, HIDDEN)
        window = torch.arange(NODES)
        root, first_accepts = torch.tensor([3, 4]), torch.tensor([[True], [False]])
    step = SimpleNamespace(
        prefix_lens=prefix, batch_size=BATCH, plan=Plan(device), num_nodes=nodes, max_path=DEPTH + 1, window=NODES,
        root=root, decision=Decision(option, min_log_prob=-50.0), positions=prefix[:, None] + window,
        learns=learns, max_lens_sum=13 + 10, of_path=lambda of_window: TreeStep.of_path(step, of_window),
    )  # fmt: skip
    runner = SimpleNamespace(attn_backend=make_backend(layout, device), kv_index_translator=None)
    worker = Worker(
        num_nodes=NODES, model_runner=runner, kv_buffers=kv, is_adaptive=True, report=None,
        option_codes=option_codes((CHAIN, TREE), torch.device(device)),
    )  # fmt: skip
    candidates = DraftCandidates(
        lm_head=head, block_size=DEPTH + 1, num_ranks=RANKS, tp_group=SimpleNamespace(world_size=1), device=device
    )
    before = [buffer.clone() for buffer in kv]
    with no_read_back(device):
        log_probs, ids = candidates.of(draft_hidden)
        tree = worker.build_tree(step, log_probs, ids)
        mask, _ = worker.tree_mask(step, tree)
        combined_indices(table, rows, combined_indptr(prefix, nodes), 40)
        adjust_logits(logits, info, nodes, None)
        positions = (prefix[:, None] + tree.depth).reshape(-1)
        wanted = target_tokens(logits, info, positions, nodes, GumbelSampler())
        # Of the two requests the first accepts a path, whatever the target wanted.
        child = tree.tokens.gather(1, tree.first_child.clamp(min=0).long())
        wanted = torch.where(first_accepts, child, wanted)
        accepted = sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, wanted, step.max_path)
        worker.commit(step, accepted, hidden)
        counted = worker.count(step, tree, log_probs, ids, accepted)
    assert mask.numel() == (BATCH * nodes * nodes if layout == "QLEN_ONLY" else (13 + 10) * nodes)
    assert counted.counts.shape == (BATCH, 6 + (2 if learns else 0))
    assert int(accepted.accept_len[0]) > 1
    for request, path in enumerate(accepted.path.tolist()):
        for column, node in enumerate(path):
            to, source = request * NODES + column, request * NODES + node  # slots
            assert all(torch.equal(now[to], then[source]) for now, then in zip(kv, before, strict=True))
            row = request * (DEPTH + 1) + column
            assert int(worker.written["target_hidden"][row, 0]) == request * nodes + node
    assert worker.written["positions"].view(BATCH, -1).tolist() == [[5, 6, 7, 8], [2, 3, 4, 5]]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("budget", ["16", "auto"])
def test_steps_of_a_server(tmp_path, budget):
    """Greedy and sampled requests, more than run at once, so that others join and leave between the steps."""
    from e2e.plugins import plugin_environment
    from srt.mem_cache.test_defrag_gpu import GREEDY, OFF, Case, Server

    entries = json.loads((MODELS / "expected_steps.json").read_text())["entries"][:20]
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    case = Case(("--speculative-ddtree-budget", budget), checked=False, env=plugin_environment(plugins, PLUGIN))
    with Server(case, OFF, tmp_path / "server.log") as server:
        for parameters in (GREEDY, GREEDY | {"temperature": 0.8, "top_p": 0.95, "top_k": 40}):
            texts = [entry["prompt"] for entry in entries]
            response = requests.post(
                f"{server.url}/generate", json={"text": texts, "sampling_params": parameters}, timeout=120
            )
            assert response.status_code == 200, response.text + server.log.read_text()[-6000:]
            assert {len(answer["output_ids"]) for answer in response.json()} == {GREEDY["max_new_tokens"]}
        log = server.log.read_text()
    watched = dict.fromkeys(("greedy", "sampled"), 0)
    for number, kind in re.findall(r"no host sync in step (\d+) \((\w+)\)", log):
        watched[kind] = int(number)
    assert min(watched.values()) >= 32, watched
