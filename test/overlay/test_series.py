# SPDX-License-Identifier: Apache-2.0
"""The series of patches: complete, applicable with `git am` to the pinned upstream, equal to the fork, and at each of
its prefixes a tree that works."""

import ast
import json
import re
from pathlib import Path

import pytest
from repository import git

from overlay import description, series
from overlay.errors import Refused

PACKAGE = Path("python")


@pytest.fixture(scope="session")
def patches(fork, pinned, tmp_path_factory):
    return series.write_against(fork, pinned, tmp_path_factory.mktemp("patches"))


@pytest.fixture(scope="session")
def steps(fork, fork_plan):
    return series.steps_of(fork, fork_plan)


@pytest.fixture(scope="session")
def applied(patches, pinned, tmp_path_factory):
    """Upstream's package where its repository holds it, as a repository of its own, with the series on it."""
    tree = tmp_path_factory.mktemp("upstream")
    pinned.archive.extractall(tree / PACKAGE, members=[name for name in pinned.names if name.startswith("sglang/")])
    git(tree, "init", "--quiet")
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--message", "upstream")
    git(tree, "am", "--quiet", *patches)
    return tree


def test_the_series_gives_the_fork_byte_for_byte(applied, fork, pinned, fork_plan):
    expected = {f"python/{name}": pinned.read(name) for name in pinned.names if name.startswith("sglang/")}
    expected |= {f"python/{name}": data for name, data in fork_plan.files().items()}
    beside = series.own_files(fork, fork_plan).keys() - fork_plan.own.keys()
    assert {"test", "docs"} == {name.partition("/")[0] for name in beside}
    expected |= {series.upstream_path(name): (fork.parent / name).read_bytes() for name in beside}
    found = {
        path.relative_to(applied).as_posix(): path.read_bytes()
        for path in applied.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(applied).parts
    }
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def touched(applied, commit) -> list[str]:
    """The Python files that a commit changes."""
    names = git(applied, "diff-tree", "--no-commit-id", "--name-only", "-r", commit).split()
    return [name for name in names if name.endswith(".py")]


def test_every_prefix_of_the_series_compiles(applied, patches):
    commits = git(applied, "rev-list", "--reverse", "HEAD").split()[1:]
    assert len(commits) == len(patches)
    for commit in commits:
        for name in touched(applied, commit):
            compile(git(applied, "show", f"{commit}:{name}"), f"{commit[:8]}:{name}", "exec", dont_inherit=True)


def test_no_patch_leaves_white_space_behind(applied, patches):
    git(applied, "diff", "--check", f"HEAD~{len(patches)}", "HEAD")


def test_bug_fixes_come_first_and_name_nothing_of_ours(fork, fork_plan, steps):
    fixes = [step.change.fix for step in steps]
    assert any(fixes) and fixes == sorted(fixes, reverse=True)
    edits = {edit.name: edit.text for edit in fork_plan.edits}
    own = series.own_files(fork, fork_plan)
    for step in steps:
        texts = [edits[name] for name in step.edits] + [own[path].read_text() for path in step.files]
        assert not step.change.fix or not re.search("kdtree|ddtree", "".join(texts), re.IGNORECASE), step.change.title


def test_no_patch_but_the_kits_speaks_of_upstream_or_a_fork(fork, fork_plan, steps):
    """Who reads it there is upstream. The kit says which distribution is installed."""
    edits = {edit.name: edit.text for edit in fork_plan.edits}
    own = series.own_files(fork, fork_plan)
    texts = {name: edits[name] for step in steps for name in step.edits}
    texts |= {
        path: own[path].read_text() for step in steps for path in step.files if not path.startswith("sglang/kdtree/")
    }
    assert len(texts) > 80
    assert [
        name for name, text in texts.items() if re.search(r"\bupstream|\b(our|this|the) fork\b", text, re.IGNORECASE)
    ] == []


def test_every_fix_brings_the_test_that_fails_without_it(fork_plan, steps):
    """That it does fail is shown where every edit's test is run without the edit."""
    tests = {edit.name: edit.test.partition("::")[0] for edit in fork_plan.edits}
    for step in steps:
        if step.change.fix:
            assert step.edits and {tests[name] for name in step.edits} <= set(step.files), step.change.title


def test_every_prefix_of_the_series_imports_only_what_is_there(fork, fork_plan, applied, steps):
    """A patch may use what upstream has and what the series has added so far, never what a later patch adds."""
    later = {module_name(path) for path in fork_plan.own if path.endswith(".py")}
    commits = git(applied, "rev-list", "--reverse", "HEAD").split()[1:]
    for commit, step in zip(commits, steps, strict=True):
        later -= {module_name(path) for path in step.files}
        for name in touched(applied, commit):
            early = imported(git(applied, "show", f"{commit}:{name}")) & later
            assert not early, f"{step.change.title}: {name} imports {early}, which a later patch adds"


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


# Tests of upstream's kind


def test_upstreams_runner_finds_every_test(fork):
    """Its own parser of a test file: registered for a CPU suite, and run by `python3 FILE`."""
    from sglang.test.ci.ci_register import HWBackend, ut_parse_one_file

    files = [path for path in (fork.parent / series.TESTS).rglob("*.py") if path.name != "conftest.py"]
    assert len(files) > 10
    for path in files:
        registries, has_main_entry = ut_parse_one_file(str(path))
        assert [(r.backend, r.suite) for r in registries] == [(HWBackend.CPU, "base-a-test-cpu")], path
        assert has_main_entry and "(CustomTestCase)" in path.read_text(), path


RUN = """
import runpy, sys
sys.path.insert(0, {tree!r})
runpy.run_path({conftest!r})
import sglang
assert sglang.__file__.startswith({tree!r}), sglang.__file__
for path in {tests!r}:
    sys.argv = [path]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as done:
        assert not done.code, path
print("passed")
"""


def lay_prefix(target: Path, site: Path, pinned, contents: dict[str, bytes], mine: set[str]) -> None:
    """A package tree: upstream's files by links into the installed one, and what the prefix has written.

    contents: path in the package -> text, after the prefix; mine: all that the fork adds or edits."""
    folders = {parent.as_posix() for path in mine for parent in Path(path).parents}

    def lay(folder: str) -> None:
        for entry in (site / folder).iterdir():
            path = f"{folder}/{entry.name}"
            if path in folders:
                lay(path)
            elif path not in mine and entry.name not in ("__pycache__", ".kdtree-overlay.json"):
                (target / folder).mkdir(parents=True, exist_ok=True)
                (target / path).symlink_to(entry)

    lay("sglang")
    for path in mine:
        data = contents.get(path) or (pinned.read(path) if path in pinned.names else None)
        if data is not None:
            series.put(target / path, data)


@pytest.mark.timeout(1200)  # half a minute on an idle machine
@pytest.mark.long
def test_every_prefix_of_the_series_passes_the_tests_that_it_adds(
    fork, pinned, fork_plan, steps, tmp_path, fresh_process
):
    """As upstream's runner does it: `python3 FILE`, here in a process forked from one that has imported torch."""
    import sglang

    site = Path(sglang.__file__).parent.parent
    mine, now = {*fork_plan.own, *fork_plan.edited}, {}
    tested = 0
    for number, (step, files) in enumerate(zip(steps, series.contents(fork, fork_plan, pinned, steps), strict=True)):
        now |= {path.removeprefix("python/"): data for path, data in files.items() if path.startswith("python/")}
        tests = [str(fork.parent / path) for path in step.files if path.startswith("test/")]
        if not tests:
            continue
        tree = tmp_path / str(number)
        lay_prefix(tree, site, pinned, now, mine)
        conftest = str(fork.parent / series.TESTS / "conftest.py")
        result = fresh_process(RUN.format(tree=str(tree), conftest=conftest, tests=tests), SGLANG_TEST_MAX_RETRY="0")
        assert result.stdout.endswith("passed\n"), f"{step.change.title}\n{result.stderr[-4000:]}"
        tested += len(tests)
    assert tested == sum(path.startswith("test/") for step in steps for path in step.files) > 10


# Descriptions


def test_each_patch_says_why(patches):
    for patch in patches:
        text = patch.read_text()
        assert "\nMotivation\n\n" in text and "\nModifications\n\n" in text, patch.name


def test_each_patch_has_a_description_in_upstreams_template(patches):
    sections = ["Motivation", "Modifications", "Accuracy Tests", "Speed Tests and Profiling", "Checklist"]
    for patch in patches:
        text = patch.with_suffix(".md").read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == sections, patch.name
        assert all(part.strip() for part in re.split(r"^## .+$", text, flags=re.MULTILINE)), patch.name


def test_tables_come_from_result_files(fork, steps, patches):
    """Each number of a table is in the JSON that the description names."""
    shown = 0
    for step, patch in zip(steps, patches, strict=True):
        text = patch.with_suffix(".md").read_text()
        for entry in step.change.tables:
            assert f"From `{entry['result']}`" in text
            json.loads((fork.parent / entry["result"]).read_text())
            shown += 1
        assert bool(step.change.tables) == ("\n|" in text.partition("## Speed")[2]), step.change.title
    assert shown >= 4


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"maker": "tables.py:none", "result": "r.json"}, "tables.py:none: no such function"),
        ({"maker": "tables.py:show", "result": "gone.json"}, "a table's result file"),
        ({"maker": "gone.py:show", "result": "r.json"}, "does not exist"),
    ],
)
def test_a_table_without_its_sources_is_refused(tmp_path, entry, message, monkeypatch):
    monkeypatch.setattr(description, "module_at", description.module_at.__wrapped__)
    (tmp_path / "tables.py").write_text("def show(data, key):\n    return str(data[key])\n")
    (tmp_path / "r.json").write_text('{"key": 7}')
    good = {"maker": "tables.py:show", "result": "r.json", "arguments": ["key"]}
    assert description.table(good, tmp_path) == "From `r.json`:\n\n7"
    with pytest.raises(Refused, match=message):
        description.table(entry, tmp_path)


# The tool


def test_the_same_fork_gives_the_same_patches(fork, patches, pinned, tmp_path):
    again = series.write_against(fork, pinned, tmp_path)
    assert [path.name for path in again] == [path.name for path in patches]
    for one, two in zip(again, patches, strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert one.with_suffix(".md").read_bytes() == two.with_suffix(".md").read_bytes()


def test_old_patches_are_cleared(small, tmp_path):
    out = tmp_path / "out"
    for old in ("0009-old.patch", "0009-old.md"):
        series.put(out / old, b"")
    written = series.write_against(small.root, small.wheel, out)
    assert [path.name for path in written] == ["0001-Fix-the-choice.patch", "0002-Add-ours.patch"]
    assert sorted(out.iterdir()) == sorted([*written, *(path.with_suffix(".md") for path in written)])


def test_tests_and_pages_lie_where_upstream_has_them(small, tmp_path):
    for name in ("test/registered/unit/test_it.py", "test/registered/conftest.py", "docs/upstream/features/it.mdx"):
        series.put(small.root.parent / name, b"text\n")
    with pytest.raises(Refused) as refusal:
        series.check(small.root, small.plan())
    assert [reason.split()[1] for reason in refusal.value.reasons] == [
        "test/registered/unit/test_it.py",
        "docs/upstream/features/it.mdx",
    ]
    path = small.root / "series.toml"
    more = '[[change]]\ntitle = "More"\nmotivation = "m"\ndescription = "d"\n'
    path.write_text(path.read_text() + more + 'files = ["test/registered", "docs/upstream"]\n')
    patch = series.write_against(small.root, small.wheel, tmp_path / "out")[-1]
    created = re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)
    assert created == ["docs/docs/features/it.mdx", "test/registered/unit/test_it.py"]
    body = patch.with_suffix(".md").read_text()
    assert "[x] unit tests: `test/registered/unit/test_it.py`" in body and description.NO_SPEED in body


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
    assigned = {step.change.title: step.files for step in series.steps_of(small.root, small.plan())}
    assert assigned == {"Fix the choice": [], "Add ours": ["sglang/srt/rest.py"], "More": ["sglang/srt/ours.py"]}


def test_a_forgotten_file_or_edit_is_refused(small):
    small.write("series.toml", "change = []\n")
    with pytest.raises(Refused) as refusal:
        series.check(small.root, small.plan())
    assert len(refusal.value.reasons) == 2 and all("is in no change" in reason for reason in refusal.value.reasons)


WITHOUT_KERNELS = """
import sys
sys.modules["sgl_kernel_sm120"] = None
import sglang.srt.server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_reference_backend import TorchReferenceAttnBackend
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
assert SpeculativeAlgorithm.from_string("DDTREE").is_dflash_family()
try:
    ATTENTION_BACKENDS["kdtree_sm120"](None)
except ImportError as error:
    assert "sgl_kernel_sm120" in str(error), error
    print("optional")
"""


def test_the_kernel_package_is_an_optional_import(fresh_process):
    """Upstream without it parses its flags and serves on any other backend; asking for ours names what is missing."""
    result = fresh_process(WITHOUT_KERNELS)
    assert result.stdout.endswith("optional\n"), result.stderr[-2000:]
