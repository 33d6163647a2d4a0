# SPDX-License-Identifier: Apache-2.0
"""The documents name what exists: paths, and commands that their own programs accept."""

import argparse
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = {path.name for path in ROOT.iterdir()}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
WORD = re.compile(r"[\w.{}*/-]+")


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.mdx"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split()] or sorted(ROOT.glob("*.md"))


def named_paths(document: Path) -> set[str]:
    """What looks like a path of this repository: in links, in inline code, and in blocks of commands."""
    text = document.read_text()
    found = {target for target in LINK.findall(text) if "://" not in target}
    code = [match for match in INLINE.findall(FENCE.sub("", text))] + FENCE.findall(text)
    for snippet in code:
        for word in WORD.findall(snippet):
            first = word.removeprefix("./").split("/")[0]
            if "/" in word and first in TOP and not re.search(r"[{}*]", word):
                found.add(word.removeprefix("./"))
    return found


def exists(document: Path, name: str) -> bool:
    return any((base / name).exists() for base in (ROOT, document.parent))


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_exists(document):
    generated = ("build", "out", "bundle", "dist", "patches")
    missing = [
        name
        for name in named_paths(document)
        if not exists(document, name) and not set(Path(name).parts) & set(generated)
    ]
    assert missing == []


def test_the_readme_names_paths(tmp_path):
    """The finder finds: a missing file in a link, in code or in a command is seen."""
    assert {"python/UPSTREAM.toml", "sgl-kernel-sm120/README.md", "python/constraints-cpu.txt"} <= named_paths(
        ROOT / "README.md"
    )
    page = tmp_path / "page.md"
    page.write_text("[a](gone.md) `test/gone.py`\n```\npython scripts/gone.py\n```\n")
    assert {name for name in named_paths(page) if not exists(page, name)} == {
        "gone.md",
        "test/gone.py",
        "scripts/gone.py",
    }


def test_every_make_target_in_a_document_exists():
    rules = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in documents():
        snippets = " ; ".join(INLINE.findall(document.read_text()) + FENCE.findall(document.read_text()))
        used = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )*([a-z][a-z-]*)\b", snippets))
        assert used <= rules, document


# Commands


CONTINUED = re.compile(r"\\\n\s*")
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
# Programs of others: what is said to them is theirs to check.
FOREIGN = {"base64", "cat", "cd", "chmod", "chown", "curl", "docker", "export", "git", "gpg", "head", "tr", "."}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def commands(document: Path) -> list[list[str]]:
    """Every command of a block: words, without comments, variables that are set for it, and what it prints."""
    found = []
    for language, block in BLOCK.findall(document.read_text()):
        if language not in ("", "bash", "sh"):
            continue
        lines = CONTINUED.sub(" ", block).split("\n")
        typed = [line[2:] for line in lines if line.startswith("$ ")]
        for line in typed or [line.strip() for line in lines]:
            if re.match(r"[\w./]", line):
                for part in re.split(r"&&|\||;", re.sub(r"(^|\s)#.*", "", line)):
                    words = shlex.split(part)
                    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
                        del words[0]
                    if words:
                        found.append(words)
    return found


def accepts(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    try:
        parser.parse_args(arguments)
    except SystemExit as stop:
        return not stop.code
    return True


def server_fields(pinned) -> set[str]:
    """Flags of the server, ours among them."""
    texts = [path.read_text() for path in (ROOT / "python/sglang/srt/arg_groups/fields").rglob("*.py")]
    texts += [pinned.read(n).decode() for n in pinned.names if re.search(r"arg_groups/fields/\w+\.py$", n)]
    names = {name for text in texts for name in re.findall(r"^    (\w+): ", text, re.MULTILINE)}
    # Short forms that upstream declares by hand.
    names |= {name for text in texts for name in re.findall(r'"--([a-z-]+)"', text)}
    return {"--" + name.replace("_", "-") for name in names}


def flags_in(*paths: Path) -> set[str]:
    """Every flag that some files say."""
    files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*"))]
    files = [f for f in files if f.is_file() and f.suffix in TEXTS and "build" not in f.parts]
    return {flag for f in files for flag in FLAG.findall(f.read_text())}


TEXTS = {".py", ".sh", ".yaml"}


def complaint(words: list[str], pinned) -> str | None:
    """What is wrong with one command, for a reader who types it in the folder that its text names."""
    program, arguments = words[0], words[1:]
    if program in FOREIGN:
        return None
    if program == "make":
        rules = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return None if {a for a in arguments if "=" not in a} <= rules else "no such rule"
    if program == "pip":
        local = [a.partition("[")[0] for a in arguments if a.startswith("./")]
        return None if all((ROOT / path / "pyproject.toml").exists() for path in local) else "no such project"
    if program == "bash" or program.endswith(".sh"):
        script = arguments[0] if program == "bash" else program
        known = [base / script for base in (ROOT, ROOT / "sgl-kernel-sm120") if (base / script).is_file()]
        return (
            None if known and set(FLAG.findall(" ".join(words))) <= flags_in(known[0], ROOT / "benchmark") else script
        )
    if not re.fullmatch(r"(\.\./)?(\.venv/bin/)?python[\d.]*", program):
        return f"an unknown program: {program}"
    if arguments[0] != "-m":
        known = [base / arguments[0] for base in (ROOT, ROOT / "sgl-kernel-sm120") if (base / arguments[0]).is_file()]
        return (
            None
            if known and set(FLAG.findall(" ".join(words))) <= flags_in(known[0].parent) | {"--inplace"}
            else "file"
        )
    module, arguments = arguments[1], arguments[2:]
    if module == "overlay":
        from overlay.__main__ import parser

        return None if accepts(parser(), arguments) else "refused by its parser"
    if module == "sglang.kdtree":
        from sglang.kdtree.cli import build_parser

        return None if accepts(build_parser(), arguments) else "refused by its parser"
    if module == "sglang.launch_server":
        unknown = {a for a in arguments if a.startswith("--")} - server_fields(pinned) - {"--help"}
        return f"no flags of the server: {unknown}" if unknown else None
    if module == "pytest":
        return None if all((ROOT / a).exists() for a in arguments if "/" in a) else "no such tests"
    if module == "venv":
        return None
    package = ROOT / "benchmark" / module
    return None if package.is_dir() and set(FLAG.findall(" ".join(arguments))) <= flags_in(package) else "module"


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_one_that_its_program_accepts(document, pinned, capsys):
    wrong = [(shlex.join(words), complaint(words, pinned)) for words in commands(document)]
    assert [entry for entry in wrong if entry[1]] == []


def test_wrong_commands_are_seen(tmp_path, pinned):
    page = tmp_path / "page.md"
    page.write_text(
        "```\nA=1 make nothing  # a comment\nfoo --bar\npip install ./gone\n```\n"
        "```bash\n$ python -m overlay drift\nits output --here\n```\n```python\nno command\n```\n"
        "```\npython -m sglang.launch_server --no-such \\\n    --port 1\nbash benchmark/run_gpu.sh --no-such\n"
        "python benchmark/report.py --no-such\npython -m sglang.kdtree plan --no-such\n```\n"
    )
    found = commands(page)
    assert [words[0] for words in found] == ["make", "foo", "pip", *["python"] * 2, "bash", *["python"] * 2]
    assert found[4][-2:] == ["--port", "1"]
    assert all(complaint(words, pinned) for words in found)


# Beginning of a command -> the test that runs it and, in parentheses, what that test says of it; or why none can. Of
# several beginnings the longest counts.
RUN_BY = {
    "make serve": "scripts/test_serve_small_model.py (serve.py)",
    "make test": "none: these are its tests",
    "make delta": "overlay/test_delta.py (delta)",
    "make pr": "overlay/test_series.py (write_against)",
    "make release": "overlay/test_release.py (release.build)",
    "make check-release": "overlay/test_release.py (release.check)",
    "python3.11 -m venv": "scripts/test_environment.py (venv)",
    "pip install": "scripts/test_environment.py (test_the_readme_installs_what_make_installs)",
    "pip install ./sgl-kernel-sm120": "kernels/test_build.py (pip)",
    "pip install --no-build-isolation -e": "none: the author's way to work on the kernels; test_build.py builds them",
    "python setup.py build_ext": "kernels/test_build.py (test_only_what_changed_is_recompiled)",
    "python -m overlay drift": "overlay/test_drift.py (drift)",
    "python -m overlay sign": "overlay/test_edits.py (sign)",
    "python -m overlay check": "overlay/test_wheel.py (check)",
    "python -m overlay link": "overlay/test_tree.py (link)",
    "python -m sglang.launch_server --help": "overlay/test_docs.py (launch_server)",
    "python -m sglang.launch_server": "e2e/test_small_model.py (sglang.launch_server)",
    "python -m sglang.kdtree doctor": "kit/test_doctor.py (doctor)",
    "python -m sglang.kdtree plan": "kit/test_deploy_doc.py (plan)",
    "python -m sglang.kdtree schema": "kit/test_cli.py (schema)",
    "python -m sglang.kdtree bench compare": "kit/test_server.py (compare)",
    "python -m sglang.kdtree bench longctx": "kit/test_server.py (longctx)",
    "python -m sglang.kdtree bench throughput": "kit/test_server.py (throughput)",
    "python -m sglang.kdtree probe commit-length": "kit/test_server.py (commit-length)",
    "python -m sglang.kdtree probe gpu": "kit/test_on_gpu.py (probe gpu)",
    "python -m sglang.kdtree probe moe": "kit/test_server.py (moe)",
    "python -m sglang.kdtree probe verify": "kit/test_server.py (verify)",
    "python -m pytest": "none: these are tests",
    "python benchmark/kernels/build_native.py": "benchmark/test_arms.py (build_native)",
    "python benchmark/kernels/bench_mla_tree_verify.py": "benchmark/test_bench_cli.py (--list)",
    "python benchmark/kernels/bench_ddtree.py": "benchmark/test_run_gpu.py (bench_ddtree)",
    "python benchmark/backend_e2e.py": "benchmark/test_backend_e2e.py (backend_e2e)",
    "python benchmark/pack_gpu.py": "benchmark/test_pack.py (pack_gpu)",
    "bash benchmark/run_gpu.sh": "benchmark/test_run_gpu.py (run_gpu.sh)",
    "python benchmark/merge_results.py": "benchmark/test_merge_results.py (merge_results)",
    "python -m one_rank": "benchmark/test_one_rank.py (one_rank)",
    "python -m two_ranks": "benchmark/test_two_ranks.py (two_ranks)",
    "python sgl-kernel-sm120/tools/resources.py": "kernels/test_build.py (resources)",
    "tools/check_torch_abi.sh": "kernels/test_build.py (check_torch_abi)",
    "docker": "none: there is no engine in CI; docker/check.py runs what the image runs",
    "chown": "none: root's",
    "git tag": "none: needs the maintainers' key",
    "git push": "none: publishes",
    "gpg": "none: needs the maintainers' key",
}
SHELL = {".", "cd", "export", "head", "base64", "tr", "chmod"}


def run_by(words: list[str]) -> str | None:
    line = shlex.join(words)
    found = [beginning for beginning in RUN_BY if line == beginning or line.startswith(beginning + " ")]
    return RUN_BY[max(found, key=len)] if found else None


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_runs_in_a_test(document):
    unknown = [shlex.join(words) for words in commands(document) if words[0] not in SHELL and run_by(words) is None]
    assert unknown == [], "name the test that runs it in RUN_BY"


def test_the_tests_that_run_commands_do():
    for beginning, test in RUN_BY.items():
        if not test.startswith("none: "):
            path, what = re.fullmatch(r"(\S+) \((.+)\)", test).groups()
            assert what in (ROOT / "test" / path).read_text(), (beginning, test)
    said = [shlex.join(words) for document in documents() for words in commands(document)]
    assert [b for b in RUN_BY if not any(line == b or line.startswith(b + " ") for line in said)] == []


def test_the_servers_help_names_our_flags(fresh_process):
    code = (
        "import runpy, sys; sys.argv = ['x', '--help']; runpy.run_module('sglang.launch_server', run_name='__main__')"
    )
    said = fresh_process(code).stdout
    assert "--kdtree-verify" in said and "--kv-defrag" in said and "--speculative-ddtree-topk" in said


# Of pip, docker, git and gpg; and an abbreviation that the server's parser takes.
OF_OTHERS = {"--verify", "--extra-index-url", "--index-url", "--no-build-isolation", "--ipc", "--tp"}


def test_every_flag_that_is_named_exists(pinned):
    ours = [ROOT / name for name in ("python/sglang", "python/overlay", "scripts", "benchmark", "docker")]
    ours += [ROOT / "sgl-kernel-sm120" / "tools", ROOT / "test" / "models"]
    known = server_fields(pinned) | flags_in(*ours) | OF_OTHERS
    for document in documents():
        named = set(FLAG.findall(" ".join(INLINE.findall(FENCE.sub("", document.read_text())))))
        assert named - known == set(), document


# Of pip, docker and nvidia-smi.
IN_REMEDIES = {"--force-reinstall", "--no-deps", "--shm-size", "--ipc", "--query-gpu", "--format"}


def test_every_flag_that_the_kit_advises_exists(pinned):
    """What a remedy names, the kit's own parser or the server takes."""
    from sglang.kdtree.cli import build_parser

    def flags_of(parser):
        for action in parser._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    yield from flags_of(sub)

    known = server_fields(pinned) | set(flags_of(build_parser())) | IN_REMEDIES
    for path in (ROOT / "python/sglang/kdtree").rglob("*.py"):
        assert set(FLAG.findall(path.read_text())) <= known, path


def test_the_bump_that_was_tried_is_told_as_it_was():
    record = json.loads((ROOT / "docs" / "bump-0.5.23.json").read_text())
    text = (ROOT / "docs" / "edits.md").read_text()
    for step in record["steps"]:
        assert f"| `{step['step']}` | {step['seconds']} |" in text, step
    drift = record["steps"][0]
    assert (
        f"{drift['unchanged']} of {drift['edits']} edits unchanged, {drift['symbol_changed']} symbols changed" in text
    )
    assert f"{drift['report_lines']} lines" in text


# Pictures


def test_the_pictures_name_what_the_code_names(pinned):
    """Functions and files in the diagrams of the architecture are there, ours or upstream's."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    pictures = "".join(re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL))
    words = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b|\b[A-Z]\w+[A-Z]\w+\b", pictures)) - {"DFLASH", "DDTREE"}
    assert len(words) > 20
    sources = [p.read_text() for d in ("python/sglang", "sgl-kernel-sm120/python") for p in (ROOT / d).rglob("*.py")]
    sources += [pinned.read(f"sglang/srt/managers/{name}.py").decode() for name in ("scheduler", "utils")]
    sources.append(" ".join(pinned.names))
    assert [word for word in sorted(words) if not any(word in source for source in sources)] == []


# Messages


PYTHONS_OWN = {"invalid choice: 'kdtree_sm120'"}


def test_the_messages_of_the_faq_are_messages_of_the_code(pinned):
    """What a reader searches for has to be what the program says; `...` stands for what differs."""
    text = (ROOT / "docs" / "faq.md").read_text()
    heads = re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)
    quoted = [quote for head in heads for quote in INLINE.findall(head) if " " in quote]
    assert len(quoted) > 7
    sources = [p.read_text() for d in ("python/overlay", "python/sglang") for p in (ROOT / d).rglob("*.py")]
    upstreams = re.compile(r"sglang/srt/(managers|model_executor|mem_cache)/.*\.py$")
    sources += [pinned.read(name).decode() for name in pinned.names if upstreams.match(name)]
    # A message may be written over several lines.
    said = re.sub(r'"\s*f?"', "", "\n".join(sources))
    for quote in quoted:
        parts = [part.strip(" ,=") for part in quote.split("...") if part.strip(" ,=")]
        assert quote in PYTHONS_OWN or all(part in said for part in parts), quote


def test_the_first_hour_is_told_as_it_was():
    record = json.loads((ROOT / "docs" / "first-hour.json").read_text())
    text = (ROOT / "docs" / "first-hour.md").read_text()
    for step in record["steps"]:
        assert re.search(rf"^\| `{re.escape(step['command'])}`.* \| {step['seconds']} \|$", text, re.MULTILINE), step
        assert step["exit"] == 0
