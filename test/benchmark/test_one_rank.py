# SPDX-License-Identifier: Apache-2.0
"""One rank's step time: what is measured of a stream, what a result file must hold, the tables, and the whole benchmark
on a model of two layers."""

import gzip
import itertools
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import report
import torch
from docs.documents import documented
from one_rank import __main__ as main
from one_rank import arm, breakdown, experts, plot, results, seed, shapes, table, tune_experts

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"


def chunks(*points):
    return [arm.Chunk(seconds, steps, tokens, cached=0) for seconds, steps, tokens in points]


def test_a_step_is_the_time_between_chunks_over_the_steps_between_them():
    warm = [(float(i), i, i) for i in range(arm.WARM_STEPS + 1)]
    found = arm.step_times_ms(chunks(*warm, (4.010, 5, 7), (4.040, 7, 11), (4.040, 7, 11), (4.045, 8, 12)))
    assert found == pytest.approx([10.0, 15.0, 5.0])


def test_quantiles_lie_between_neighbours():
    assert arm.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert arm.quantile([0.0, 10.0], 0.2) == pytest.approx(2.0)
    assert arm.quantile([7.0], 0.8) == 7.0


@pytest.mark.parametrize(
    ("step_ms", "steps"), [(1.0, (4, 32)), (200.0, (4, 11)), (299.0, (4, 6)), (301.0, (1, 3)), (2143.0, (1, 3))]
)
def test_a_slow_arm_is_measured_for_fewer_steps(step_ms, steps):
    assert arm.steps_within(3.0, step_ms, 32) == steps


class Clock:
    """An Engine whose steps, and the prefill of a prompt's tail, take ms_a_token times the prompt, and its time."""

    def __init__(self, monkeypatch, ms_a_token):
        self.ms_a_token, self.now, self.streams = ms_a_token, 0.0, []
        monkeypatch.setattr(arm.time, "perf_counter", lambda: self.now)

    def generate(self, input_ids, sampling_params, stream):
        count = sampling_params["max_new_tokens"]
        self.streams.append((len(input_ids), count))
        for done in range(1, count + 1):
            self.now += self.ms_a_token * len(input_ids) / 1e3
            cached = len(input_ids) - arm.TAIL
            yield {"meta_info": {"completion_tokens": done, "spec_verify_ct": done - 1, "cached_tokens": cached}}
        self.now += self.ms_a_token * len(input_ids) / 1e3  # one step more is in flight


def rows_of(engine, *, name="tree_triton", contexts=shapes.CONTEXTS, **fields):
    options = {"kv_dtype": "bf16", "page_size": 1, "steps": 32, "limit_s": main.TASK_DEFAULTS["limit_s"]} | fields
    task = arm.Task(name, 9, "full", list(contexts), profile=False, turn="", rows="", **options)
    path, row, rows = seed.path_ids(max(contexts), 100), None, []
    for context in contexts:
        row = arm.measure(engine, task, context, path, 100, before=row)
        rows.append(row)
    return rows


def test_upstreams_tree_is_measured_in_45_seconds(monkeypatch):
    """At its measured speed on an H200: 2.14 s a step at 185k."""
    engine = Clock(monkeypatch, 2142.7 / 185_000)
    rows = rows_of(engine)
    assert engine.now < 45
    assert [row["context"] for row in rows] == list(shapes.CONTEXTS)
    assert all(row["ms_per_step_p50"] == pytest.approx(2142.7 * row["context"] / 185_000, rel=1e-3) for row in rows)
    assert [row["steps"] for row in rows if row["context"] > 30_000] == [arm.SLOW_STEPS] * 4
    assert results.problems(make_result(rows)) == []


def test_a_fast_arm_is_measured_for_all_steps_and_probed_once(monkeypatch):
    engine = Clock(monkeypatch, 20.0 / 185_000)
    rows = rows_of(engine, name="plain_triton")
    assert [row["steps"] for row in rows] == [32] * len(shapes.CONTEXTS)
    assert len(engine.streams) == len(shapes.CONTEXTS) + 1 and "draft_window" not in rows[0]


def test_a_stream_that_ends_within_its_warm_up_is_an_error():
    steps = [arm.Chunk(float(i), i, i + 1, cached=64) for i in range(3)]
    task = arm.Task("plain_triton", 1, "full", [64], "bf16", 1, 6, 5.0, False, "turn", "rows")
    with pytest.raises(ValueError, match="no step behind 4 of warm-up in 3 chunks"):
        arm.row_of(task, 64, 0.1, steps, 4)


def make_row(name="tree_kdtree", context=4096, s_q=9, ms=8.0, **fields):
    row = {
        "arm": name, "context": context, "s_q": s_q, "kv_dtype": "bf16", "page_size": 1, "graphs": True,
        "ms_per_step_p20": ms * 0.99, "ms_per_step_p50": ms, "ms_per_step_p80": ms * 1.02, "steps": 30,
        "accept_length": 1.0, "cached_tokens": context - 8, "first_chunk_s": 0.1,
        "tok_s": {str(a): round(1e3 * a / ms, 2) for a in shapes.ACCEPT_LENGTHS},
    }  # fmt: skip
    return row | fields


def make_result(rows, scale="full"):
    header = {
        "format": results.FORMAT, "date": "2026-01-02T03:04:05Z", "commit": "0123456789abcdef", "device": "cuda",
        "gpu": {"name": "Test GPU", "driver_version": "1.2"}, "versions": {"torch": "2.11"}, "scale": scale,
        "model": shapes.KIMI_RANK, "draft_window": shapes.DRAFT_WINDOW,
    }  # fmt: skip
    return {"header": header, "rows": rows, "not_available": []}


TIMES = {
    "plain_triton": 10.0, "plain_kdtree": 9.0, "tree_triton": 62.0, "tree_kdtree": 8.0, "eagle_triton": 66.0,
    "eagle_kdtree": 11.0,
}  # fmt: skip


@pytest.fixture
def result():
    rows = [make_row(name, 4096, 9 if "plain" not in name else 1, ms) for name, ms in TIMES.items()]
    rows += [make_row(name, 65536, 9 if "plain" not in name else 1, ms * 3) for name, ms in TIMES.items()]
    rows.append(make_row("tree_kdtree", 4096, 17, 16.0))
    rows[3]["kernels_us"] = {"attention": 3000.0, "matrix products": 4500.0, "idle": 100.0}
    return make_result(rows)


def test_a_result_is_read_back(result, tmp_path):
    results.save(tmp_path / "r.json", result)
    assert results.load(tmp_path / "r.json")["rows"] == result["rows"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ms_per_step_p20": 9.0}, "percentiles"),
        ({"ms_per_step_p50": 0.0}, "percentiles"),
        ({"tok_s": {"1": 125.0, "4": 400.0, "7": 875.0}}, "tok_s at 4"),
        ({"cached_tokens": 100}, "only 100 of 4096 tokens were there"),
        ({"arm": "nonsense"}, "no arm 'nonsense'"),
        ({"graphs": 1}, "'graphs' is 1"),
    ],
)
def test_a_result_that_does_not_follow_is_refused(change, problem):
    assert any(problem in found for found in results.problems(make_result([make_row() | change])))


def test_the_same_row_twice_is_refused():
    assert results.problems(make_result([make_row(), make_row(ms=9.0)])) == [
        "row 1: ('tree_kdtree', 9, 4096, 'bf16', 1) occurs twice"
    ]


def test_the_tables_hold_the_measured_times_and_their_ratios(result):
    columns, rows = table.steps(result)
    assert columns[1:] == [
        "plain decode, Triton", "plain decode, kdtree_sm120", "DDTREE, Triton", "DDTREE, kdtree_sm120",
        "tree over Triton's tree", "tree over plain Triton",
    ]  # fmt: skip
    assert rows[0] == ["4,096", "10.00", "9.00", "62.00", "8.00", "7.75x", "1.25x"]
    columns, rows = table.speeds(result)
    assert columns[2:5] == ["tree of 9, at 1", "tree of 9, at 4", "tree of 9, at 7"]
    assert rows[0] == ["4,096", "100.0", "125.0", "500.0", "875.0", "62.5", "250.0", "437.5"]
    assert rows[1][5:] == ["-", "-", "-"]
    assert table.eagle(result)[1][0] == ["4,096", "66.00", "11.00", "6.00x"]
    assert table.kernels(result) == (
        ["context", "attention", "idle", "matrix products"], [["4,096", "3,000", "100", "4,500"]]
    )  # fmt: skip
    assert table.beside(result)[1] == [
        ["4,096", "39.0", "116.5", "3.0x", "62.00", "8.00", "7.8x"],
        ["65,536", "1.5", "9.2", "6.1x", "186", "24.00", "7.8x"],
    ]  # fmt: skip
    assert table.collapse(result)[1] == [["63,903", "2.8", "65,536", "5.4", "41.7", "33.3"]]
    assert table.differences(result)[1] == []  # plain decoding was not profiled
    result["rows"][0]["kernels_us"] = {"Triton attention": 2000.0, "idle": 50.0}
    assert table.differences(result) == (
        ["context", "Triton attention", "attention", "idle", "matrix products"],
        [["4,096", "-2.00", "+3.00", "+0.05", "+4.50"]],
    )


def test_the_committed_run_reaches_what_it_was_to_reach():
    """docs/performance.md says so."""
    result = results.load(BENCHMARK / "results" / "h200" / "one_rank.json")
    measured = {(row["arm"], row["s_q"]): set() for row in result["rows"]}
    for row in result["rows"]:
        measured[row["arm"], row["s_q"]].add(row["context"])
    trees = itertools.product(("tree_triton", "tree_kdtree", "tree_kdtree_eager"), (9, 17, 33))
    wanted = {("plain_triton", 1), ("plain_kdtree", 1), ("dflash_triton", 8), ("dflash_kdtree", 8), *trees}
    assert {of: measured.get(of) for of in wanted} == {of: set(shapes.CONTEXTS) for of in wanted}
    rows = table.by_context(result, 9)
    steps = {context: {arm: row["ms_per_step_p50"] for arm, row in of.items()} for context, of in rows.items()}
    assert sorted(steps) == list(shapes.CONTEXTS)
    assert all(of["tree_kdtree"] <= of["plain_triton"] for context, of in steps.items() if context >= 4096)
    assert steps[185_000]["tree_kdtree"] < 1.8 * steps[4096]["tree_kdtree"]
    assert all(of["plain_kdtree"] <= of["plain_triton"] for of in steps.values())
    for context, speed in ((65_536, 55), (185_000, 108)):
        assert steps[context]["tree_triton"] >= speed * steps[context]["tree_kdtree"]


BLOCK = "<!-- results: {} r.json -->\n{}\n<!-- /results -->\n"


def test_a_document_says_that_nothing_was_measured_until_it_is(result, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(BLOCK.format("one_rank_steps", "an old number: 1.23"))
    assert report.main([], root=tmp_path) == 0
    assert page.read_text() == BLOCK.format("one_rank_steps", "Not measured yet.")
    results.save(tmp_path / "r.json", result)
    assert report.main(["--check"], root=tmp_path) == 1
    assert report.main([], root=tmp_path) == 0
    assert "| 4,096 | 10.00 | 9.00 | 62.00 | 8.00 | 7.75x | 1.25x |" in page.read_text()


def test_a_result_of_the_small_model_fills_no_document(result, tmp_path, capsys):
    results.save(tmp_path / "r.json", make_result(result["rows"], scale="small"))
    (tmp_path / "page.md").write_text(BLOCK.format("one_rank_steps", ""))
    assert report.main([], root=tmp_path) == 2
    assert "scale 'small', which says nothing about speed" in capsys.readouterr().err


def test_plots_are_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    results.save(tmp_path / "r.json", result)
    assert plot.main([str(tmp_path / "r.json")]) == 0
    for name in ("r_context.png", "r_kernels.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# Profiles.


def test_kernels_are_counted_by_kind_and_gaps_as_idle(tmp_path):
    def event(name, start, duration, cat="kernel"):
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}

    events = [
        event("void sgl_kernel_sm120::mla_tree_verify_kernel<9>", 0, 40), event("nvjet_tst_128x8_64x12", 50, 30),
        event("void at::native::vectorized_elementwise_kernel", 60, 10),  # at the same time, on another stream
        event("fused_moe_kernel", 100, 20), event("aten::mm", 0, 1000, cat="cpu_op"),
    ]  # fmt: skip
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    # What runs while another does counts for the one ahead; there is no graph, so the trace is not cut.
    assert breakdown.kernel_times(path, steps=2) == {
        "attention": 20.0, "experts": 10.0, "idle": 15.0, "matrix products": 15.0
    }  # fmt: skip
    assert breakdown.whole_steps(path) == 0


def test_a_profile_is_cut_to_whole_steps(tmp_path):
    """A prefill that the profile's start met, then four replays of the target's graph, the first seen in part, and the
    drafter's graph and an eager kernel between them."""
    events, now, launch = [], 0.0, itertools.count(1)

    def add(name, duration, of, gap=0.0, cat="kernel"):
        nonlocal now
        events.append({
            "ph": "X", "cat": cat, "name": name, "ts": now + gap, "dur": duration, "args": {"correlation": of}
        })  # fmt: skip
        now += gap + duration

    for _ in range(100):
        add("_fwd_kernel", 5000, next(launch))
    for replay in range(4):
        of = next(launch)
        for layer in range(4 if replay == 0 else 10):
            add("mla_tree_verify_kernel", 30, of, gap=2.0 if layer else 0.0)
            add("nvjet_gemm", 60, of)
        add("ddtree_build_kernel", 7, next(launch), gap=40.0)
        add("Memcpy DtoD", 3, next(launch), cat="gpu_memcpy")
        of = next(launch)
        for _ in range(3):
            add("_fwd_kernel", 20, of)
    found = breakdown.kernel_times(trace_of(events, tmp_path), steps=5)
    assert breakdown.whole_steps(tmp_path / "t.json") == 2
    assert found == {
        "attention": 300.0, "Triton attention": 60.0, "gaps in graphs": 18.0, "idle": 40.0, "matrix products": 600.0,
        "other": 3.0, "tree": 7.0,
    }  # fmt: skip


def test_a_kernel_that_waits_for_the_one_ahead_of_it_adds_no_time(tmp_path):
    """As with programmatic dependent launches: on the GPU early, done only after its predecessor."""
    events = []
    for replay in range(3):
        for i in range(10):
            kernel = {
                "ph": "X",
                "cat": "kernel",
                "name": "rmsnorm" if i % 2 else "nvjet",
                "args": {"correlation": replay},
            }
            begin = 100.0 * i if i % 2 == 0 else 100.0 * (i - 1) + 5
            events.append(kernel | {"ts": 1000.0 * replay + begin, "dur": 100.0 * (i + 1) - begin})
    found = breakdown.kernel_times(trace_of(events, tmp_path), steps=5)
    assert found == {"idle": 0.0, "matrix products": 500.0, "norms and rotary": 500.0}


def trace_of(events, folder):
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


class Profiled:
    """An Engine that writes the traces which it is asked for, a file a rank."""

    def __init__(self, *stages, ranks=1, kernel="_fwd_kernel"):
        self.stages, self.ranks, self.kernel, self.asked, self.generated = stages, ranks, kernel, None, None

    def start_profile(self, **options):
        self.asked = options

    def generate(self, input_ids, sampling_params, stream):
        self.generated = sampling_params["max_new_tokens"]
        for stage, rank in itertools.product(self.stages, range(self.ranks)):
            duration = 100 * len(stage) + 50 * rank
            kernel = {"ph": "X", "cat": "kernel", "name": self.kernel, "dur": duration}
            events = [kernel | {"ts": 1000 * i} for i in range(arm.PROFILED_STEPS)]
            with gzip.open(Path(self.asked["output_dir"]) / f"1-TP-{rank}-{stage}.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": events}, file)
        yield {"meta_info": {"completion_tokens": self.generated}}


def test_a_profile_is_of_decode_steps_alone():
    engine = Profiled("EXTEND", "DECODE")
    assert arm.profile(engine, [1, 2, 3], 1)["kernels_us"]["Triton attention"] == 600
    assert engine.asked["profile_by_stage"] and engine.asked["num_steps"] == arm.PROFILED_STEPS
    assert engine.generated > 2 * arm.PROFILED_STEPS  # it stops by itself, at a step behind the last


def test_only_the_smallest_tree_is_profiled():
    args = SimpleNamespace(profile=True, trees=[9, 17], steps=3)
    found = {s_q: main.arguments_of(args, shapes.Run("tree_kdtree", s_q)).profile for s_q in (1, 9, 17)}
    assert found == {1: True, 9: True, 17: False}
    args.profile = False
    assert not main.arguments_of(args, shapes.Run("tree_kdtree", 9)).profile


def test_a_profile_of_two_ranks_says_what_their_collectives_take():
    found = arm.profile(Profiled("DECODE", ranks=2, kernel="ncclDevKernel_AllReduce"), [1], 2)
    assert found["kernels_us"]["collectives"] == 600 and found["collectives"]["waiting_us"] == [0, 50]


def test_a_profile_that_was_not_taken_is_an_error_and_costs_no_row(monkeypatch):
    with pytest.raises(ValueError, match=r"traces of decode steps of ranks \[\], expected of 1"):
        arm.profile(Profiled("EXTEND"), [1], 1)
    with pytest.raises(ValueError, match=r"ranks \[0\], expected of 2"):
        arm.profile(Profiled("DECODE"), [1], 2)
    steps = [arm.Chunk(float(i), i, i, cached=64) for i in range(12)]
    monkeypatch.setattr(arm, "stream", lambda *args: (0.1, steps))
    task = arm.Task("plain_triton", 1, "full", [64], "bf16", 1, 6, 5.0, True, "turn", "rows")
    row = arm.measure(SimpleNamespace(start_profile=lambda **options: None), task, 64, list(range(64)), 100)
    assert row["ms_per_step_p50"] == 1000.0 and "traces of decode steps" in row["profile_error"]


def trace(path, kernels):
    """kernels: (name, duration) one after another"""
    events = [{"ph": "X", "cat": "kernel", "name": n, "ts": 1000.0 * i, "dur": d} for i, (n, d) in enumerate(kernels)]
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        json.dump({"traceEvents": events}, file)
    return path


REDUCE, GATHER = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_AllGather_RING_LL"


def test_what_is_above_the_shortest_time_of_a_collective_is_waiting(tmp_path):
    """Two steps of an all-reduce and a gather; rank 1 comes late to the first reduce of each, rank 0 to a gather. Rank
    0's profile began one collective earlier."""
    first = [(REDUCE, 99), (REDUCE, 30), ("gemm", 500), (GATHER, 10), (REDUCE, 20), (GATHER, 10)]
    second = [(REDUCE, 10), (GATHER, 40), ("gemm", 500), (REDUCE, 10), (GATHER, 10)]
    found = breakdown.collective_times([trace(tmp_path / "0", first), trace(tmp_path / "1", second)], steps=2)
    assert found == {
        "count": 2.0, "busy_us": [35.0, 35.0], "work_us": 20.0, "waiting_us": [15.0, 15.0],
        "kinds": {REDUCE: [1.0, 10.0], GATHER: [1.0, 10.0]}, "order": [REDUCE, GATHER], "waiting_each_us": [15.0, 15.0],
    }  # fmt: skip


def test_collectives_of_a_step_that_was_not_seen_whole_are_counted_but_not_placed(tmp_path):
    spans = [(REDUCE, 10)] * 5
    found = breakdown.collective_times([trace(tmp_path / "0", spans), trace(tmp_path / "1", spans)], steps=2)
    assert found["count"] == 2.5 and found["work_us"] == 25.0
    assert found["order"] is None and found["waiting_each_us"] is None


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([(REDUCE, 1), (REDUCE, 1)], "collective 1 is"),
        ([(REDUCE, 1)] * 8, "the ranks ran 2, 8"),
        ([("gemm", 1)], "no collective"),
    ],
)
def test_ranks_that_did_not_run_the_same_are_an_error(tmp_path, second, message):
    with pytest.raises(ValueError, match=message):
        breakdown.collective_times(
            [trace(tmp_path / "0", [(REDUCE, 1), (GATHER, 1)]), trace(tmp_path / "1", second)], steps=1
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_fwd_grouped_kernel_stage1", "Triton attention"),
        ("_fwd_kernel", "Triton attention"),
        ("_fwd_kernel_stage2", "Triton attention"),
        ("mla_tree_verify_merge", "attention"),
        ("create_flashinfer_kv_indices_triton", "lists and masks"),
        ("ddtree_build_kernel", "tree"),
        ("sm90_xmma_gemm_bf16bf16", "matrix products"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u>", "norms and rotary"),
        ("void at::native::CatArrayBatchedCopy_vectorized<at::native>", "q and KV rows"),
        ("sglang::set_mla_kv_concat_q_kernel<1024l, 128l>", "q and KV rows"),
        ("void at::native::vectorized_elementwise_kernel<8>", "other"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("void sglang::all_reduce_one_shot_push_kernel<bf16>", "collectives"),
    ],
)
def test_a_kernels_name_says_its_kind(name, kind):
    assert breakdown.kind_of(name) == kind


# The tiles of the experts that stand in.

STEPS = (1, 8, 9, 17, 33)  # tokens


@pytest.fixture
def upstreams_tiles(tmp_path, monkeypatch):
    """What upstream's fused MoE kernel runs with on a GPU -> of (its name, tokens) the tiles of both products"""
    import triton

    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as upstream

    model = shapes.FULL.model
    settings = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    monkeypatch.setattr(upstream, "get_exec", lambda: settings)

    def prepare(gpu, version="3.6.0"):
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(upstream, "get_device_name", lambda: gpu)
        monkeypatch.setenv(experts.VARIABLE, str(experts.write_tiles(tmp_path / gpu, model, gpu, version)))
        upstream.get_moe_configs.cache_clear()

    def choose(tokens, count=model["n_routed_experts"]):
        width, hidden = model["moe_intermediate_size"], model["hidden_size"]
        w13, w2 = (count, 2 * width, hidden), (count, hidden, width)
        up, (down, _) = upstream.try_get_optimal_moe_config(w13, w2, 8, None, tokens, return_down_config=True)
        return {"up": up, "down": down}

    yield SimpleNamespace(prepare=prepare, choose=choose)
    upstream.get_moe_configs.cache_clear()


def test_every_arm_runs_with_the_tiles_that_were_tuned_for_its_card(upstreams_tiles):
    """Of the nearest number of tokens."""
    measured = tune_experts.load(BENCHMARK / "results" / "h200" / "expert_tiles.json")
    tuned = {(r["tokens"], r["product"]): r["tiles"] for r in measured["rows"] if r["chosen"]}
    assert {tokens for tokens, _ in tuned} == set(tune_experts.TOKENS)
    upstreams_tiles.prepare(measured["header"]["gpu"]["name"], measured["header"]["versions"]["triton"])
    for tokens in STEPS:
        nearest = min(tune_experts.TOKENS, key=lambda n: abs(n - tokens))
        assert upstreams_tiles.choose(tokens) == {p: tuned[nearest, p] for p in experts.PRODUCTS}


def test_a_file_of_tiles_has_one_choice_for_each_number_of_tokens():
    data = tune_experts.load(BENCHMARK / "results" / "h200" / "expert_tiles.json")
    columns, lines = tune_experts.table(data)
    assert [line[0] for line in lines] == [str(n) for n in tune_experts.TOKENS] and len(columns) == len(lines[0])
    next(row for row in data["rows"] if row["chosen"])["chosen"] = False
    assert any("is chosen" in problem for problem in tune_experts.problems(data))


def test_a_card_without_tuned_tiles_has_those_of_384_experts_at_every_step(upstreams_tiles):
    upstreams_tiles.prepare("NVIDIA H20000")
    both = dict.fromkeys(experts.PRODUCTS, experts.SMALL)
    assert [upstreams_tiles.choose(tokens) for tokens in (*STEPS, 8192)] == [both] * 6
    untuned = [upstreams_tiles.choose(tokens, 384)["up"] for tokens in STEPS]
    assert untuned == [experts.SMALL] * 5


class Experts(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        model = shapes.FULL.model
        shape = (count, model["hidden_size"], model["moe_intermediate_size"])
        self.w2_weight = torch.nn.Parameter(torch.empty(*shape, device="meta"))


def test_a_server_that_finds_no_tiles_is_refused(upstreams_tiles):
    upstreams_tiles.prepare("NVIDIA H20000")
    seed.check_tiles(torch.nn.Sequential(Experts(8)))
    with pytest.raises(RuntimeError, match="no tiles of 7 experts of width 256"):
        seed.check_tiles(torch.nn.Sequential(Experts(7)))
    with pytest.raises(RuntimeError, match="no fused experts"):
        seed.check_tiles(torch.nn.Linear(1, 1))


def tried(product, tokens, rows, us):
    tiles = experts.SMALL | {"BLOCK_SIZE_M": rows}
    times = {f"us_p{n}": us for n in (20, 50, 80)}
    return {"product": product, "tokens": tokens, "tiles": tiles, "bytes": 1000, "chosen": False, **times}


def test_both_products_get_tiles_of_as_many_rows():
    """They share one order of the tokens."""
    rows = [
        tried("up", 17, 16, 9.0), tried("up", 17, 16, 8.0), tried("down", 17, 16, 5.0),
        tried("up", 17, 32, 10.0), tried("down", 17, 32, 2.0), tried("up", 17, 64, 1.0),
    ]  # fmt: skip
    chosen = tune_experts.choose(rows)
    assert {product: of["17"]["BLOCK_SIZE_M"] for product, of in chosen.items()} == {"up": 32, "down": 32}
    assert [row["us_p50"] for row in rows if row["chosen"]] == [10.0, 2.0]
    with pytest.raises(ValueError, match="no tiles ran for both products of 9 tokens"):
        tune_experts.choose([tried("up", 9, 16, 1.0)])


def test_small_tiles_are_among_those_that_are_tried():
    for product, tokens in itertools.product(experts.PRODUCTS, tune_experts.TOKENS):
        tiles = tune_experts.candidates(product, tokens)
        assert tiles[0] == experts.SMALL and len({json.dumps(t) for t in tiles}) == len(tiles) < 80
        assert {t["BLOCK_SIZE_M"] for t in tiles} == {16, 32, 64} - {m for m in (32, 64) if m >= 2 * tokens}


def test_what_is_timed_is_the_experts_product():
    """Upstream's kernel, in Triton's interpreter, against torch."""
    program = """
import torch
import sglang.srt.layers.moe.moe_runner.triton_utils as upstream
from one_rank import tune_experts

def order(ids, rows, experts):  # upstream's has no CPU form
    places = [(ids.flatten() == e).nonzero().flatten().tolist() for e in range(experts)]
    blocks = [-(-len(mine) // rows) for mine in places]
    padded = [mine + [ids.numel()] * (n * rows - len(mine)) for mine, n in zip(places, blocks)]
    owners = [e for e, n in enumerate(blocks) for _ in range(n)]
    lists = sum(padded, []), owners, [sum(blocks) * rows]
    return [torch.tensor(x, dtype=torch.int32) for x in lists]

upstream.moe_align_block_size = order
model = tune_experts.Experts(2, "cpu", 4, 32, 64, "float32")  # the interpreter's bf16 is wrong
for product in tune_experts.PRODUCTS:
    for tokens in (1, 17):
        found = model.reason_wrong(product, tokens, tune_experts.experts.SMALL, model.expected(product, tokens))
        assert found is None, (product, tokens, found)
    assert "off by" in model.reason_wrong(product, 1, tune_experts.experts.SMALL, model.expected(product, 1, layer=1))
"""
    path = os.pathsep.join(filter(None, [str(BENCHMARK), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


# The seeded context.


@pytest.mark.parametrize("pairs", [False, True])
def test_the_seed_takes_real_slots_and_fills_every_pool(pairs):
    taken = {}
    buffers = [torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.float8_e4m3fn)]
    pools = [SimpleNamespace(kv_buffer=[b], k_buffer=None, v_buffer=None) for b in buffers]
    runners = [SimpleNamespace(token_to_kv_pool=pool) for pool in pools]

    def insert(params):
        taken["key"], taken["value"] = params.key, params.value

    scheduler = SimpleNamespace(
        tree_cache=SimpleNamespace(tree_core=SimpleNamespace(is_eagle=pairs), insert=insert),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=4, alloc=lambda n: torch.arange(1, n + 1)),
        model_config=SimpleNamespace(vocab_size=100), tp_worker=SimpleNamespace(model_runner=runners[0]),
        draft_worker=SimpleNamespace(_draft_model_runners=lambda: (runners[1],)),
    )  # fmt: skip
    seed.seed(scheduler, 11)
    assert taken["value"].tolist() == list(range(1, 9))  # whole pages
    assert array("q", taken["key"].token_ids).tolist() == seed.path_ids(8 + pairs, 100)
    assert all(b.float().abs().sum() > 0 and b.float().isfinite().all() for b in buffers)


def test_the_path_does_not_depend_on_how_much_of_it_is_asked_for():
    assert seed.path_ids(50, 512)[:10] == seed.path_ids(10, 512) and min(seed.path_ids(500, 20)) >= seed.FIRST_ID


# Arms.


def test_every_arm_has_its_sizes():
    runs = shapes.runs_of(list(shapes.ARMS), [9, 17], shapes.FULL)
    assert {run.name for run in runs} >= {"plain_triton-1", "dflash_triton-8", "tree_kdtree-9", "tree_kdtree-17"}
    assert len(runs) == len(set(runs)) == 4 + 2 * 5


def test_trees_of_other_arms_may_have_sizes_of_their_own():
    runs = shapes.runs_of(list(shapes.ARMS), [9, 17, 33], shapes.FULL, [9])
    sizes = {name: [run.s_q for run in runs if run.arm == name] for name in shapes.ARMS}
    assert sizes["tree_kdtree"] == [9, 17, 33]
    assert all(sizes[name] == [9] for name in ("tree_triton", "tree_kdtree_eager", "eagle_triton", "eagle_kdtree"))
    assert sizes["dflash_triton"] == [8] and sizes["plain_triton"] == [1]


def test_a_dflash_drafter_sees_the_same_window_on_every_backend():
    def arguments(name, window):
        run = shapes.Run(name, 9)
        return shapes.engine_arguments(
            run, shapes.FULL, kv_dtype="bf16", page_size=1, total_tokens=1000, draft_window=window
        )

    windowed = {name for name in shapes.ARMS if "speculative_draft_window_size" in arguments(name, 4096)}
    assert windowed == {
        "dflash_triton", "dflash_kdtree", "tree_triton", "tree_kdtree", "tree_kdtree_eager"
    }  # fmt: skip
    assert all(arguments(name, 4096)["speculative_draft_window_size"] == 4096 for name in windowed)
    assert not any("speculative_draft_window_size" in arguments(name, 0) for name in shapes.ARMS)


def test_arms_differ_in_what_their_name_says():
    def arguments(name, s_q=9, **changes):
        task = {"kv_dtype": "bf16", "page_size": 1, "total_tokens": 1000} | changes
        return shapes.engine_arguments(shapes.Run(name, s_q), shapes.FULL, **task)

    assert arguments("plain_triton")["attention_backend"] == "triton"
    assert "speculative_algorithm" not in arguments("plain_kdtree")
    eager, graphs = arguments("tree_kdtree_eager"), arguments("tree_kdtree")
    assert eager.pop("disable_cuda_graph") and eager == graphs
    assert arguments("eagle_kdtree")["speculative_eagle_topk"] == 4
    assert "speculative_draft_attention_backend" not in arguments("eagle_kdtree")  # the drafter follows its target
    assert arguments("tree_kdtree")["speculative_draft_attention_backend"] == "kdtree_sm120"
    assert arguments("dflash_triton")["speculative_draft_attention_backend"] == "triton"
    assert arguments("tree_kdtree", kv_dtype="fp8")["kv_cache_dtype"] == "fp8_e4m3"


def test_two_ranks_have_the_shapes_of_one_rank_each():
    """What upstream divides by the number of ranks is twice as large, and nothing else changes."""
    one, two = shapes.FULL, shapes.FULL.times(2)
    for name in ("model", "drafter"):
        a, b = getattr(one, name), getattr(two, name)
        grown = {key for key in a if a[key] != b[key]}
        assert all(b[key] == 2 * a[key] for key in grown)
        assert grown == {"num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"} | (
            {"moe_intermediate_size"} if name == "model" else set()
        )
    assert one.times(1) is one and two.model["num_attention_heads"] // 2 == 8
    arguments = shapes.engine_arguments(
        shapes.Run("tree_kdtree", 9, 2), shapes.FULL, kv_dtype="bf16", page_size=1, total_tokens=1000
    )
    assert arguments["tp_size"] == 2 and arguments["disable_custom_all_reduce"]
    own = shapes.Run("tree_kdtree", 9, 2, custom_all_reduce=True)
    arguments = shapes.engine_arguments(own, shapes.FULL, kv_dtype="bf16", page_size=1, total_tokens=1000)
    assert "disable_custom_all_reduce" not in arguments and own.name == "tree_kdtree-9-tp2-custom"


def test_an_arm_that_fails_is_said_to_have_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(main.sys, "executable", "/bin/false")
    out = tmp_path / "r.json"
    assert main.main(["--scale", "small", "--arms", "plain_triton", "eagle_triton", "--out", str(out)]) == 1
    data = json.loads(out.read_text())
    assert data["rows"] == []
    assert [(m["arm"], m["reason"].split(":")[0]) for m in data["not_available"]] == [
        ("eagle_triton", "EAGLE has no CPU form")
    ] * 3 + [("plain_triton", "exit code 1")]


@pytest.mark.server
@pytest.mark.long
def test_the_benchmark_runs_end_to_end_on_a_small_model(tmp_path):
    """An Engine for each arm: the context is found in the prefix cache, and the rows are those of a result file."""
    out = tmp_path / "r.json"
    typed = documented("benchmark/README.md", "python -m one_rank")
    command = [
        sys.executable, *typed[1:], "--arms", "plain_kdtree", "tree_kdtree",
        "--contexts", "64", "200", "--steps", "6", "--parallel", "1", "--logs", str(tmp_path), "--out", str(out),
        "--commit", "none",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(BENCHMARK), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=BENCHMARK, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    data = results.load(out)
    assert [(r["arm"], r["s_q"], r["context"]) for r in data["rows"]] == [
        ("plain_kdtree", 1, 64), ("plain_kdtree", 1, 200), ("tree_kdtree", 9, 64), ("tree_kdtree", 9, 200),
    ]  # fmt: skip
    assert all(r["cached_tokens"] == r["context"] - arm.TAIL for r in data["rows"])
    assert data["not_available"] == [] and data["header"]["draft_window"] == shapes.SMALL_DRAFT_WINDOW
    assert {r.get("draft_window") for r in data["rows"]} == {None, shapes.SMALL_DRAFT_WINDOW}
