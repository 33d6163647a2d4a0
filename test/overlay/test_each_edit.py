# SPDX-License-Identifier: Apache-2.0
"""Every edit is needed: the test that it names passes on the fork, and fails when the fork is laid without the edit.

Each of these tests runs in a process of its own, forked from one that has imported torch and nothing of sglang, on the
installed tree by symlinks, in which the modules in question are written anew.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from overlay.edits import apply, load_edits
from overlay.plan import FORK

ROOT = Path(__file__).resolve().parents[2]
EDITS = {edit.name: edit for edit in load_edits(FORK / "edits")}
PASSED, FAILED = 0, 1  # pytest's exit codes; 2 is an import that failed while collecting, 4 a test that does not exist

RUN = """
import json, os, sys
sys.path.insert(0, {tree!r})
os.chdir({root!r})
import importlib.util, pytest
class Record:
    reports = []
    def pytest_runtest_logreport(self, report):
        self.reports.append([report.nodeid, report.when, report.outcome])
code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", {test!r}], plugins=[Record()])
print("RESULT" + json.dumps([code, importlib.util.find_spec("sglang").origin, Record.reports]))
"""


def installed() -> Path:
    return Path(importlib.util.find_spec("sglang").origin).parent


def lay(source: Path, target: Path, modules: dict[tuple[str, ...], bytes]) -> None:
    """The tree `source` by symlinks, with other text in some modules. modules: path below source, in parts -> text"""
    target.mkdir(parents=True)
    heads = {parts[0] for parts in modules}
    for entry in source.iterdir():
        if entry.name not in {*heads, "__pycache__"}:
            (target / entry.name).symlink_to(entry)
    # What is compiled already, or each process would compile hundreds of linked modules anew.
    (target / "__pycache__").mkdir()
    for compiled in (source / "__pycache__").glob("*.pyc"):
        if compiled.name.partition(".")[0] + ".py" not in heads:
            (target / "__pycache__" / compiled.name).symlink_to(compiled)
    for head in heads:
        below = {parts[1:]: text for parts, text in modules.items() if parts[0] == head}
        if () in below:
            (target / head).write_bytes(below[()])
        else:
            lay(source / head, target / head, below)


@pytest.fixture
def run_test(fresh_process, pinned, tmp_path):
    def run(name, *, without=()):
        """The test that this edit names, on a tree that lacks some. -> (exit code, {test: outcome of its call}, log)"""
        module, test = EDITS[name].module, EDITS[name].test
        kept = [edit for edit in EDITS.values() if edit.module == module and edit.name not in without]
        text = apply(module, pinned.read(module).decode(), kept)
        tree = tmp_path / "tree"
        lay(installed(), tree / "sglang", {Path(module).parts[1:]: text.encode()})
        # What a test starts in another process finds the same tree.
        path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        done = fresh_process(
            RUN.format(tree=str(tree), root=str(ROOT), test=test), PYTHONPATH=path, PYTEST_XDIST_WORKER=None
        )
        log = done.stdout + done.stderr
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        assert results, log
        code, origin, reports = json.loads(results[-1].removeprefix("RESULT"))
        assert Path(origin).is_relative_to(tree), "another sglang was tested"
        return code, {test: outcome for test, when, outcome in reports if when == "call"}, log

    return run


def test_the_installed_tree_is_this_fork(fork_plan):
    """The tests below stand on it. If not: `make environment`, or `python -m overlay link SITE-PACKAGES`."""
    site = installed().parent
    assert [path for path, data in fork_plan.files().items() if (site / path).read_bytes() != data] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_its_test_passes_with_all_edits(run_test, name):
    """Red without the edit says something only of a test that is green with it, alone, in such a tree."""
    code, outcomes, log = run_test(name)
    assert code == PASSED and set(outcomes.values()) == {"passed"}, log


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_its_test_fails_without_it(run_test, name):
    """By a test that ran and failed: not while collecting, and not in a fixture."""
    code, outcomes, log = run_test(name, without=[name])
    assert code == FAILED and "failed" in outcomes.values(), log
