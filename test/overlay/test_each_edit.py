# SPDX-License-Identifier: Apache-2.0
"""Every edit is needed: the test that it names turns red when the fork is laid without it."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overlay.edits import load_edits
from overlay.plan import FORK, make_plan

ROOT = Path(__file__).resolve().parents[2]
EDITS = {edit.name: edit for edit in load_edits(FORK / "edits")}
# pytest's exit codes: 1 is a failed test, 2 an import that failed while collecting; 4 is a test that does not exist.
RED = {1, 2}


def installed() -> Path:
    return Path(importlib.util.find_spec("sglang").origin).parent


def lay_without(edit, pinned, scratch: Path) -> Path:
    """The installed tree by symlinks, with one module that lacks the edit."""
    parts = Path(edit.module).parts
    source, target = installed().parent, scratch
    target.mkdir()
    for folder, inside in zip(parts[:-1], parts[1:], strict=True):
        source, target = source / folder, target / folder
        target.mkdir()
        for sibling in source.iterdir():
            if sibling.name not in (inside, "__pycache__"):
                (target / sibling.name).symlink_to(sibling)
    (target / parts[-1]).write_bytes(make_plan(FORK, pinned, without=[edit.name]).edited[edit.module])
    return scratch


def run_in(tree: Path, edit) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", edit.test]
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def without(pinned, tmp_path_factory):
    """-> the outcome of each edit's test without the edit; two run at a time."""
    scratch = tmp_path_factory.mktemp("without")
    # Laid one by one: parsing is not safe in threads before Python 3.12.
    trees = {
        name: lay_without(edit, pinned, scratch / str(number)) for number, (name, edit) in enumerate(EDITS.items())
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(run_in, tree, EDITS[name]) for name, tree in trees.items()}
        return {name: run.result() for name, run in runs.items()}


def test_the_installed_tree_is_this_fork(fork_plan):
    """The tests below stand on it. If not: `make environment`, or `python -m overlay link SITE-PACKAGES`."""
    site = installed().parent
    assert [path for path, data in fork_plan.files().items() if (site / path).read_bytes() != data] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)  # minutes on an idle machine, much more on a busy one
@pytest.mark.parametrize("name", EDITS)
def test_its_test_turns_red_without_it(without, name):
    run = without[name]
    assert run.returncode in RED, (
        f"{EDITS[name].test} without {name}: exit code {run.returncode}\n{run.stdout}\n{run.stderr}"
    )
