# SPDX-License-Identifier: Apache-2.0
"""Measures at start-up what a decode step of each width costs on this machine.

The steps are real ones, from draft to commit, of requests that do not exist: they read
and write slot 0, which belongs to no request. Their KV is therefore in the cache of the
device, and the time of reading a long prefix is a lower bound; it is the same for every
width.
"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Callable, List, Sequence

import sgl_kernel_sm120
import torch

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_budget import (
    CostTable,
    Decision,
    Option,
    load_costs,
    monotone,
)
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 4, 16, 64, 256)
CONTEXTS = (256, 4096, 32768, 131072)
REPEATS = 3
STEPS = 2  # of a repeat, behind one that is not timed
# A CPU is for trying things out: fewer points, a start that is not much longer.
CPU_BATCH_SIZES = (1, 8)
CPU_CONTEXTS = (256,)


def cost_table(worker: DDTreeWorker, options: Sequence[Option]) -> CostTable:
    """The supplied table, or a measured one. The same on every rank."""
    path = get_spec().speculative_ddtree_costs
    if path is not None:
        return load_costs(path)
    start = time.perf_counter()
    table = measure(worker, options)
    table = get_parallel().tp_group.broadcast_object(table, src=0)
    logger.info(
        "DDTREE: measured the cost of steps in %.1f s; batch 1, context %d: %s.",
        time.perf_counter() - start,
        table.contexts[0],
        ", ".join(
            f"{ms:.2f} ms at {width or 'the chain'}"
            for width, ms in zip(table.widths, table.step_ms[0][0])
        ),
    )
    return table


def measure(worker: DDTreeWorker, options: Sequence[Option]) -> CostTable:
    chain, *trees = options
    widths = [tree.width for tree in trees]
    on_cpu = torch.device(worker.device).type == "cpu"
    max_batch = int(worker.model_runner.max_running_requests)
    max_context = int(worker.model_runner.model_config.context_len) - 2 * widths[-1]
    batch_sizes = within(CPU_BATCH_SIZES if on_cpu else BATCH_SIZES, max_batch)
    largest = min(max_batch, BATCH_SIZES[-1])
    if not on_cpu and batch_sizes[-1] < largest:
        batch_sizes.append(largest)  # or it would cost what a smaller batch does
    contexts = within(CPU_CONTEXTS if on_cpu else CONTEXTS, max_context)
    step_ms, node_ms = [], []
    for batch_size in batch_sizes:
        step_ms.append([])
        node_ms.append([])
        for context in contexts:
            # Last, of the widest trees the root alone.
            kinds = [*map(Decision, options), Decision(trees[-1], min_log_prob=1.0)]
            first, *full, empty = time_steps(worker, batch_size, context, kinds)
            full = monotone(full)
            # Trees of its width have a chain's launches, and some more.
            wider = [ms for width, ms in zip(widths, full) if width >= chain.width]
            step_ms[-1].append((min(first, *wider), *full))
            saved = max(full[-1] - empty, 0.0)
            node_ms[-1].append(saved / (batch_size * (widths[-1] - 1)))
    return CostTable(
        batch_sizes=tuple(batch_sizes),
        contexts=tuple(contexts),
        widths=(0, *widths),
        step_ms=tuple(tuple(plane) for plane in step_ms),
        node_ms=tuple(tuple(row) for row in node_ms),
    )


def within(points: Sequence[int], limit: int) -> List[int]:
    return [p for p in points if p < limit] or [max(limit, 1)]


def time_steps(
    worker: DDTreeWorker, batch_size: int, context: int, kinds: Sequence[Decision]
) -> List[float]:
    """Milliseconds of a step of each kind: the least of the repeats, which take turns,
    since what runs beside them only adds."""
    device = torch.device(worker.device)
    best = [math.inf] * len(kinds)
    for i in range(REPEATS + 1):
        for kind, decision in enumerate(kinds):
            batches = [
                idle_batch(worker, batch_size, context)
                for _ in range(1 if device.type == "cpu" else 1 + STEPS)
            ]
            steps = [partial(run_step, worker, batch, decision) for batch in batches]
            ms = time_steps_ms(steps, device)
            if i > 0:  # the first round warms up
                best[kind] = min(best[kind], ms)
    return best


def time_steps_ms(steps: Sequence[Callable[[], None]], device: torch.device) -> float:
    """Milliseconds of a step behind others: of all but the first, if there are more. A
    server's host runs ahead of its device: it is the slower of the two that counts, and
    the time of a step alone would be their sum."""
    first, *others = steps
    if device.type == "cpu":
        start = time.perf_counter()
        first()
        return (time.perf_counter() - start) * 1000
    module = torch.get_device_module(device)
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    module.synchronize()
    first()
    start.record()
    for step in others:
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / len(others)


def idle_batch(worker: DDTreeWorker, batch_size: int, context: int) -> ScheduleBatch:
    """Requests of the row that belongs to none, all of whose slots are slot 0."""
    device = torch.device(worker.device)

    def full(value, *shape, dtype=torch.int64, on=device) -> torch.Tensor:
        return torch.full((batch_size, *shape), value, dtype=dtype, device=on)

    sampling = SamplingBatchInfo(
        temperatures=full(1.0, 1, dtype=torch.float32),
        top_ps=full(1.0, dtype=torch.float32),
        top_ks=full(1, dtype=torch.int32),
        min_ps=full(0.0, dtype=torch.float32),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=int(worker.model_runner.model_config.vocab_size),
        device=str(device),
    )
    lens = full(context)
    return ScheduleBatch(
        reqs=[],
        forward_mode=ForwardMode.DECODE,
        model_config=worker.model_runner.model_config,
        device=str(device),
        req_pool_indices=full(0),
        seq_lens=lens,
        seq_lens_cpu=full(context, on="cpu"),
        seq_lens_sum=batch_size * context,
        orig_seq_lens=lens.int(),
        sampling_info=sampling,
        spec_algorithm=worker.model_runner.spec_algorithm,
        spec_info=make_draft_input_v2(bonus_tokens=full(0), new_seq_lens=lens),
        can_run_decode_cuda_graph=True,
    )


def run_step(worker: DDTreeWorker, batch: ScheduleBatch, decision: Decision) -> None:
    step = worker.plan_step(batch, decision)
    log_probs, ids = worker.draft_candidates(step)
    # Nodes of different tokens, as a model with experts would see them.
    ids = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    ids = ids % step.batch.sampling_info.vocab_size
    tree = worker.build_tree(step, log_probs, ids)
    logits = worker.verify(step, tree).logits_output
    wanted = logits.next_token_logits.argmax(dim=-1).view(tree.tokens.shape)
    accepted = sgl_kernel_sm120.tree_accept(
        tree.tokens, tree.parents, wanted, step.max_path
    )
    worker.commit(step, accepted, logits.hidden_states)
