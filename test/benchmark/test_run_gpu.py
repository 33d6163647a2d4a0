# SPDX-License-Identifier: Apache-2.0
"""The one command for a GPU host, with a stand-in for Python that records what it was asked to run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "run_gpu.sh"


@pytest.fixture
def run(tmp_path):
    log = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\necho "PYTHONPATH=$PYTHONPATH $*" >> {log}\n'
        'for w in $FAIL_ON; do [[ "$*" == *$w* ]] && exit 3; done\necho ran\n'
    )
    sanitizer = tmp_path / "bin" / "compute-sanitizer"
    sanitizer.parent.mkdir()
    sanitizer.write_text(
        '#!/bin/bash\n[ "$1" = --help ] && { echo "  --kernel-name arg"; exit; }\n'
        + f'echo "sanitizer $* caching=$PYTORCH_NO_CUDA_MEMORY_CACHING" >> {log}\n'
    )
    for f in (python, sanitizer):
        f.chmod(0o755)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "COMMIT").write_text("abc123\n")

    def call(*args, fail_on="", path=f"{sanitizer.parent}:{os.environ['PATH']}"):
        log.write_text("")
        environment = {**os.environ, "PYTHON": str(python), "FAIL_ON": fail_on, "PATH": path, "PYTHONPATH": ""}
        command = ["/bin/bash", str(SCRIPT), "--out", str(tmp_path / "out"), *args]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        return done, log.read_text().splitlines()

    call.bundle, call.out = bundle, tmp_path / "out"
    return call


def test_all_steps_in_order(run):
    done, calls = run("--bundle", str(run.bundle))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PYTHONPATH={run.bundle}/site" in calls[0] and "-m pytest" in calls[0] and "test/kernels -m gpu" in calls[0]
    assert (
        "bench_mla_tree_verify.py" in calls[1]
        and f"--native {run.bundle}/native" in calls[1]
        and "--commit abc123" in calls[1]
    )
    for call, script, result in (
        (calls[2], "kernels/bench_ddtree.py", "ddtree.json"),
        (calls[3], "bench_kv_layout.py", "kv_layout.json"),
    ):
        assert call.endswith(f"{SCRIPT.parent}/{script} --out {run.out}/{result} --commit abc123"), call
    assert [c.split()[2] for c in calls[4:8]] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert all("--kernel-name kns=sgl_kernel_sm120" in c and "-m pytest" in c for c in calls[4:8])
    assert all(c.endswith("caching=1") for c in calls[4:8])
    assert "plot_mla_tree_verify.py" in calls[8] and len(calls) == 9
    assert {p.name for p in run.out.iterdir()} >= {"test.log", "bench.log", "plot.log", "sanitize-racecheck.log"}


def test_the_engine_steps_on_an_unpacked_tree(run, tmp_path):
    site = f"{tmp_path}/a:{tmp_path}/b"
    done, calls = run("--site", site, "backend", "kit", "e2e", "acceptance", "churn", "one_rank")
    assert done.returncode == 0, done.stdout + done.stderr
    backend, kit, e2e, acceptance, churn, one_rank, plot = calls
    assert f"PYTHONPATH={SCRIPT.parent}:{site}" in acceptance
    assert acceptance.endswith(f"-m acceptance --engine --out {run.out}/acceptance.json --logs {run.out}/acceptance")
    assert f"PYTHONPATH={site}" in kit and f"{SCRIPT.parents[1]}/test/kit -m gpu" in kit
    assert f"backend_churn.py --out {run.out}/backend_churn.json" in churn
    assert all(f"PYTHONPATH={site}" in c for c in (backend, e2e, churn)) and all(site in c for c in (one_rank, plot))
    assert "test/srt" in backend and "-m gpu" in backend
    assert f"--out {run.out}/backend_e2e.json" in e2e and "backend_e2e.py" in e2e
    assert f"-m one_rank --profile --out {run.out}/one_rank.json" in one_rank
    assert f"PYTHONPATH={SCRIPT.parent}:{site}" in one_rank
    assert plot.endswith(f"-m one_rank.plot {run.out}/one_rank.json")


def test_two_ranks_run_by_their_name_alone(run, tmp_path):
    done, (call,) = run("--site", f"{tmp_path}/a", "two_ranks", "--", "--parts", "equal")
    assert done.returncode == 0, done.stdout + done.stderr
    assert call.startswith(f"PYTHONPATH={SCRIPT.parent}:{tmp_path}/a ")
    assert call.endswith(f"-m two_ranks --out {run.out} --logs {run.out}/two_ranks --parts equal")


def test_an_installed_environment_runs_everything(run):
    _, calls = run(path="/usr/bin:/bin")  # no sanitizer
    ran = " ".join(calls)
    assert "two_ranks" not in ran
    for part in ("test/kernels", "test/srt", "test/kit", "backend_e2e.py", "-m one_rank ", "bench_mla_tree_verify.py"):
        assert part in ran, part
    assert "bench_ddtree.py" in ran and "bench_kv_layout.py" in ran


def test_arguments_go_to_the_one_step_that_is_named(run):
    _, calls = run("one_rank", "--", "--arms", "tree_kdtree")
    assert calls[0].endswith("--arms tree_kdtree") and "tree_kdtree" not in calls[1]
    for step in ("ddtree", "kv_layout"):
        _, (call,) = run("--bundle", str(run.bundle), step, "--", "--budget-ms", "9")
        assert call.endswith("--commit abc123 --budget-ms 9")
    _, (call,) = run("acceptance", "--", "--arms", "auto")
    assert call.endswith("--arms auto")
    _, calls = run("--bundle", str(run.bundle), "test", "bench", "--", "--shapes", "smoke")
    assert "smoke" not in calls[0] and calls[1].endswith("--shapes smoke")


def test_sanitized_cases_exist():
    """Every name of the selection matches a case or a test: a renamed case must not leave the selection silently."""
    from kernels.cases import CASES

    text = SCRIPT.read_text()
    names = re.search(r"float64_reference and \((.*?)\)", text).group(1).split(" or ")
    assert len(names) >= 6
    for name in names:
        assert any(name in case.name for case in CASES), name
    tests = "".join(p.read_text() for p in (SCRIPT.parents[1] / "test" / "kernels").glob("test_*.py"))
    assert "def test_kernel_equals_float64_reference(" in tests and "def test_buffers_of_every_kind" in tests


def test_a_failed_step_fails_the_run_but_not_the_rest(run):
    done, calls = run("--bundle", str(run.bundle), "test", "bench", fail_on="test/kernels")
    assert (
        done.returncode == 1
        and len(calls) == 2
        and "== test: exit code 3" in done.stdout
        and "== bench: exit code 0" in done.stdout
    )


def test_benchmark_arguments_are_passed_on(run):
    _, calls = run("--bundle", str(run.bundle), "bench", "--", "--shapes", "smoke")
    assert len(calls) == 1 and calls[0].endswith("--shapes smoke")


def test_no_sanitizer_is_a_failure(run):
    done, _ = run("--bundle", str(run.bundle), "sanitize", path="/usr/bin:/bin")
    assert done.returncode == 1 and "no compute-sanitizer" in done.stdout


@pytest.mark.parametrize("args", [("nonsense",), ("--bundle", "/no/such/folder")])
def test_bad_arguments(run, args):
    assert run(*args)[0].returncode == 2


def test_help(run):
    done, calls = run("--help")
    assert done.returncode == 0 and "run_gpu.sh [--site DIR[:DIR]]" in done.stdout and not calls
