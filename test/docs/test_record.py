# SPDX-License-Identifier: Apache-2.0
"""What records a run records what ran, and nothing that failed."""

import json
import subprocess

import pytest
from repository import commit_all

from docs import record, run_workflow


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "page").write_text("text\n")
    commit_all(folder)
    return folder


@pytest.fixture
def recorded(clone, tmp_path, monkeypatch):
    """run(program, arguments) -> (exit code, the steps that are recorded now)"""
    path = tmp_path / "record.json"

    def run(program, *arguments):
        command = ["program", *arguments, "--at", str(clone), "--record", str(path)]
        monkeypatch.setattr("sys.argv", command)
        try:
            code = program.main()
        except subprocess.CalledProcessError as error:
            code = error.returncode
        return code, json.loads(path.read_text())["steps"] if path.exists() else []

    return run


def test_a_line_is_recorded_with_what_was_put_in_its_place(recorded, clone):
    code, (step,) = recorded(
        record, "--cwd", "inner", "--set", "A=b", "--put", "PAGE=>page", 'cat PAGE && test "$A" = b'
    )
    assert code == 0 and step.pop("seconds") >= 0 and step.pop("python")
    assert step == {
        "command": 'cat PAGE && test "$A" = b',
        "in": "inner",
        "commit": record.git(clone, "rev-parse", "--short=7", "HEAD"),
        "exit": 0,
        "with": {"A": "b"},
        "put": {"PAGE": "page"},
    }
    _, steps = recorded(record, "true")
    assert [step["command"] for step in steps] == ['cat PAGE && test "$A" = b', "true"]
    assert len(recorded(record, "true")[1]) == 2


@pytest.mark.parametrize("arguments, code", [(["exit 3"], 3), (["--until", "ready", "echo other"], 0)])
def test_a_line_that_fails_is_not_recorded(recorded, arguments, code):
    assert recorded(record, *arguments) == (code, [])


def test_a_server_is_ended_once_it_has_said_what_was_waited_for(recorded):
    code, (step,) = recorded(record, "--until", "ready", "echo ready on 1; sleep 600")
    assert code == 0 and step["until"] == "ready" and "exit" not in step and step["seconds"] < 600


def test_a_clone_with_changes_is_refused(recorded, clone, capsys):
    (clone / "inner" / "page").write_text("changed\n")
    assert recorded(record, "true") == (2, []) and "has changes" in capsys.readouterr().err


STEPS = [
    {"uses": "actions/checkout@v4"},
    {
        "run": 'test "$CI$TO" = truenewest && test -z "${INDEX+x}" && echo said >> "$GITHUB_STEP_SUMMARY"\ncat page\n',
        "working-directory": "inner",
        "env": {"TO": "${{ matrix.to }}", "INDEX": "${{ vars.INDEX }}"},
    },
    {"run": "false"},
]


def test_the_steps_of_a_job_run_in_order_until_one_fails(recorded, monkeypatch):
    monkeypatch.setattr(run_workflow, "job_of", lambda workflow, job: {"steps": STEPS})
    code, (step,) = recorded(run_workflow, "drift", "report", "--matrix", "to=newest")
    assert code == 1 and step["command"] == STEPS[1]["run"] and step["where"] == "drift report to=newest"
    assert step["exit"] == 0 and step["summary_lines"] == 1
