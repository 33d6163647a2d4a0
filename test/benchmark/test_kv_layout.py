# SPDX-License-Identifier: Apache-2.0
"""bench_kv_layout.py at a few tokens: layouts are what they are called, and a CPU leaves no result of a GPU."""

import json
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmark"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import bench_kv_layout

    return bench_kv_layout


def runs(slots):
    breaks = (slots[1:] != slots[:-1] + 1).nonzero().flatten() + 1
    return [run.tolist() for run in slots.tensor_split(breaks)]


@pytest.mark.parametrize("layout, size", [("contiguous", 200), ("runs64", 64), ("runs16", 16), ("scattered", 1)])
def test_a_layout_has_the_runs_it_is_named_for(bench, layout, size):
    lengths = [200, 130]
    got = bench.slots_of(layout, lengths, slots=100_000, generator=torch.Generator().manual_seed(1))
    assert [len(slots) for slots in got] == lengths
    used = torch.cat(got)
    assert used.unique().numel() == 330 and bench.SINK <= used.min() and used.max() < 100_000
    for slots in got:
        pieces = runs(slots)
        assert all(start % min(size, 64) == 0 for start, *_ in pieces), "a page could not be loaded whole"
        assert len(pieces) <= -(-len(slots) // size) and len(pieces) > len(slots) // size - 3


def test_what_does_not_fit_is_said(bench):
    with pytest.raises(AssertionError, match="do not hold"):
        bench.slots_of("runs64", [200, 200], slots=400, generator=torch.Generator())


def test_every_row_is_measured_and_checked(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "TINY", [bench.Shape((70, 130), 3, 2)])
    monkeypatch.setattr(bench, "MODEL_LAYERS", 3)
    out = tmp_path / "cpu" / "kv_layout.json"
    arguments = ["--device", "cpu", "--tiny", "--pool-gb", "0.004", "--rounds", "2", "--budget-ms", "1"]
    assert bench.main([*arguments, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["header"]["format"] == "kv_layout-1" and data["header"]["device"] == "cpu"
    verify = [row for row in data["rows"] if row["kind"] == "verify"]
    asked = {
        (pool, layout, page)
        for pool in ("tight", "large")
        for layout, pages in bench.PROMISES.items()
        for page in pages
    }
    assert {(row["pool"], row["layout"], row["page_size"]) for row in verify} == asked
    assert all(len(row["us_p50_of_rounds"]) == 2 and row["error"] < 1e-2 for row in verify)
    by_layout = {row["layout"]: row["runs_per_request"] for row in verify if row["pool"] == "large"}
    assert by_layout["contiguous"] == 1 and by_layout["scattered"] > by_layout["runs16"] > by_layout["runs64"] > 1
    assert {row["op"] for row in data["rows"] if row["kind"] == "order"} == {"arrange", "bring_forward", "longest_runs"}
    (move,) = [row for row in data["rows"] if row["kind"] == "move"]
    assert move["bytes"] == move["slots"] * 3 * 1152
    assert f"written: {out}" in capsys.readouterr().out


def test_a_wrong_answer_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(bench.inputs, "relative_error", lambda out, want: (float("nan"), 0.0))
    monkeypatch.setattr(bench, "TINY", [bench.Shape((70,), 3, 2)])
    with pytest.raises(SystemExit, match="contiguous at .* is off by"):
        bench.main(["--device", "cpu", "--tiny", "--pool-gb", "0.001", "--budget-ms", "1"])


def test_a_cpu_writes_no_result_of_a_gpu(bench, tmp_path, capsys):
    for out in (tmp_path / "h200" / "kv_layout.json", tmp_path / "kv_layout.json"):
        with pytest.raises(SystemExit):
            bench.main(["--device", "cpu", "--tiny", "--out", str(out)])
        assert "belongs into a folder or a file named cpu" in capsys.readouterr().err
        assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main([])
    assert "no CUDA device" in capsys.readouterr().err
