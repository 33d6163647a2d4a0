# SPDX-License-Identifier: Apache-2.0
"""Every edit is needed: the test that it names passes on the fork, and fails when the fork is laid without the edit.

Each of these tests runs in a process of its own, forked from one that has imported torch and nothing of sglang, on the
installed tree by symlinks, in which the modules with edits are written anew.
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
PASSED, FAILED = 0, 1  # pytest's exit codes

RUN = """
import importlib, importlib.util, json, os, sys
sys.path.insert(0, {tree!r})
os.chdir({root!r})
import pytest
class Record:
    outcomes = []
    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            self.outcomes.append(report.outcome)
for module in {imported!r}:
    importlib.import_module(module)
for test in {tests!r}:
    child = os.fork()
    if child == 0:
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test], plugins=[Record()])
        origin = importlib.util.find_spec("sglang").origin
        print("RESULT" + json.dumps([test, [code, Record.outcomes, origin]]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def installed() -> Path:
    return Path(importlib.util.find_spec("sglang").origin).parent


def lay(source: Path, target: Path, modules: dict[tuple[str, ...], str], compiled: list[Path]) -> None:
    """The tree `source` by symlinks, with other text in some modules. modules: path below source, in parts -> text;
    compiled: trees of the same files whose compiled ones are linked, or each process would compile hundreds anew."""
    target.mkdir(parents=True)
    heads = {parts[0] for parts in modules}
    for entry in source.iterdir():
        if entry.name not in {*heads, "__pycache__"}:
            (target / entry.name).symlink_to(entry)
    (target / "__pycache__").mkdir()
    for cached in {path.name: path for tree in compiled for path in (tree / "__pycache__").glob("*.pyc")}.values():
        if cached.name.partition(".")[0] + ".py" not in heads:
            (target / "__pycache__" / cached.name).symlink_to(cached.resolve())
    for head in heads:
        below = {parts[1:]: text for parts, text in modules.items() if parts[0] == head}
        if () in below:
            (target / head).write_text(below[()])
        else:
            lay(source / head, target / head, below, [tree / head for tree in compiled])


def run_tests(fresh_process, tree: Path, texts: dict[str, str], tests: list[str], *, imported=(), compiled=()):
    """The tests on a tree with these texts of modules, each in a process of its own in which `imported` is imported.
    -> ({test: (exit code, outcomes of the calls)}, log)"""
    modules = {Path(module).parts[1:]: text for module, text in texts.items()}
    lay(installed(), tree / "sglang", modules, [installed(), *compiled])
    # What a test starts in another process finds the same tree.
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    code = RUN.format(tree=str(tree), root=str(ROOT), tests=tests, imported=imported)
    # Upstream's test class tries a failed test again.
    done = fresh_process(code, PYTHONPATH=path, PYTEST_XDIST_WORKER=None, SGLANG_TEST_MAX_RETRY="0")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    results = dict(json.loads(line.removeprefix("RESULT")) for line in lines)
    log = done.stdout + done.stderr
    assert results.keys() == set(tests), log
    assert all(Path(origin).is_relative_to(tree) for _, _, origin in results.values()), "another sglang was tested"
    return {test: (code, outcomes) for test, (code, outcomes, _) in results.items()}, log


def text_of(pinned, module: str, *, without=()) -> str:
    kept = [edit for edit in EDITS.values() if edit.module == module and edit.name not in without]
    return apply(module, pinned.read(module).decode(), kept)


@pytest.fixture(scope="module")
def tree_with_all(tmp_path_factory):
    return tmp_path_factory.mktemp("with all") / "tree"


@pytest.fixture(scope="module")
def with_all(fresh_process, pinned, tree_with_all):
    """What the tests do with all edits. They are forked from a process that has imported most of sglang."""
    texts = {edit.module: text_of(pinned, edit.module) for edit in EDITS.values()}
    tests = sorted({edit.test for edit in EDITS.values()})
    return run_tests(fresh_process, tree_with_all, texts, tests, imported=["sglang.srt.managers.scheduler"])


def test_the_installed_tree_is_this_fork(fork_plan):
    """The tests below stand on it. If not: `make environment`, or `python -m overlay link SITE-PACKAGES`."""
    site = installed().parent
    assert [path for path, data in fork_plan.files().items() if (site / path).read_bytes() != data] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_its_test_passes_with_all_edits(with_all, name):
    """That it fails without the edit says something only if it passes with it, alone, in such a tree."""
    results, log = with_all
    code, outcomes = results[EDITS[name].test]
    assert code == PASSED and set(outcomes) == {"passed"}, log


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_its_test_fails_without_it(fresh_process, pinned, tmp_path, tree_with_all, with_all, name):
    """A test that ran and failed: not one that could not be collected or set up."""
    module, test = EDITS[name].module, EDITS[name].test
    texts = {module: text_of(pinned, module, without=[name])}
    compiled = [tree_with_all / "sglang"]
    results, log = run_tests(fresh_process, tmp_path / "tree", texts, [test], compiled=compiled)
    code, outcomes = results[test]
    assert code == FAILED and "failed" in outcomes, log
