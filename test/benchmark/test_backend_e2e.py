# SPDX-License-Identifier: Apache-2.0
"""The comparison of two Engines: what its rule lets pass and what not, and the whole of it on a CPU."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import backend_e2e as e2e
import pytest
from docs.documents import documented

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "backend_e2e.py"


SECOND = 9  # the second best token everywhere


def answer(*tokens, gap=1.0, shift=0.0):
    """[token, its log-probability, those of the best two, the best two]"""
    return [[token, -1.0 - shift, -1.0, -1.0 - gap, token, SECOND] for token in tokens]


def outcome(*answers, **fields):
    tokens = [[entry[0] for entry in answer] for answer in answers]
    return {
        "logprobs": list(answers), "start_s": 1.0, "accept_length": [1.0] * len(answers),
        "again": tokens, "alone": tokens[0],
    } | fields  # fmt: skip


def ended(run, **fields):
    """What execute() returns of a run with nothing to object to."""
    return {
        "run": run, "result": outcome(answer(1, 2, 3)), "error": None, "reports": [], "mismatches": [], "started": [0],
        "mixed_steps": 0, "fallbacks": [], "decode_sizes": list(range(1, e2e.RUNNING + 1)),
    } | fields  # fmt: skip


def test_equal_answers_hold():
    a = outcome(answer(1, 2, 3), answer(4))
    assert e2e.compare(a, a, "bf16") == {"parted": [], "max_logprob_difference": 0.0, "problems": []}


def test_an_entry_holds_the_best_two_beside_their_log_probabilities():
    meta = {
        "output_token_logprobs": [(-0.5, 7, None), (-1.5, 4, None)],
        "output_top_logprobs": [[(-0.5, 7, None), (-2.0, 3, None)], [(-0.25, 5, None), (-1.5, 4, None)]],
    }
    assert e2e.logprob_entries(meta) == [[7, -0.5, -0.5, -2.0, 7, 3], [4, -1.5, -0.25, -1.5, 5, 4]]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("gap", "holds"), [(0.0, True), (0.2, True), (0.21, False), (NAN, False), (-INF, False)])
def test_answers_may_part_at_a_near_tie_only(gap, holds):
    found = e2e.compare(outcome(answer(1, 2, 3, gap=gap)), outcome(answer(1, 9, 8)), "bf16")
    assert (found["problems"] == []) == holds
    assert [(p["answer"], p["token"]) for p in found["parted"]] == [(0, 1)]


def test_a_token_that_is_none_of_the_best_two_is_no_near_tie():
    stock = outcome(answer(1), answer(1, 2, 3, gap=0.1))
    (problem,) = e2e.compare(stock, outcome(answer(1), answer(1, 8, 3)), "bf16")["problems"]
    assert problem == "answer 1 parts at token 1, with 8, and the best two are [2, 9]"
    (problem,) = e2e.compare_tokens(stock, [[1], [1, 8, 3]], "bf16", "again")["problems"]
    assert problem == "again, answer 1 parts at token 1, with 8, and the best two are [2, 9]"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_log_probability_that_is_no_number_is_a_problem(value, place):
    """Of either, wherever it is: behind a parting too."""
    for parts in (answer(1, 2, 3), answer(1, 9, 8)):
        spoilt = outcome([*parts[:2], [*parts[2][:place], value, *parts[2][place + 1 :]]])
        whole = outcome(answer(1, 2, 3, gap=0.1))
        for stock, ours, whose in ((whole, spoilt, "our"), (spoilt, whole, "upstream's")):
            problems = e2e.compare(stock, ours, "bf16")["problems"]
            assert f"answer 0, token 2: {whose} log-probabilities are {spoilt['logprobs'][0][2][1:4]}" in problems


def test_the_worst_is_not_hidden_by_what_is_no_number():
    stock, ours = outcome(answer(1, 2), answer(3)), outcome(answer(1, 2, shift=0.01), answer(3, shift=NAN))
    found = e2e.compare(stock, ours, "bf16")
    assert "log-probabilities differ by up to nan" in found["problems"] and found["max_logprob_difference"] != 0.01
    stock = outcome(answer(1, gap=0.1), answer(2, gap=NAN))
    found = e2e.compare_tokens(stock, [[9], [9]], "bf16", "again")
    assert found["worst_gap"] != 0.1 and len(found["problems"]) == 1
    assert [e2e.worst(values) for values in ([], [0.1, 0.3], [0.1, INF])] == [0.0, 0.3, INF]


def test_what_comes_after_a_parting_is_not_compared():
    found = e2e.compare(outcome(answer(1, 2, 3, gap=0.1)), outcome(answer(1) + answer(9, 8, shift=5.0)), "bf16")
    assert found["problems"] == [] and found["max_logprob_difference"] == 0.0


@pytest.mark.parametrize(("shift", "kv", "holds"), [(0.14, "bf16", True), (0.16, "bf16", False), (0.4, "fp8", True)])
def test_log_probabilities_may_drift_a_little(shift, kv, holds):
    found = e2e.compare(outcome(answer(1, 2)), outcome(answer(1, 2, shift=shift)), kv)
    assert (found["problems"] == []) == holds and found["max_logprob_difference"] == pytest.approx(shift)


def test_a_shorter_answer_is_a_problem():
    assert "1 tokens, 2 expected" in e2e.compare(outcome(answer(1, 2)), outcome(answer(1)), "bf16")["problems"][0]


@pytest.mark.parametrize(("gap", "holds"), [(0.2, True), (0.21, False), (NAN, False), (-INF, False)])
def test_answers_without_log_probabilities_part_at_a_near_tie_only(gap, holds):
    stock = outcome(answer(1, 2, 3, gap=gap), answer(4, 5))
    found = e2e.compare_tokens(stock, [[1, 9, 8], [4, 5]], "bf16", "again")
    assert (found["problems"] == []) == holds and found["parted"] == 1
    assert e2e.compare_tokens(stock, [[1, 2, 3]], "bf16", "alone")["parted"] == 0
    assert "2 tokens, 3 expected" in e2e.compare_tokens(stock, [[1, 2]], "bf16", "alone")["problems"][0]


@pytest.mark.parametrize("run", [e2e.Run("plain"), e2e.Run("plain", backend="kdtree_sm120", mode="on")])
@pytest.mark.parametrize("field", ["again", "alone"])
def test_the_answers_to_a_cached_batch_and_to_one_request_are_judged(run, field):
    wrong = {"again": [[1, 2, 9]], "alone": [1, 9, 3]}[field]
    row = rows_of("", run, result=outcome(answer(1, 2, 3), **{field: wrong}))
    assert [problem.split(",")[0] for problem in row["problems"]] == [field]


def test_trained_drafts_have_as_many_tokens_accepted_as_with_upstream():
    run = e2e.Run("STANDALONE", backend="kdtree_sm120", mode="on")
    (problem,) = rows_of("", run, result=outcome(answer(1, 2, 3), accept_length=[0.89]))["problems"]
    assert problem == "0.89 tokens accepted a step, 1.00 with STANDALONE bf16 page1 graphs triton"
    untrained = dataclasses.replace(run, algorithm="EAGLE3")
    assert rows_of("", untrained, result=outcome(answer(1, 2, 3), accept_length=[0.89]))["problems"] == []


def test_a_mixed_run_in_which_nothing_was_mixed_is_a_problem():
    run = e2e.Run("plain", backend="kdtree_sm120", mode="on", kind="mixed")
    prefill = "Prefill batch, #new-seq: 1, #running-req: {}, #queue-req: 0"
    assert [e2e.mixed_steps(f"{prefill.format(3)}\n{e2e.AGAIN}\n{prefill.format(n)}") for n in (0, 3)] == [0, 1]
    assert rows_of("", run, mixed_steps=2)["problems"] == []
    assert rows_of("", run, mixed_steps=0)["problems"] == ["no chunk of a prefill was mixed with decoding requests"]


FACTS = "max abs error 1.0e-03, relative error mean 1.0e-04 max 2.0e-03"
LOG = f"""
kdtree_sm120 validate: 64 rows compared, 0 over the limit, {FACTS}, 0 mismatches, worst layer 1, 4 steps
kdtree_sm120 validate, draft extend: 32 rows compared, 1 over the limit, {FACTS}, {{}} mismatches, worst layer 0
kdtree_sm120 validate: 128 rows compared, 0 over the limit, {FACTS}, 0 mismatches, worst layer 1, 8 steps
"""


def rows_of(log, run, **fields):
    common = {
        "reports": [{"rank": 0, **report} for report in e2e.validate_reports(log)],
        "mismatches": e2e.MISMATCH.findall(log),
        "fallbacks": e2e.fallbacks(log),
    }
    done = {run.stock: ended(run.stock, **common), run: ended(run, **common) | fields}
    return e2e.judge(done, run)


EAGLE = e2e.Run("EAGLE", backend="kdtree_sm120", mode="validate")


def test_the_last_report_of_each_part_counts():
    row = rows_of(LOG.format(0), EAGLE)
    assert row["problems"] == []
    assert [(r["part"], r["rows"]) for r in row["reports"]] == [("target", 128), ("draft extend", 32)]


def test_a_mismatch_of_any_part_is_a_problem():
    assert rows_of(LOG.format(3), EAGLE)["problems"] == ["3 mismatches of the draft extend"]
    line = "kdtree_sm120 validate, draft extend: mismatch, layer 0, s_q 16; no reproducer\n"
    assert rows_of(LOG.format(0) + line, EAGLE)["problems"] == ["mismatch, layer 0, s_q 16; no reproducer"]


def test_a_validation_that_compared_nothing_is_a_problem():
    only_target = LOG.splitlines()[1]
    assert rows_of(only_target, EAGLE)["problems"] == ["validate mode compared nothing of the draft extend"]


FELL_BACK = """
[2026-01-02 03:04:05] kdtree_sm120: to the stock backend: more than 8 requests
[2026-01-02 03:04:05] kdtree_sm120 draft extend: to the stock backend: tokens before the window
"""


@pytest.mark.parametrize("algorithm", ["plain", "DDTREE"])
@pytest.mark.parametrize(("mode", "served"), [("on", True), ("validate", True), ("off", False)])
def test_calls_of_the_target_that_went_to_the_stock_backend_are_a_problem(algorithm, mode, served):
    run = e2e.Run(algorithm, backend="kdtree_sm120", mode=mode)
    row = rows_of(LOG.format(0) + FELL_BACK, run)
    assert row["fallbacks"] == [
        {"part": "draft extend", "reason": "tokens before the window"},
        {"part": "target", "reason": "more than 8 requests"},
    ]
    expected = ["calls of the target went to the stock backend: more than 8 requests"] if served else []
    assert row["problems"] == expected
    assert rows_of(LOG.format(0), run)["fallbacks"] == []


def test_what_is_looked_for_is_what_the_backend_logs(caplog):
    from sglang.srt.layers.attention.kdtree_report import KDTreeMetrics
    from sglang.srt.layers.attention.kdtree_serving import CountsFallbacks

    for part in ("", "draft block"):
        counts = CountsFallbacks()
        counts.part = part
        counts.init_fallbacks(KDTreeMetrics(None, part=part))
        for _ in range(2):
            counts.count_fallback("sliding window (layer 3)", "sliding window")
    reason = "sliding window (layer 3)"
    expected = [{"part": "draft block", "reason": reason}, {"part": "target", "reason": reason}]
    assert e2e.fallbacks("\n".join(caplog.messages)) == expected


def test_answers_shrink_the_batch_by_one_request_at_a_time():
    texts, parameters = e2e.prompts()
    lengths = [p["max_new_tokens"] for p in parameters]
    assert len(texts) == len(set(texts)) == len(lengths) == e2e.RUNNING
    steps = [b - a for a, b in zip(lengths, lengths[1:], strict=False)]
    assert min(steps) > 0, "a request that came in later must not end with an earlier one"


def test_plain_decoding_has_to_run_batches_of_every_size():
    run = e2e.Run("plain", backend="kdtree_sm120", mode="on")
    step = "[2026-01-02 03:04:05{}] Decode batch, #running-req: {}, #token: 5, token usage: 0.01, #queue-req: 9\n"
    log = "".join(step.format(" TP0", n) for n in (16, 16, 3, 1)) + "Prefill batch, #new-seq: 1, #running-req: 7\n"
    assert e2e.decode_sizes(log) == [1, 3, 16]
    sizes = [n for n in range(1, 17) if n not in (9, 15)]
    for of in (run, run.stock, dataclasses.replace(run, kind="split")):
        row = rows_of("", of, decode_sizes=sizes)
        assert row["problems"] == ["no decode step had 9, 15 requests"] and row["decode_sizes"] == sizes
        assert rows_of("", of)["problems"] == []
    mixed = dataclasses.replace(run, kind="mixed")
    assert rows_of("", mixed, decode_sizes=sizes, mixed_steps=2)["problems"] == []
    assert rows_of("", dataclasses.replace(run, algorithm="DDTREE"), decode_sizes=[3])["problems"] == []
    assert e2e.arguments_of(run, "cuda", Path())["decode_log_interval"] == 1, "or the log leaves steps out"


def test_the_page_says_which_clauses_are_newer_than_which_run():
    page = " ".join((SCRIPT.parents[1] / "docs" / "performance.md").read_text().split())
    rule = " ".join(e2e.__doc__.split())
    for part in ("made before any run, but for", "rounded draft tokens", "2026-12-01 04:24", "every size"):
        assert part in page and part in rule, part


def test_a_run_that_failed_and_one_without_a_partner_are_problems():
    row = rows_of("", EAGLE, result=None, error="exit code 1: ValueError: no")
    assert row["problems"] == ["exit code 1: ValueError: no"]
    run = e2e.Run("DDTREE", backend="kdtree_sm120", mode="on")
    assert e2e.judge({run: ended(run)}, run)["problems"] == [
        "DDTREE bf16 page1 graphs triton, to compare with, did not run"
    ]


def test_a_call_that_is_cut_short_leaves_the_rows_of_what_had_ended(monkeypatch, tmp_path):
    out = tmp_path / "r.json"

    def execute(run, args, folder):
        """Upstream's run ends; ours fails in this script itself, once the file is there."""
        for _ in range(200):
            if run.backend == "triton" or out.exists():
                break
            time.sleep(0.05)
        if run.mode == "on":
            raise RuntimeError("stopped")
        return ended(run)

    monkeypatch.setattr(e2e, "execute", execute)
    patterns = ["--only", "DDTREE bf16 page64 graphs kdtree_sm120 on"]
    with pytest.raises(RuntimeError, match="stopped"):
        e2e.main(["--device", "cpu", "--parallel", "1", "--commit", "none", "--out", str(out), *patterns])
    written = json.loads(out.read_text())
    assert written["header"]["format"] == e2e.FORMAT
    assert [row["name"] for row in written["rows"]] == ["DDTREE bf16 page64 graphs triton"]
    assert written["not_run"] == [
        {
            "name": "DDTREE bf16 page64 graphs kdtree_sm120 on",
            "reason": "it had not ended when this file was written",
        }
    ]


def test_what_waits_for_its_partner_is_no_row_yet():
    ours = e2e.Run("plain", backend="kdtree_sm120", mode="on")
    runs = [ours.stock, ours]
    rows, unfinished = e2e.judge_all({ours: ended(ours)}, runs)
    assert rows == [] and [u["reason"] for u in unfinished] == [
        "it had not ended when this file was written",
        "plain bf16 page1 graphs triton had not ended when this file was written",
    ]
    rows, unfinished = e2e.judge_all({run: ended(run) for run in runs}, runs)
    assert [row["problems"] for row in rows] == [[], []] and unfinished == []


def test_upstreams_runs_come_first(capsys):
    assert e2e.main(["--list"]) == 0
    backends = [line.split()[4] for line in capsys.readouterr().out.splitlines()]
    assert backends == sorted(backends, key=("triton", "kdtree_sm120").index) and len(set(backends)) == 2


def test_every_run_of_ours_has_its_upstream_run():
    runs = e2e.all_runs()
    assert len(runs) == len(set(runs)) and {run.stock for run in runs} <= set(runs)
    assert {run.algorithm for run in runs} == {"plain", "NGRAM", *e2e.TRAINED, *e2e.EAGLE_TYPE}
    for algorithm in ("plain", "DFLASH", "DDTREE", "EAGLE"):
        modes = {(r.mode, r.graphs) for r in runs if r.algorithm == algorithm and r.mode}
        assert modes >= {("on", True), ("on", False), ("validate", True), ("validate", False), ("off", True)}
    assert {r.mode for r in runs if r.algorithm == "NGRAM"} == {"", "on", "validate"}
    assert {(r.kv, r.page) for r in runs} == {("bf16", 1), ("bf16", 64), ("fp8", 1)}


@pytest.mark.parametrize("run", e2e.all_runs(), ids=lambda run: run.name)
def test_runs_differ_in_what_their_name_says(run, tmp_path):
    arguments = e2e.arguments_of(run, "cuda", tmp_path)
    backends = {name: value for name, value in arguments.items() if name.endswith("attention_backend")}
    split = {"prefill_attention_backend": "triton", "decode_attention_backend": run.backend}
    assert backends == (split if run.kind == "split" else {"attention_backend": run.backend})
    assert arguments["page_size"] == run.page and ("enable_mixed_chunk" in arguments) == (run.kind == "mixed")
    algorithm, _, is_chain = run.algorithm.partition("-")
    assert arguments.get("speculative_algorithm") == (None if algorithm == "plain" else algorithm)
    if is_chain:
        assert arguments["speculative_eagle_topk"] == 1
    assert arguments.get("kdtree_verify", "") == run.mode
    assert arguments.get("disable_cuda_graph", False) == (not run.graphs)
    assert ("kv_cache_dtype" in arguments) == (run.kv == "fp8")


def test_prefill_is_captured_in_a_few_runs_of_each_backend():
    captures = [run.name for run in e2e.all_runs() if run.captures_prefill]
    assert captures == [
        "plain bf16 page1 graphs triton", "plain bf16 page1 graphs kdtree_sm120 on",
        "plain bf16 page1 graphs kdtree_sm120 validate", "DDTREE bf16 page1 graphs triton",
        "DDTREE bf16 page1 graphs kdtree_sm120 on", "DDTREE bf16 page1 graphs kdtree_sm120 validate",
    ]  # fmt: skip


def test_a_plugin_joins_the_norms_of_a_hidden_size_that_upstreams_refuses(tmp_path):
    """In a process of its own, as an Engine loads it: a hook that runs before the scheduler's __init__."""
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import backend_e2e, pathlib, torch
backend_e2e.use_plugin(pathlib.Path({str(SCRIPT.parent)!r}) / "eagle_norm.py", pathlib.Path({str(tmp_path / "p")!r}))
from sglang.srt.plugins import load_plugins
from sglang.srt.managers.scheduler import Scheduler
load_plugins()
try:
    Scheduler()
except TypeError:
    pass
from sglang.srt.models import deepseek_nextn
x, y, a, b = torch.randn(4, 3, 256).unbind()
out = deepseek_nextn.fused_eh_norm(x, y, a[0], b[0], 1e-6)
parts = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w for v, w in ((x, a[0]), (y, b[0]))]
torch.testing.assert_close(out, torch.cat(parts, -1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.server
@pytest.mark.long
def test_the_comparison_runs_end_to_end_on_a_cpu(tmp_path):
    out = tmp_path / "r.json"
    typed = documented("benchmark/README.md", "python benchmark/backend_e2e.py")
    command = [sys.executable, str(SCRIPT), *typed[2:], "--only", "DDTREE bf16 page1 graphs kdtree_sm120 validate"]
    command += ["--parallel", "1", "--out", str(out), "--logs", str(tmp_path), "--commit", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {row["mode"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["validate"]["parted"] == [] and rows["validate"]["max_logprob_difference"] < 1e-3
    assert rows["validate"]["fallbacks"] == [] and rows["validate"]["decode_sizes"][0] == 1
    (report,) = rows["validate"]["reports"]
    assert report["rows"] > 0 and report["mismatches"] == 0
