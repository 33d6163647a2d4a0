# SPDX-License-Identifier: Apache-2.0
"""The documents name what exists: paths, flags, names in pictures, messages. Commands: test/docs/test_commands.py."""

import argparse
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from docs.documents import ROOT, documents

TOP = {path.name for path in ROOT.iterdir()}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
WORD = re.compile(r"[\w.{}*/-]+")


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


# With an ending, or as a folder with a slash behind it. What has <op>, {gpu}, * or $ in it stands for several.
NAMED = re.compile(
    r"(?<![\w/.<>{}*$~-])(?:\./)?((?:[\w.-]+/)*[\w-]+(?:\.\w+)*\.(?:py|mdx?|h|cuh?|cpp|toml|sh|yaml|service|png|txt)"
    r"|(?:[\w-]+/){2,})(?![\w/*{<$-])"
)
IN_A_WHEEL = {"CHANGES-kdtree.txt"}


@pytest.fixture(scope="session")
def all_files(pinned) -> str:
    """Ours and upstream's, one a line, each with a slash before it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    ours = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return "".join(f"/{name}\n" for name in [*ours.split(), *pinned.names])


def unknown_files(text: str, all_files: str) -> set[str]:
    """Files and folders in inline code that end no file's path, wherever a reader would look for them."""
    named = {name for span in INLINE.findall(FENCE.sub("", text)) for name in NAMED.findall(span)}
    ends = {name: f"/{name}" if name.endswith("/") else f"/{name}\n" for name in named - IN_A_WHEEL}
    return {name for name, end in ends.items() if end not in all_files}


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_is_named_exists(document, all_files):
    assert unknown_files(document.read_text(), all_files) == set()


def test_a_file_that_is_gone_is_seen(all_files):
    text = "`csrc/gone.cuh` `gone.py` `csrc/gone/` `csrc/<op>/` `results/{gpu}/` `test_docs.py` `csrc/arch/` `/v1/x/`"
    assert unknown_files(text, all_files) == {"csrc/gone.cuh", "gone.py", "csrc/gone/"}


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


# Flags


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


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
IN_REMEDIES = {"--force-reinstall", "--no-deps", "--shm-size", "--ulimit", "--ipc", "--query-gpu", "--format"}


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
    known |= set(
        FLAG.findall(pinned.read("sglang/benchmark/serving.py").decode())
    )  # `bench throughput` hands over to it
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
    assert f"{drift['used_changed']} names that we use changed; {drift['report_lines']} lines" in text


def test_the_example_of_an_edit_is_one():
    block = re.search(r"^```toml\n(.*?)^```$", (ROOT / "docs" / "edits.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    (shown,) = tomllib.loads(block)["edit"]
    edits = [e for p in (ROOT / "python" / "edits").rglob("*.toml") for e in tomllib.loads(p.read_text())["edit"]]
    assert any(shown.items() <= edit.items() for edit in edits)


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
    upstreams = re.compile(r"sglang/srt/(entrypoints|managers|model_executor|mem_cache)/.*\.py$")
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
