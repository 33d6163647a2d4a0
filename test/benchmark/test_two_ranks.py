# SPDX-License-Identifier: Apache-2.0
"""Two ranks: what the comparisons let pass, how jobs share the GPUs and end in time, what files and tables say, and the
whole of it over gloo."""

import argparse
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import backend_churn as churn
import backend_e2e as e2e
import psutil
import pytest
import report
import torch
from benchmark.test_one_rank import make_row, trace
from docs.documents import documented
from kit.scripted import ScriptedServer, sglang_stream
from one_rank import shapes
from one_rank.arm import PROFILED_STEPS
from two_ranks import __main__ as main
from two_ranks import churning, equal, jobs, moe, results, steps, table

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"


# The same answers.


def answers(tokens=(1, 2, 3), sampled=None):
    """Of an Engine: every answer the same; sampled: places of all samples, tokens in turn."""
    logprobs = [[[token, -1.0, -1.0, -3.0] for token in tokens]]
    drawn = [[0, *(i % 5 for _ in range(3))] for i in range(400)] if sampled is None else sampled
    return {
        "logprobs": logprobs,
        "start_s": 1.0,
        "accept_length": [2.0],
        "again": [tokens],
        "alone": tokens,
        "sampled": drawn,
    }


def reports(ranks=(0, 1), rows=64, mismatches=0):
    return [{"rank": rank, "part": "target", "rows": rows, "mismatches": mismatches} for rank in ranks]


def outcome(of, **changes):
    found = {
        "run": of, "result": answers(), "error": None, "mismatches": [], "started": list(range(of.ranks)),
        "reports": reports() if of.mode == "validate" else [], "fallbacks": [], "decode_sizes": [1],
    }  # fmt: skip
    return {of.name: found | changes}


def equal_rows(one=None, two=None, validate=None):
    changes = zip(equal.RUNS, (one, two, validate), strict=True)
    outcomes = {name: found for of, change in changes for name, found in outcome(of, **(change or {})).items()}
    return [row["problems"] for row in equal.rows(outcomes, "cuda")]


def test_two_ranks_that_are_as_one():
    assert equal_rows() == [[], [], []]


def test_another_token_that_was_no_near_tie_is_a_problem():
    assert equal_rows(two={"result": answers((1, 9, 9))})[1] == [
        "again, answer 0 parts at token 1, where the best two are 2.000 nats apart",
        "alone, answer 0 parts at token 1, where the best two are 2.000 nats apart",
        "answer 0 parts at token 1, where the best two are 2.000 nats apart",
    ]


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_token_of_another_distribution_is_a_problem(place):
    drawn = [[0, *(i % 5 if at != place else i % 4 for at in (1, 2, 3))] for i in range(400)]
    (problem,) = equal_rows(two={"result": answers(sampled=drawn)})[1]
    assert problem.startswith(f"sampling: the distributions of token {place} differ")


def test_samples_of_one_token_show_nothing():
    same = answers(sampled=[[0, 1, 2, 3]] * 400)
    assert len(equal_rows(one={"result": same}, two={"result": same})[1]) == 3


def test_seeded_answers_are_the_same_where_seeds_are_kept():
    one, two = answers() | {"seeded": [[1], [2]]}, answers() | {"seeded": [[1], [3]]}
    assert equal_rows(one={"result": one}, two={"result": two})[1] == ["sampling: 1 of 2 seeded answers differ"]


def test_every_rank_has_to_start_and_to_compare():
    assert equal_rows(two={"started": [0]})[1] == ["verify on is in the start-up lines of ranks [0]"]
    assert equal_rows(validate={"reports": reports([0])})[2] == [
        "validate mode compared nothing of the target on rank 1"
    ]
    assert "2 mismatches of the target on rank 1" in equal_rows(validate={"reports": reports(mismatches=2)})[2]


def test_a_run_that_failed_is_a_row_and_so_are_those_that_need_it():
    outcomes = outcome(equal.TWO) | outcome(equal.VALIDATE) | {equal.ONE.name: jobs.failed("RuntimeError: no")}
    rows = equal.rows(outcomes, "cuda")
    assert rows[0]["problems"] == ["RuntimeError: no"]
    assert rows[1]["problems"] == rows[2]["problems"] == [f"{equal.ONE.name}, to compare with, did not run"]


def test_the_runs_differ_in_ranks_and_mode_alone(tmp_path):
    one, two, validate = (
        e2e.arguments_of(of, "cuda", tmp_path) for of in equal.RUNS
    )  # the jobs start all of them soon
    assert one["random_seed"] != two["random_seed"] and two["tp_size"] == 2
    assert two | {"kdtree_verify": "validate"} == validate
    assert {key for key in two if two[key] != one.get(key)} == {
        "tp_size", "random_seed", "disable_custom_all_reduce", "enforce_disable_flashinfer_allreduce_fusion",
        *e2e.START_SOON,
    }  # fmt: skip


LOG = """\
[2026-01-02 03:04:05 TP0] kdtree_sm120 over Triton, tp rank 0: verify validate, sgl_kernel_sm120 0.1.0 on sm_90, x
[2026-01-02 03:04:05 TP1] kdtree_sm120 over Triton, tp rank 1: verify validate, sgl_kernel_sm120 0.1.0 on sm_90, x
[2026-01-02 03:04:05 TP1] kdtree_sm120 draft extend over Triton, tp rank 1: verify validate, x
[2026-01-02 03:04:06 TP1] kdtree_sm120 validate: 64 rows compared, 0 over the limit, max abs error 1.0e-03, \
relative error mean 1.0e-04 max 2.0e-03, 3 mismatches, worst layer 1, 4 steps
"""


def test_lines_of_a_log_belong_to_their_ranks():
    assert e2e.started_ranks(LOG, "validate") == [0, 1] and e2e.started_ranks(LOG, "on") == []
    assert e2e.validate_reports(e2e.log_of_rank(LOG, 0, 2)) == []
    (found,) = e2e.validate_reports(e2e.log_of_rank(LOG, 1, 2))
    assert found["mismatches"] == 3
    assert e2e.log_of_rank(LOG, 0, 1) == LOG


# Churn.


def churn_arguments(*more):
    return churn.parser().parse_args(["--out", "x", "--ranks", "2", "--check-slots", "--kv-defrag", "tier1", *more])


CHURN_LINES = [
    "kdtree_sm120 over Triton, tp rank {rank}: verify on, sgl_kernel_sm120", "KV defragmentation: tier1 active, x",
    "KV slots are counted after every step and compared between the ranks.",
    "The KV of running requests is compared after every step.", "Decode batch, #running-req: 3", "Decode batch, x",
    "KV cache pool is full. Retract requests. #retracted_reqs: 1",
]  # fmt: skip


def churn_log(without=None):
    """Both ranks say all lines; rank 1 not the one ``without``."""
    return "".join(
        f"[2026-01-02 03:04:05 TP{rank}] {line.format(rank=rank)}\n"
        for rank in (0, 1) for line in CHURN_LINES if (rank, line) != (1, without)
    )  # fmt: skip


def test_a_log_of_two_ranks_says_all_on_both():
    assert churn.rank_problems(churn_log(), churn_arguments()) == []
    for line in CHURN_LINES[:4]:
        (problem,) = churn.rank_problems(churn_log(line), churn_arguments())
        assert "said by ranks [0], not by [0, 1]" in problem
    assert churn.rank_problems(churn_log() + "KV relocation failed: x", churn_arguments()) == [
        "log: KV relocation failed"
    ]


def said_by_both(text):
    return "".join(f"[2026-01-02 03:04:06 TP{rank}] {text}\n" for rank in (0, 1))


def test_churn_sees_mismatches_and_calls_that_went_to_the_stock_backend():
    facts = "max abs error 1.0e-03, relative error mean 1.0e-04 max 2.0e-03"
    counted = said_by_both(f"kdtree_sm120 validate: 64 rows compared, 0 over the limit, {facts}, 0 mismatches, 4 steps")
    mismatch = said_by_both("kdtree_sm120 validate: mismatch, layer 0, s_q 16; no reproducer")
    fell = "kdtree_sm120{}: to the stock backend: more than 8 requests"
    on, validate, off = (churn_arguments("--mode", mode) for mode in ("on", "validate", "off"))
    assert churn.log_problems(churn_log(), on) == churn.log_problems(churn_log() + counted, validate) == []
    assert len(churn.log_problems(counted + mismatch, validate)) == 2
    assert churn.log_problems(counted.replace("0 mismatches", "3 mismatches"), validate) == [
        f"3 mismatches of the target on rank {rank}" for rank in (0, 1)
    ]
    assert churn.log_problems("", validate) == [
        f"validate mode compared nothing of the target on rank {rank}" for rank in (0, 1)
    ]
    assert churn.log_problems(said_by_both(fell.format("")), on) == [
        "calls of the target went to the stock backend: more than 8 requests"
    ]
    assert churn.log_problems(said_by_both(fell.format(" draft block")), on) == []
    assert churn.log_problems(said_by_both(fell.format("")), off) == []
    assert churn.log_problems("CUDA error: x", on) == ["log: CUDA error: x"]


def test_steps_and_retractions_are_those_of_one_rank():
    log = churn_log() + "[2026-01-02 03:04:05] Decode batch, of the one rank of another server\n"
    assert churn.steps_of(log) == 3 * churn.LOG_INTERVAL
    assert len(churn.said_by_first(log, "KV cache pool is full")) == 1


def test_the_server_of_two_ranks_counts_its_slots_and_shares_its_gpus():
    arguments = churn.server_arguments(churn_arguments())
    values = dict(zip(arguments, arguments[1:], strict=False))
    assert values["--tp-size"] == "2" and values["--kv-defrag"] == "tier1" and "--kv-defrag-copy-budget" in values
    assert {"--disable-custom-all-reduce", "--enable-metrics-for-all-schedulers"} <= set(arguments)
    plain = churn.server_arguments(churn.parser().parse_args(["--out", "x"]))
    assert not {"--tp-size", "--enable-metrics", "--disable-custom-all-reduce"} & set(plain)
    assert "True" not in arguments + plain
    assert churn.gpu_mib(churn_arguments("--shared-gpus")) is None


def churned(**changes):
    found = {"requests": {"whole": 5, "abort": 2}, "steps": 2000, "retractions": 4, "problems": [], "moved_bytes": None}
    return churning.rows({"tier0": found | changes}, "cuda")[0]["problems"]


def test_churn_without_what_it_is_for_is_a_problem():
    assert churned() == []
    assert churned(retractions=0) == ["there was no retraction: it shows nothing about one"]
    assert churned(requests={"whole": 5}) == ["there was no abort: it shows nothing about one"]
    assert churned(problems=["the server ended"]) == ["the server ended"]


def test_clients_end_when_the_churn_does_and_when_all_of_them_fail(monkeypatch):
    begun = []
    monkeypatch.setattr(churn.Client, "request", lambda self, kind, rid: begun.append(rid) or time.sleep(0.01))
    counts, failures = churn.churn("http://none", 2, lambda: len(begun) > 20)
    assert sum(counts.values()) > 20 and failures == []

    def fail(self, kind, rid):
        raise RuntimeError("no")

    monkeypatch.setattr(churn.Client, "request", fail)
    counts, failures = churn.churn("http://none", 2, lambda: False)
    assert not counts and len(failures) >= 20


def test_a_failed_server_is_named_with_what_its_log_says_last(tmp_path):
    log = tmp_path / "log"
    log.write_text("x\nRuntimeError: NCCL error\nbye\n")
    with pytest.raises(RuntimeError, match="^RuntimeError: NCCL error; OSError: refused$"), jobs.explained(log):
        raise OSError("refused")


# Steps.


def test_the_arms_of_two_ranks_have_their_one():
    arms = [arm for arm, _, _ in steps.arms("cuda", custom=True)]
    assert {dataclasses.replace(arm, ranks=1, custom_all_reduce=False) for arm in arms if arm.ranks == 2} <= set(arms)
    assert any(arm.custom_all_reduce for arm in arms)
    assert not any(arm.custom_all_reduce for arm, _, _ in steps.arms("cpu", custom=True))


def test_a_failed_arm_is_a_problem_and_upstreams_all_reduce_is_not_available():
    lost = {"rows": [], "reason": "exit code 1: no"}
    outcomes = {
        "tree_kdtree-9": lost,
        "tree_kdtree-9-tp2-custom": lost,
        "plain_triton-1": {"rows": [make_row()], "reason": "no profile"},
    }
    first, custom, plain = steps.rows(outcomes, "cuda")
    assert first["problems"] == ["exit code 1: no"]
    assert custom["problems"] == [] and custom["not_available"] == ["exit code 1: no"]
    assert plain["problems"] == ["no profile"] and plain["ranks"] == 1


# Experts.

REDUCE, GATHER = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_AllGather_RING_LL"
# Embedding, then attention and experts of layers 0 (dense), 1 and 2, then the logits.
STEP = [
    (REDUCE, 1.0),
    (REDUCE, 2.0),
    (REDUCE, 3.0),
    (REDUCE, 4.0),
    (REDUCE, 50.0),
    (REDUCE, 6.0),
    (REDUCE, 70.0),
    (GATHER, 8.0),
]
SHAPE = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_routed_experts": 8}


def collectives(step):
    names, waits = zip(*step, strict=True)
    return {"order": list(names), "waiting_each_us": list(waits)}


@pytest.mark.parametrize("begin", range(8))
def test_waiting_is_told_by_layer_wherever_the_profile_begins(begin):
    found = moe.waiting_by_layer(collectives(STEP[begin:] + STEP[:begin]), SHAPE)
    assert found == {"attention_us": [2.0, 4.0, 6.0], "experts_us": [50.0, 70.0], "lost_us_per_step": 120.0}


def test_waiting_of_another_structure_is_not_told_by_layer():
    assert moe.waiting_by_layer({"order": None, "waiting_each_us": None}, SHAPE) is None
    assert moe.waiting_by_layer(collectives(STEP[:-1]), SHAPE) is None  # no gather: nothing says where a step ends
    assert moe.waiting_by_layer(collectives(STEP[1:]), SHAPE) is None


def test_a_recording_of_a_larger_batch_is_a_problem():
    found = {"model": "trained", "shape": SHAPE, "layers": [1, 2], "activated": [[1.0, 1.0], [1.5, 1.2]]}
    (row,) = moe.rows({"trained": found}, "cuda")
    assert len(row["problems"]) == 1 and row["problems"][0].startswith("layer 2: 2.7 experts of a token, not 2")


@pytest.fixture
def scripted():
    server = ScriptedServer()
    server.pages |= {
        "/v1/models": (200, {"data": [{"id": "tiny", "max_model_len": 4096}]}),
        "/model_info": (200, {"model_path": "x"}),
        "/server_info": (
            200,
            {"version": "0.5.23", "tp_size": 2, "dp_size": 1, "expert_distribution_recorder_mode": "per_pass"},
        ),
        "/tokenize": (200, lambda body: {"count": len(body["prompt"].split())}),
        "/generate": (200, sglang_stream([1, 2, 3], prompt_tokens=9)),
        **{f"/{verb}_expert_distribution_record": (200, "ok") for verb in ("start", "stop", "dump")},
    }  # fmt: skip
    yield server
    server.close()


def test_the_experts_of_each_rank_come_from_the_recording_of_the_verb(scripted, tmp_path):
    """Two steps of a token of two experts, the layer 0 dense; both ranks recorded both."""

    def dump(body):
        for rank in (0, 1):
            counts = torch.zeros(2, 3, 8, dtype=torch.int64)
            for step, layer, experts in ((0, 1, (0, 1)), (1, 1, (0, 7)), (0, 2, (4, 5)), (1, 2, (6, 7))):
                counts[step, layer, list(experts)] = 1
            records = [
                {"forward_pass_id": step, "rank": rank, "global_physical_count": counts[step]} for step in (0, 1)
            ]
            mapping = torch.arange(8).repeat(3, 1)
            torch.save({"records": records, "last_physical_to_logical_map": mapping}, tmp_path / f"r_{rank}.pt")
        return "ok"

    scripted.pages["/dump_expert_distribution_record"] = (200, dump)
    found = moe.probe(scripted.url, tmp_path, moe.model_folder("trained", tmp_path), redundant="")
    assert found["layers"] == [1, 2]
    assert found["activated"] == [[1.5, 0.5], [0.0, 2.0]] and found["slowest"] == [1.5, 2.0]
    assert found["probe"]["ranks"] == 2 and found["probe"]["scenarios"][0]["lost_us_per_step"] > 0
    (row,) = moe.rows({"trained": {"model": "trained", "shape": SHAPE, **found}}, "cuda")
    assert row["problems"] == []


def test_a_probe_that_fails_is_an_error_with_its_words(scripted, tmp_path):
    with pytest.raises(RuntimeError, match="probe moe: exit code 2.*no new .pt file"):
        moe.probe(scripted.url, tmp_path, moe.model_folder("trained", tmp_path), redundant="")


def test_a_profile_of_a_server_tells_its_waiting(scripted):
    asked = {}

    def generate(body):
        for rank, late in ((0, 0.0), (1, 100.0)):
            kernels = [(name, 10.0 + (late if i == 6 else 0.0)) for i, (name, _) in enumerate(STEP)] * PROFILED_STEPS
            trace(Path(asked["output_dir"]) / f"1-TP-{rank}-EP-{rank}-DECODE.trace.json.gz", kernels)
        return {}

    scripted.pages["/start_profile"] = (200, lambda body: asked.update(body) or "ok")
    scripted.pages["/generate"] = (200, generate)
    found = moe.profile(scripted.url, SHAPE)
    assert found["waiting"] == {"attention_us": [0, 0, 0], "experts_us": [0, 100.0], "lost_us_per_step": 100.0}
    assert found["collectives"]["waiting_us"] == [0, 100.0] and found["kernels_us"]["collectives"] == 80.0
    assert asked["profile_by_stage"] and asked["activities"] == ["GPU"]
    scripted.pages["/generate"] = (200, {})
    with pytest.raises(ValueError, match=r"ranks \[\]"):
        moe.profile(scripted.url, SHAPE)


def test_the_wide_model_is_one_that_two_ranks_can_share(tmp_path):
    config = json.loads((moe.model_folder("wide", tmp_path) / "config.json").read_text())
    assert config["n_routed_experts"] % 2 == 0 and config["num_attention_heads"] == 16
    assert (tmp_path / "wide" / "tokenizer.json").exists() and config["vocab_size"] == 2048
    arguments = moe.server_arguments("wide", tmp_path / "wide")
    assert arguments[arguments.index("--ep-size") + 1] == arguments[arguments.index("--tp-size") + 1] == "2"
    assert "dummy" in arguments and "dummy" not in moe.server_arguments(
        "trained", moe.model_folder("trained", tmp_path)
    )
    assert moe.bandwidth() > 1000


# The schedule.


def options(tmp_path, *more):
    return main.parser().parse_args(["--out", str(tmp_path), "--commit", "none", "--device", "cpu", *more])


@pytest.fixture
def play(tmp_path, monkeypatch):
    """play(jobs, *options): the program with these jobs, one part whose rows are the outcomes."""

    def run(works, *more):
        part = argparse.Namespace(
            jobs=lambda run: [
                jobs.Job("equal", name, lambda work=work: work(run), stage) for name, work, stage in works
            ],
            rows=lambda outcomes, device: [
                {"name": name, "ranks": 2, "mode": "", "problems": [o["error"]] if "error" in o else [], **o}
                for name, o in outcomes.items()
            ],
        )  # fmt: skip
        monkeypatch.setattr(main, "PARTS", {"equal": part})
        code = main.main(["--out", str(tmp_path), "--commit", "none", "--device", "cpu", "--parts", "equal", *more])
        return code, results.load(tmp_path / "equal.json")

    return run


def in_turn(run, stage=jobs.TIMED):
    with open(run.turn(stage)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return {"at": time.monotonic()}


def test_timed_jobs_begin_when_the_others_have_ended(play):
    def loud(run):
        time.sleep(1.5)
        return {"at": time.monotonic()}

    def slow(run):
        in_turn(run)
        time.sleep(1.5)
        return {"at": time.monotonic()}

    last = ("last", lambda run: in_turn(run, jobs.LAST), jobs.LAST)
    code, data = play([last, ("timed", slow, jobs.TIMED), ("loud", loud, jobs.LOUD)])
    at = {row["name"]: row["at"] for row in data["rows"]}
    assert code == 0 and at["last"] > at["timed"] > at["loud"] + 1


def test_timed_jobs_begin_at_a_time_even_so_and_that_is_said(play, capsys):
    code, data = play(
        [("timed", in_turn, jobs.TIMED), ("loud", lambda run: time.sleep(4) or {}, jobs.LOUD)],
        "--quiet",
        "1",
        "--budget",
        "60",
    )
    assert [row["name"] for row in data["rows"]] == ["timed", "loud"] and code == 0
    assert "timed jobs begin beside loud" in capsys.readouterr().out


def test_a_job_that_fails_is_a_row_and_fails_the_run(play):
    def fail(run):
        raise RuntimeError("no GPU")

    code, data = play([("a", fail, jobs.LOUD), ("b", lambda run: {}, jobs.LOUD)])
    assert code == 1
    assert {row["name"]: row["problems"] for row in data["rows"]} == {"a": ["RuntimeError: no GPU"], "b": []}


def test_what_does_not_end_in_time_is_named_and_its_processes_are_ended(play):
    started = []

    def hang(run):
        started.append(subprocess.Popen(["sleep", "600"]))
        started[0].wait()
        return {}

    code, data = play([("hangs", hang, jobs.TIMED), ("ends", lambda run: {}, jobs.LOUD)], "--budget", "3")
    assert code == 1 and not psutil.pid_exists(started[0].pid)
    assert [row["name"] for row in data["rows"]] == ["ends"]
    assert [missing["name"] for missing in data["not_available"]] == ["hangs"]


def test_multicast_stays_off(monkeypatch):
    for name in main.NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    main.forbid_multicast()
    assert {name: os.environ[name] for name in main.NO_MULTICAST} == main.NO_MULTICAST
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(SystemExit, match="NVLink multicast has to stay off"):
        main.forbid_multicast()


# Files and tables.


def result_file(part, rows, device="cuda"):
    header = {
        "format": results.FORMAT, "part": part, "date": "2026-01-02T03:04:05Z", "commit": "0123456789abcdef",
        "device": device, "gpus": [{"name": "Test GPU", "driver_version": "1.2", "peer_access": [1]}] * 2,
        "versions": {"torch": "2.11", "nccl": "2.29"}, "options": [], "seconds": 300.0,
    }  # fmt: skip
    return {"header": header, "rows": rows, "not_available": []}


TWO = {"ranks": 2, "custom_all_reduce": False}
FOUND = {"count": 124.0, "work_us": 1500.0, "waiting_us": [10.0, 250.0]}
STEP_ROWS = [
    make_row(ms=8.0), make_row(ms=10.0, collectives=FOUND, **TWO), make_row(ms=9.0, ranks=2, custom_all_reduce=True),
    make_row("plain_triton", ms=7.0, **TWO),
]  # fmt: skip


def test_the_table_of_steps_has_a_line_for_what_both_numbers_of_ranks_have():
    rows = steps.rows({f"{i}": {"rows": [row], "reason": None} for i, row in enumerate(STEP_ROWS)}, "cuda")
    data = result_file("steps", rows)
    assert results.problems(data) == []
    assert table.steps(data)[1] == [
        ["DDTREE, kdtree_sm120", "4,096", "NCCL", "8.00", "10.00", "+2.00", "124", "1.50", "0.01", "0.25"],
        ["DDTREE, kdtree_sm120", "4,096", "upstream's", "8.00", "9.00", "+1.00", "-", "-", "-", "-"],
    ]
    data["rows"].append(rows[0])
    assert any("occurs twice" in problem for problem in results.problems(data))


def tables():
    outcomes = outcome(equal.ONE) | outcome(equal.TWO) | outcome(equal.VALIDATE)
    churned = {"requests": {"whole": 5, "abort": 2}, "steps": 2000, "retractions": 4, "problems": []}
    probed = {
        "model": "wide", "shape": SHAPE, "layers": [1, 2], "activated": [[1.2, 0.8], [1.0, 1.0]], "slowest": [1.4, 1.3],
        "waiting": moe.waiting_by_layer(collectives(STEP), SHAPE),
    }  # fmt: skip
    return {
        "equal": equal.rows(outcomes, "cuda"),
        "churn": churning.rows({"tier1": churned | {"moved_bytes": {0: 2e6, 1: 2e6}}}, "cuda"),
        "steps": steps.rows({"a": {"rows": STEP_ROWS, "reason": None}}, "cuda"),
        "moe": moe.rows({"wide": probed}, "cuda"),
    }


EXPECTED = {
    "equal": "| 2 | validate | 0 | 0.000 | 64 rows, 0 mismatches; 64 rows, 0 mismatches | - | none |",
    "churn": "| tier1 | 2,000 | 7 | 2 | 4 | 2.0, 2.0 | none |",
    "steps": "| DDTREE, kdtree_sm120 | 4,096 | NCCL | 8.00 | 10.00 | +2.00 | 124 | 1.50 | 0.01 | 0.25 |",
    "moe": "| wide, 2 of 8 | 1 | 1.20 | 0.80 | 1.40 | 50.0 |",
}


@pytest.mark.parametrize("part", EXPECTED)
def test_a_part_is_saved_and_becomes_a_table(part, tmp_path):
    data = result_file(part, tables()[part])
    results.save(tmp_path / "r.json", data)
    document = tmp_path / "x.md"
    document.write_text(f"<!-- results: two_ranks_{part} r.json -->\n<!-- /results -->\n")
    assert report.main([], root=tmp_path) == 0
    assert EXPECTED[part] in document.read_text()
    assert all(line.startswith("ok") for line in results.summary(data))


def test_a_table_of_another_part_or_of_a_cpu_is_refused(tmp_path):
    document = tmp_path / "x.md"
    document.write_text("<!-- results: two_ranks_moe r.json -->\n<!-- /results -->\n")
    for data in (result_file("churn", tables()["churn"]), result_file("moe", tables()["moe"], device="cpu")):
        results.save(tmp_path / "r.json", data)
        assert report.main([], root=tmp_path) == 2
    (tmp_path / "r.json").unlink()
    assert report.main([], root=tmp_path) == 0 and "Not measured yet." in document.read_text()


def test_a_file_that_is_none_is_refused():
    assert results.problems({"header": {"part": "speed"}, "rows": []}) == [
        "not a result file of two_ranks: part 'speed'"
    ]
    broken = result_file(
        "steps", steps.rows({"a": {"rows": [make_row(steps=30) | {"cached_tokens": 8}], "reason": None}}, "cuda")
    )
    assert any("tokens were there" in problem for problem in results.problems(broken))


# Over gloo.


@pytest.mark.server
@pytest.mark.long
def test_two_ranks_run_end_to_end_on_a_cpu(tmp_path):
    typed = documented("benchmark/README.md", "python -m two_ranks")
    command = [
        sys.executable, *typed[1:], "--parts", "equal", "churn", "steps", "--churn-seconds", "240", "--clients", "6",
        "--contexts", "64", "--steps", "6", "--start-timeout", "600", "--out", str(tmp_path), "--logs",
        str(tmp_path / "logs"), "--commit", "none",
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(BENCHMARK), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=BENCHMARK, env=environment, capture_output=True, text=True, timeout=1750)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    parts = {part: results.load(tmp_path / f"{part}.json")["rows"] for part in ("equal", "churn", "steps")}
    two = parts["equal"][1]
    assert two["parted"] == [] and two["max_logprob_difference"] < 1e-3
    assert [report["rank"] for report in parts["equal"][2]["reports"]] == [0, 1]
    assert [row["kv_defrag"] for row in parts["churn"]] == ["tier0", "tier1"]
    assert [row["ranks"] for row in parts["steps"]] == [1, 1, 2, 2]
    assert all(row["context"] == 64 and row["cached_tokens"] == 64 - 8 for row in parts["steps"])
    assert shapes.SMALL.times(2).model["num_attention_heads"] == 4
