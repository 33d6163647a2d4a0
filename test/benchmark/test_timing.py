# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from verify_bench import timing


def test_percentiles_interpolate():
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert [timing.percentile(values, f) for f in (0, 0.2, 0.5, 0.8, 1)] == pytest.approx([1, 1.8, 3, 4.2, 5])
    t = timing.summarize(values, 61, True)
    assert (t.p20, t.p50, t.p80, t.calls, t.samples) == pytest.approx((1.8, 3, 4.2, 61, 5))


def test_a_graph_is_a_step_unless_the_arm_is_slow():
    assert timing.plan_calls(80.0, layers=4) == timing.STEP_CALLS == 61
    assert timing.plan_calls(8.0, layers=203) == 203, "all pools, or the small ones would stay in L2"
    assert timing.plan_calls(36_000.0, layers=4) == 1
    assert timing.plan_calls(700.0, layers=53) == int(timing.GRAPH_MS * 1e3 / 700) == 42


def test_replays_fit_the_budget_within_limits():
    assert timing.plan_replays(10_000, budget_ms=250) == 25
    assert timing.plan_replays(1e9, budget_ms=250) == timing.MIN_REPLAYS
    assert timing.plan_replays(1e9, budget_ms=250, least=3) == 3
    assert timing.plan_replays(1.0, budget_ms=250) == timing.MAX_REPLAYS


def test_host_timing_rotates_layers_and_begins_every_step():
    seen, begun = [], []
    t = timing.measure(seen.append, 3, torch.device("cpu"), begin_step=lambda: begun.append(1), budget_ms=1)
    assert set(seen) == {0, 1, 2} and len(begun) == len(seen)
    assert 0 < t.p20 <= t.p50 <= t.p80 and not t.graph


@pytest.mark.gpu
def test_graph_timing_covers_all_layers_on_the_gpu():
    buffers = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    t = timing.measure(lambda i: buffers[i].add_(1), 3, torch.device("cuda"), budget_ms=20)
    torch.cuda.synchronize()
    assert t.graph and t.calls == timing.STEP_CALLS and 0.5 < t.p50 < 1000
    assert min(int(b[0]) for b in buffers) >= t.samples * (t.calls // 3)
