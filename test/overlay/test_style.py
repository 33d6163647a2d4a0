# SPDX-License-Identifier: Apache-2.0
"""What is at upstream's paths has upstream's style: the settings are shown to be upstream's by its own files."""

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = [ROOT / "python" / "sglang", ROOT / "test" / "registered"]
SETTINGS = ROOT / "python" / "upstream-style.toml"
COMMANDS = {
    "lint": ["ruff", "check", "--no-cache", "--config", SETTINGS],
    "format": ["ruff", "format", "--no-cache", "--check", "--config", SETTINGS],
    "imports": ["isort", "--check", "--quiet", "--settings-path", ROOT],
}


def run(check: str, *paths: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *COMMANDS[check], *paths]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def upstreams(pinned, tmp_path_factory) -> list[Path]:
    """Some hundred files of the pinned release, with the directories of ours beside them."""
    tree = tmp_path_factory.mktemp("style")
    folders = ("sglang/srt/speculative/", "sglang/srt/mem_cache/", "sglang/srt/arg_groups/")
    names = [name for name in pinned.names if name.startswith(folders) and name.endswith(".py")]
    assert len(names) > 100
    pinned.archive.extractall(tree, members=names)
    return [tree / "sglang"]


@pytest.mark.parametrize("check", COMMANDS)
def test_our_files_pass(check):
    result = run(check, *OURS)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("check", COMMANDS)
def test_the_files_that_we_edit_pass(check, fork_plan, tmp_path):
    """A patch that upstream's formatter would change fails its lint."""
    for path, text in fork_plan.edited.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    assert len(fork_plan.edited) > 10
    result = run(check, tmp_path / "sglang")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("check", COMMANDS)
def test_upstreams_own_files_pass(check, upstreams):
    """Else the settings are not upstream's: look up its hooks at the pinned release."""
    result = run(check, *upstreams)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "check, text", [("lint", "import os\n"), ("format", "x = 'a'\n"), ("imports", "import b\nimport a\n")]
)
def test_the_checks_refuse(check, text, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    assert run(check, tmp_path).returncode == 1


def test_the_tools_are_the_pinned_ones():
    """One version for everybody: another ruff may format another way."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "test" / "requirements.txt").read_text(), re.MULTILINE))
    for name in ("ruff", "isort", "codespell", "clang-format"):
        assert metadata.version(name) == pins[name]


def test_make_lint_runs_the_same_checks():
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for command in COMMANDS.values():
        assert f"-m {command[0]} {command[1]}" in recipe
    assert recipe.count("--config python/upstream-style.toml $(UPSTREAM_STYLE)") == 2


# Upstream's written rules, as far as they can be counted

# Lists of flags, which are read from top to bottom.
LONG_FUNCTIONS = {"add_arguments"}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 100, 2000


def breaches(path: Path) -> list[str]:
    text = path.read_text()
    found = [] if text.isascii() else ["not ASCII"]
    if text.count("\n") > MAX_FILE_LINES:
        found.append(f"{text.count(chr(10))} lines")
    for number, line in enumerate(text.split("\n"), start=1):
        if re.search(r"\b(FIXME|XXX|HACK)\b|\bTODO\b(?!\(\w)", line):
            found.append(f"line {number}: a note that names nobody")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES and node.name not in LONG_FUNCTIONS:
                found.append(f"{node.name}: {lines} lines")
        if isinstance(node, ast.ClassDef):
            if node.name.endswith("Mixin"):
                found.append(f"{node.name}: a mixin")
            # A subclass of an upstream dataclass has to be one.
            if not node.bases and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                found.append(f"{node.name}: a dataclass, not a msgspec.Struct")
    return found


def test_our_files_keep_the_written_rules():
    found = {path.relative_to(ROOT).as_posix(): breaches(path) for path in OURS[0].rglob("*.py")}
    assert {path: rules for path, rules in found.items() if rules} == {}


def test_breaches_of_the_rules_are_seen(tmp_path):
    bad = tmp_path / "bad.py"
    body = "\n".join(f"    x = {number}" for number in range(MAX_FUNCTION_LINES))
    classes = "@dataclass\nclass A:\n    pass\n\n\nclass BMixin:\n    pass  # TODO: this\n"
    bad.write_text(f"def long():\n{body}\n\n\n{classes}\n\nC = '\u00e9'\n")
    assert len(breaches(bad)) == 5
