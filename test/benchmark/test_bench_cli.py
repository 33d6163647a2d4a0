# SPDX-License-Identifier: Apache-2.0
"""The benchmark's program, run on the CPU with the package's CPU ops."""

import bench_mla_tree_verify as bench
import pytest
import torch
from verify_bench import results
from verify_bench.arms import ARMS, Arm, Prepared, Unavailable

CPU = ["--device", "cpu", "--layers", "2", "--budget-ms", "1"]


class Shifted(Arm):
    """Right but for one head of one node, as a kernel with a wrong mask would be."""

    name, note = "shifted", "test"

    def prepare(self, problem):
        from verify_bench import inputs

        out = problem.new_out()

        def run(layer):
            out.copy_(inputs.oracle(problem, layer))
            out[0, -1, 0] = out[0, 0, 0]

        return Prepared(run, out)


class Unwritten(Arm):
    name, note = "unwritten", "test"

    def prepare(self, problem):
        return Prepared(lambda layer: None, problem.new_out())


class Causal(Arm):
    """The tree taken for a chain: no error anywhere, only other numbers."""

    name, note = "causal", "test"

    def prepare(self, problem):
        import sgl_kernel_sm120 as kernels

        out = problem.new_out()

        def run(layer):
            kernels.mla_tree_verify(
                problem.q, problem.kv[layer], problem.kv_indptr, problem.kv_indices, sm_scale=problem.sm_scale, out=out
            )

        return Prepared(run, out)


class Absent(Arm):
    name, note = "absent", "test"

    def prepare(self, problem):
        raise Unavailable("no such library\nsecond line")


def run(tmp_path, *args):
    out = tmp_path / "r.json"
    code = bench.main([*CPU, "--commit", "test", "--out", str(out), *args])
    return code, results.load(out)


def test_ours_and_the_reference_are_checked_and_timed(tmp_path):
    code, data = run(
        tmp_path,
        "--arms",
        "ours",
        "torch_reference",
        "--shape",
        "prefix=40",
        "prefix=20+3,q=5,page=16",
        "prefix=30,kv=fp8,h=2",
    )
    assert code == 0
    assert [(r["arm"], r["bs"], r["page_size"], r["kv_dtype"]) for r in data["rows"]] == [
        ("ours", 1, 1, "bf16"),
        ("torch_reference", 1, 1, "bf16"),
        ("ours", 2, 16, "bf16"),
        ("torch_reference", 2, 16, "bf16"),
        ("ours", 1, 1, "fp8"),
        ("torch_reference", 1, 1, "fp8"),
    ]
    assert all(1e-5 < r["error"] < 3e-3 for r in data["rows"]), "bf16 rounding of the output shows, nothing else does"


def test_an_arm_that_cannot_run_is_listed_not_dropped(tmp_path, capsys):
    code, data = run(tmp_path, "--shape", "prefix=10", "prefix=20")
    timed, missing = {r["arm"] for r in data["rows"]}, {m["arm"]: m for m in data["not_available"]}
    assert code == 0 and timed | set(missing) == set(ARMS) and timed == {"ours", "torch_reference"}
    assert (
        missing["flashinfer_100k"]["reason"] == "needs a CUDA device" and len(missing["flashinfer_100k"]["shapes"]) == 2
    )
    assert "not available: flashinfer_100k: needs a CUDA device (2 shapes)" in capsys.readouterr().out


def test_a_required_arm_must_run(tmp_path):
    assert run(tmp_path, "--shape", "prefix=10", "--require", "ours")[0] == 0
    assert run(tmp_path, "--shape", "prefix=10", "--require", "ours", "ladder_32bit_s16")[0] == 1


@pytest.mark.parametrize("arm", [Shifted, Unwritten, Causal])
def test_a_wrong_arm_is_not_timed(tmp_path, monkeypatch, arm):
    monkeypatch.setitem(ARMS, arm.name, arm)
    code, data = run(tmp_path, "--arms", "ours", arm.name, "--shape", "prefix=10,q=9")
    assert code == 1 and [r["arm"] for r in data["rows"]] == ["ours"]
    (missing,) = data["not_available"]
    assert missing["arm"] == arm.name and missing["reason"].startswith("WRONG: relative error")


def test_reason_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(ARMS, "absent", Absent)
    assert (
        run(tmp_path, "--arms", "absent", "--shape", "prefix=10")[1]["not_available"][0]["reason"] == "no such library"
    )


class OutOfResources(Exception):
    """As Triton names it."""


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 0, "out of GPU memory"),
        (
            OutOfResources("out of resource: shared memory, Required: 120000\nmore"),
            0,
            "out of resource: shared memory, Required: 120000",
        ),
        (RuntimeError("CUDA error 700\nmore"), 1, "FAILED: RuntimeError: CUDA error 700"),
    ],
)
def test_an_error_is_a_reason_and_the_others_go_on(tmp_path, monkeypatch, error, code, reason):
    class Failing(Arm):
        name, note = "failing", "test"

        def prepare(self, problem):
            raise error

    monkeypatch.setitem(ARMS, "failing", Failing)
    got, data = run(tmp_path, "--arms", "failing", "ours", "--shape", "prefix=10")
    assert (got, data["not_available"][0]["reason"]) == (code, reason) and data["rows"][0]["arm"] == "ours"


def test_check_only_times_nothing(tmp_path, capsys):
    out = tmp_path / "r.json"
    assert bench.main([*CPU, "--check-only", "--arms", "ours", "--shape", "prefix=10", "--out", str(out)]) == 0
    assert not out.exists() and "right: ours at bs=1,q=9,h=8,prefix=10,kv=bf16,page=1" in capsys.readouterr().out


def test_list_runs_nothing(capsys):
    assert bench.main(["--list", "--shapes", "context"]) == 0
    text = capsys.readouterr().out
    assert all(arm in text for arm in ARMS) and "prefix=189440,kv=bf16,page=1: 218.2 MB of KV, 29.7 GFLOP" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--arms", "nope"], "invalid choice: 'nope'"),
        (["--shapes", "nope"], "invalid choice: 'nope'"),
        (["--shape", "prefix=x"], "invalid literal"),
        (["--shapes"], "no shape selected"),
        (["--shape", "prefix=1", "--layers", "0"], "must be positive"),
        (["--shape", "prefix=1", "--budget-ms", "0"], "must be positive"),
        (["--shape", "prefix=1", "--min-replays", "0"], "must be positive"),
        (["--require", "nope"], "invalid choice: 'nope'"),
    ],
)
def test_bad_arguments(capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--device", "cpu", *args])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_said(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--shapes", "smoke"])
    assert "no CUDA device; --device cpu" in capsys.readouterr().err


def test_commit_is_taken_from_the_caller(tmp_path):
    assert run(tmp_path, "--shape", "prefix=10", "--arms", "ours", "--commit", "abc")[1]["header"]["commit"] == "abc"


@pytest.mark.gpu
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_that_is_here_is_right_on_the_gpu(tmp_path, arm):
    out = tmp_path / "r.json"
    specs = ("prefix=700", "prefix=300+5+0,q=5,page=16", "prefix=100,q=17,h=16")
    assert bench.main(["--arms", arm, "--layers", "2", "--budget-ms", "5", "--out", str(out), "--shape", *specs]) == 0
    data = results.load(out)
    if not data["rows"]:
        pytest.skip(data["not_available"][0]["reason"])
    assert len(data["rows"]) == len(specs)
