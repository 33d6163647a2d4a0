# SPDX-License-Identifier: Apache-2.0
"""The workflows of .github: valid for GitHub, and calling what this repository has."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FOLDER = Path(sys.executable).parent
ACTIONLINT = shutil.which("actionlint", path=f"{FOLDER}") or shutil.which("actionlint")


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> list[dict]:
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.skipif(ACTIONLINT is None, reason="no actionlint: pip install -r test/requirements.txt")
def test_actionlint_finds_nothing(tmp_path):
    """And it would: a permission that does not exist is seen."""
    result = subprocess.run([ACTIONLINT, "-no-color", *WORKFLOWS], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    bad = tmp_path / "bad.yml"
    bad.write_text(
        WORKFLOWS[0].read_text().replace("github.ref ", "github.refs ").replace("contents: read", "all: read")
    )
    assert subprocess.run([ACTIONLINT, bad], capture_output=True, cwd=ROOT).returncode == 1


def test_there_is_one_for_each_purpose():
    assert [path.stem for path in WORKFLOWS] == ["drift", "lint", "test", "wheels"]
    # YAML reads the key `on` as a boolean.
    assert load(WORKFLOWS[0])[True]["schedule"] == [{"cron": "17 5 * * 1"}]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_they_may_read_and_no_more(path):
    """Only the job that drafts a release may write; and nothing untrusted is pasted into a shell."""
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    writing = [name for name, job in workflow["jobs"].items() if job.get("permissions")]
    assert writing == (["draft"] if path.stem == "wheels" else [])
    for step in steps(path):
        assert "${{" not in step.get("run", ""), step
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_they_call_what_is_here(path):
    rules = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(path):
        assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= rules
        for pattern in (step.get("with") or {}).get("cache-dependency-path", "").split():
            assert (ROOT / pattern).exists()


@pytest.mark.parametrize("name, job", [("test", "cpu"), ("wheels", "check")])
def test_every_python_of_upstream_is_tested(pin, name, job):
    tested = load(ROOT / f".github/workflows/{name}.yml")["jobs"][job]["strategy"]["matrix"]["python"]
    assert {f"cp{version.replace('.', '')}" for version in tested} == {tag.partition("-")[0] for tag in pin.sha256}


@pytest.mark.parametrize("code, passes", [(0, True), (1, True), (2, False)])
def test_drift_reports_work_and_fails_only_where_the_tool_does(tmp_path, code, passes):
    """The step as GitHub runs it, with a stand-in for the tool."""
    (script,) = [step["run"] for step in steps(ROOT / ".github/workflows/drift.yml") if "run" in step]
    (tmp_path / "python").mkdir()
    stand_in = tmp_path / "bin" / "python"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "said by: $*"\nexit {code}\n')
    stand_in.chmod(0o755)
    summary = tmp_path / "summary.md"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=tmp_path / "python",
        env={"PATH": f"{stand_in.parent}:/usr/bin:/bin", "TO": "previous", "GITHUB_STEP_SUMMARY": str(summary)},
        check=False,
    )
    said = "said by: -m overlay drift --to previous"
    assert (done.returncode == 0) == passes
    assert (tmp_path / "drift.txt").read_text() == f"{said}\n"
    assert summary.read_text() == f"## drift --to previous\n```diff\n{said}\n```\n"


# Made with a token of GitHub's, on GitHub.
ON_GITHUB_ALONE = {"draft"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_has_run_in_a_clean_clone(path):
    """As it is written now: test/docs/run_workflow.py wrote the record."""
    ran = {}
    for step in json.loads((ROOT / "docs" / "workflows.json").read_text())["steps"]:
        assert step["exit"] == 0
        workflow, job, *_ = step["where"].split()
        ran.setdefault((workflow, job), set()).add(step["command"])
    for job, content in load(path)["jobs"].items():
        written = {step["run"] for step in content["steps"] if "run" in step}
        assert job in ON_GITHUB_ALONE or written <= ran.get((path.stem, job), set()), job
