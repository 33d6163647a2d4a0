# SPDX-License-Identifier: Apache-2.0
"""The series of patches: complete, applicable with `git am` to the pinned upstream, and equal to the fork."""

import ast
import os
import re
import subprocess

import pytest

from overlay import series
from overlay.errors import Refused

CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "reader@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def git(tree, *arguments, **options):
    return subprocess.run(
        ["git", "-C", tree, *arguments], check=True, env=CLEAN, capture_output=True, text=True, **options
    ).stdout


@pytest.fixture(scope="session")
def patches(fork, pinned, tmp_path_factory):
    return series.write_against(fork, pinned, tmp_path_factory.mktemp("patches"))


@pytest.fixture(scope="session")
def applied(patches, pinned, tmp_path_factory):
    """Upstream's whole tree as a repository of its own, with the series on it."""
    tree = tmp_path_factory.mktemp("upstream")
    pinned.archive.extractall(tree, members=[name for name in pinned.names if name.startswith("sglang/")])
    git(tree, "init", "--quiet")
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--message", "upstream")
    git(tree, "am", "--quiet", *patches)
    return tree


def test_the_series_gives_the_fork_byte_for_byte(applied, pinned, fork_plan):
    expected = {name: pinned.read(name) for name in pinned.names if name.startswith("sglang/")} | fork_plan.files()
    found = {
        path.relative_to(applied).as_posix(): path.read_bytes()
        for path in applied.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(applied).parts
    }
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_every_prefix_of_the_series_compiles(applied, patches):
    commits = git(applied, "rev-list", "--reverse", "HEAD").split()[1:]
    assert len(commits) == len(patches)
    for commit in commits:
        for name in git(applied, "diff-tree", "--no-commit-id", "--name-only", "-r", commit).split():
            if name.endswith(".py"):
                compile(git(applied, "show", f"{commit}:{name}"), f"{commit[:8]}:{name}", "exec", dont_inherit=True)


def test_no_patch_leaves_white_space_behind(applied, patches):
    git(applied, "diff", "--check", f"HEAD~{len(patches)}", "HEAD")


def test_each_patch_says_why(patches):
    for patch in patches:
        text = patch.read_text()
        assert "\nMotivation\n\n" in text and "\nModifications\n\n" in text, patch.name


def test_bug_fixes_come_first_and_name_nothing_of_ours(fork, fork_plan):
    steps = series.assign(series.load(fork), fork_plan)
    fixes = [change.fix for change, _, _ in steps]
    assert any(fixes) and fixes == sorted(fixes, reverse=True)
    edits = {edit.name: edit.text for edit in fork_plan.edits}
    for change, files, names in steps:
        texts = [edits[name] for name in names] + [fork_plan.own[path].read_text() for path in files]
        assert not change.fix or not re.search("kdtree|ddtree", "".join(texts), re.IGNORECASE), change.title


def test_every_prefix_of_the_series_imports_only_what_is_there(fork, fork_plan, pinned, applied, patches):
    """A patch may use what upstream has and what the series has added so far, never what a later patch adds."""
    later = {module_name(path) for path in fork_plan.own if path.endswith(".py")}
    commits = git(applied, "rev-list", "--reverse", "HEAD").split()[1:]
    for commit, (change, files, _) in zip(commits, series.assign(series.load(fork), fork_plan), strict=True):
        later -= {module_name(path) for path in files}
        for name in git(applied, "diff-tree", "--no-commit-id", "--name-only", "-r", commit).split():
            if name.endswith(".py"):
                early = imported(git(applied, "show", f"{commit}:{name}")) & later
                assert not early, f"{change.title}: {name} imports {early}, which a later patch adds"


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_same_fork_gives_the_same_patches(fork, patches, pinned, tmp_path):
    again = series.write_against(fork, pinned, tmp_path)
    assert {path.name: path.read_bytes() for path in again} == {path.name: path.read_bytes() for path in patches}


def test_old_patches_are_cleared(small, tmp_path):
    (tmp_path / "0009-old.patch").write_text("")
    written = series.write_against(small.root, small.wheel, tmp_path)
    assert [path.name for path in written] == ["0001-Fix-the-choice.patch", "0002-Add-ours.patch"]
    assert sorted(tmp_path.glob("*.patch")) == written


@pytest.mark.parametrize(
    "change, message",
    [
        ('files = ["sglang/nothing"]', "names sglang/nothing, which is no file of ours"),
        ('edits = ["sglang/srt/choices.py:none"]', "names the edit sglang/srt/choices.py:none, which does not exist"),
        ('edits = ["sglang/srt/choices.py:pick"]', "is in 2 changes: Fix the choice, More"),
        ('files = ["sglang/srt"]', "ours.py is in 2 changes: Add ours, More"),
        ('file = ["sglang/srt"]', "change 3: "),
    ],
)
def test_a_wrong_series_is_refused(small, change, message):
    path = small.root / "series.toml"
    path.write_text(path.read_text() + f'[[change]]\ntitle = "More"\nmotivation = "m"\ndescription = "d"\n{change}\n')
    with pytest.raises(Refused, match=message):
        series.check(small.root, small.plan())


def test_a_file_belongs_to_the_change_that_names_it_most_exactly(small):
    path = small.root / "series.toml"
    path.write_text(
        path.read_text()
        + '[[change]]\ntitle = "More"\nmotivation = "m"\ndescription = "d"\nfiles = ["sglang/srt/ours.py"]\n'
    )
    small.own("srt/rest.py", "")
    assigned = {change.title: files for change, files, _ in series.assign(series.load(small.root), small.plan())}
    assert assigned == {"Fix the choice": [], "Add ours": ["sglang/srt/rest.py"], "More": ["sglang/srt/ours.py"]}


def test_a_forgotten_file_or_edit_is_refused(small):
    small.write("series.toml", "change = []\n")
    with pytest.raises(Refused) as refusal:
        series.check(small.root, small.plan())
    assert len(refusal.value.reasons) == 2 and all("is in no change" in reason for reason in refusal.value.reasons)
