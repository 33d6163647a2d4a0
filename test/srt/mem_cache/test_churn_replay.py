# SPDX-License-Identifier: Apache-2.0
"""The churn benchmark checks the KV of every request it replays; a short replay of
each allocator, and of a trace file, is a test of both."""

import json
from array import array
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

BENCHMARK = Path(__file__).parents[3] / "benchmark"


@pytest.fixture(autouse=True)
def benchmark_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))


def replay(mode, trace, **kwargs):
    from kv_churn.replay import Replay

    options = dict(pool_tokens=4096, max_running=12, context=3000, budget_bytes=8 << 20)
    return Replay(mode, **options | kwargs).run(trace)


@pytest.mark.parametrize("mode", ["upstream", "need_sort", "tier0", "tier1"])
@pytest.mark.parametrize("mix", ["burst", "turns"])
def test_every_request_finds_its_kv(mode, mix):
    from kv_churn.traces import MIXES, synthetic

    outcome = replay(mode, synthetic(MIXES[mix], count=90, max_running=12, seed=3))
    assert outcome.requests == 90
    assert outcome.cached_tokens > 0
    assert (outcome.bytes_moved > 0) == (mode == "tier1")
    assert outcome.max_bytes_in_a_step <= 8 << 20


@pytest.fixture
def one_thread():
    """What a forked process of the command needs, which sets it for good."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_ranks_replay_the_requests_between_them(monkeypatch, tmp_path, one_thread):
    """The command itself: each request once, whatever the number of ranks."""
    from kv_churn import __main__ as command

    # What it changes for the whole process, and what takes long.
    for owner, name in [
        (command.gc, "freeze"),
        (command.gc, "set_threshold"),
        (command, "get_context"),
        (command, "ServerArgs"),
    ]:
        monkeypatch.setattr(owner, name, MagicMock())
    monkeypatch.setattr(command, "measure_all", list)
    results = []
    for ranks in ("1", "2"):
        out = tmp_path / f"{ranks}.json"
        options = ["--ranks", ranks, "--requests", "61", "--max-running", "6", "--pool-tokens", "4096"]
        arguments = ["kv_churn", *options, "--mix", "long-short", "--mode", "upstream", "tier1", "--out", str(out)]
        monkeypatch.setattr(command.sys, "argv", arguments)
        command.main()
        results.append(json.loads(out.read_text()))
    for result, ranks in zip(results, (1, 2), strict=True):
        assert result["ranks"] == ranks
        assert [row["requests"] for row in result["results"]] == [61, 61]
        assert [row["bytes_moved"] > 0 for row in result["results"]] == [False, True]
        assert all(row["cpu_seconds"] > 0 and row["wall_seconds"] > 0 for row in result["results"])


def test_tier0_leaves_fewer_runs_than_upstream():
    from kv_churn.traces import MIXES, synthetic

    def runs(mode):
        trace = synthetic(MIXES["turns"], count=150, max_running=12, seed=5)
        series = replay(mode, trace, sample_every=16).series.runs_per_1k_tokens
        return sum(series) / len(series)

    upstream, tier0 = runs("upstream"), runs("tier0")
    assert tier0 < upstream / 2, (tier0, upstream)


def test_a_short_pool_retracts_and_loses_nothing(monkeypatch):
    from kv_churn import replay as module
    from kv_churn.traces import MIXES, synthetic

    trace = synthetic(MIXES["long-short"], count=60, max_running=12, seed=2)
    assert replay("tier1", trace, pool_tokens=6144, context=6000).requests == 60
    monkeypatch.setattr(module, "PROMISE", 0.0)  # Admit by the prompts alone.
    trace = synthetic(MIXES["turns"], count=60, max_running=12, seed=2)
    outcome = replay("tier1", trace, pool_tokens=2600)
    assert outcome.retractions > 0


def test_a_request_that_no_pool_holds_is_named():
    """Rather than waited for: by its prompt, or when its answer has filled the pool."""
    from kv_churn.traces import TraceRequest

    for prompt, answer in ((300, 4), (200, 150)):
        trace = [TraceRequest(0.0, array("q", range(prompt)), array("q", range(answer)))]
        with pytest.raises(ValueError, match=f"--pool-tokens: .* request 0 .*, {prompt + answer} tokens; got 256"):
            replay("tier1", trace, pool_tokens=256)


def test_a_mooncake_trace_shares_what_its_hashes_share(tmp_path):
    from kv_churn.traces import mooncake

    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [1, 2, 3]},
        {"timestamp": 50, "input_length": 1500, "output_length": 64, "hash_ids": [1, 2, 9]},
        {"timestamp": 90, "input_length": 700, "output_length": 16, "hash_ids": [8, 7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read(limit=9):
        return list(mooncake(path, shrink=4, steps_per_second=100, limit=limit))

    first, second, third = read()
    assert [len(r.prompt) for r in (first, second, third)] == [275, 375, 175]
    assert [len(r.answer) for r in (first, second, third)] == [10, 16, 4]
    assert [r.arrival for r in (first, second, third)] == [0, 5, 9]
    assert first.prompt[:256] == second.prompt[:256]
    assert not set(first.prompt[256:]) & set(second.prompt[256:])
    assert len(read(limit=2)) == 2
    outcome = replay("tier1", read())
    assert outcome.requests == 3


@pytest.mark.parametrize(
    ("line", "shrink", "message"),
    [
        ('{"timestamp": 0, "input', 4, "line 1: expected an object"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}', 4, "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}', 4, "hash_ids"),
        ('{"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [1, 2]}', 1, "--context is 600"),
        ("{}", 1024, "--shrink: expected 1 to 512"),
    ],
)
def test_a_bad_trace_is_named_by_its_line(tmp_path, line, shrink, message):
    from kv_churn.traces import mooncake

    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        list(mooncake(path, shrink=shrink, steps_per_second=1, limit=9, context=600))


def test_contiguity_is_counted_right():
    from kv_churn.contiguity import measure

    rows = np.zeros((2, 140), dtype=np.int32)
    rows[0, :128] = np.arange(1, 129)
    rows[1, :130] = np.arange(200, 460, 2)
    rows[1, :64] = np.arange(600, 664)
    got = measure(rows, np.array([128, 130]))
    assert got.runs_per_request == (1 + 1 + 66) / 2
    assert got.longest_run == 128
    assert got.block_share == 3 / 4
    assert round(got.runs_per_1k_tokens, 3) == round(1000 * 68 / 258, 3)


def test_the_document_shows_the_committed_result():
    from kv_churn.table import contiguity_table, cost_table

    root = BENCHMARK.parent
    result = json.loads((BENCHMARK / "results/cpu/churn.json").read_text())
    assert result["format"] == "kv_churn-1"
    assert {"date", "commit", "command", "host", "versions"} <= result.keys()
    document = (root / "docs/kv-defrag.md").read_text()
    assert contiguity_table(result) in document
    assert cost_table(result) in document
