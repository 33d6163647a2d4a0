# SPDX-License-Identifier: Apache-2.0
"""Time per attention call: a CUDA graph is one step over rotating KV pools; eager where capture is impossible."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import torch

STEP_CALLS = 61  # layers of the model the shapes come from: what is done once a step is shared by that many calls
GRAPH_MS = 30.0  # a graph of a slow arm holds fewer calls, so that one replay takes about this long
MIN_REPLAYS, MAX_REPLAYS = 5, 40


@dataclasses.dataclass(frozen=True)
class Timing:
    p20: float  # us a call
    p50: float
    p80: float
    calls: int  # calls in one sample
    samples: int
    graph: bool


def percentile(values: list[float], fraction: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(samples: list[float], calls: int, graph: bool) -> Timing:
    return Timing(
        percentile(samples, 0.2), statistics.median(samples), percentile(samples, 0.8), calls, len(samples), graph
    )


def plan_calls(call_us: float, layers: int) -> int:
    """Calls in one graph: a whole step over all pools, or as many as take GRAPH_MS."""
    return max(1, min(max(STEP_CALLS, layers), int(GRAPH_MS * 1e3 / max(call_us, 1e-3))))


def plan_replays(sample_us: float, budget_ms: float, least: int = MIN_REPLAYS) -> int:
    return max(least, min(MAX_REPLAYS, int(budget_ms * 1e3 / max(sample_us, 1e-3))))


def measure(
    run: Callable[[int], None],
    layers: int,
    device: torch.device,
    *,
    begin_step: Callable[[], None] | None = None,
    graph: bool = True,
    budget_ms: float = 150.0,
    min_replays: int = MIN_REPLAYS,
) -> Timing:
    """`run(layer)` is one call; `begin_step()` is what happens once a step and is part of the time."""
    step = begin_step or (lambda: None)
    if device.type != "cuda":
        return _measure_host(run, layers, step, budget_ms, min_replays)
    step()
    run(layers - 1)  # compile and load before anything is captured
    call_us = _events_us(lambda: run(0))
    if not graph:
        replays = plan_replays(call_us, budget_ms, min_replays)
        return summarize([_events_us(lambda i=i: (step(), run(i % layers))) for i in range(replays)], 1, False)
    calls = plan_calls(call_us, layers)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
        for i in range(calls):
            run(i % layers)
    captured.replay()
    samples = [_events_us(captured.replay)]
    for _ in range(plan_replays(samples[0], budget_ms, min_replays) - 1):
        samples.append(_events_us(captured.replay))
    return summarize([us / calls for us in samples], calls, True)


def _events_us(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _measure_host(
    run: Callable[[int], None], layers: int, step: Callable[[], None], budget_ms: float, least: int
) -> Timing:
    def once(i: int) -> float:
        start = time.perf_counter()
        step()
        run(i % layers)
        return (time.perf_counter() - start) * 1e6

    first = once(0)
    return summarize([once(i) for i in range(plan_replays(first, budget_ms, least))], 1, False)
