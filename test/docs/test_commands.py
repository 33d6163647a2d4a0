# SPDX-License-Identifier: Apache-2.0
"""Every command of every document is run: here, in another test, or once for a record.

    LITERAL   typed as it stands, in a shell in a copy of the repository; PUT says what stands for a reader's own paths.
              `mark`: only with a GPU, or with LONG=1
    PARSED    says what runs it instead: a test, or a recorded run. Here its program's own parser has to accept it
    neither   documented("docs/page.md", "beginning of the command") stands in some test, which runs what it gives

To record a run: test/docs/record.py.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from docs.documents import ROOT, command_lines, documented, documents, parts
from docs.shell import Shell

DATA = ROOT / "test" / "kit" / "data"
# What a reader has, and its place here.
PUT = {"/data/Kimi-K2.6-DFlash": "models/Kimi-K2.6-DFlash", "/data/Kimi-K2.6": "models/Kimi-K2.6"}


def no_setup(folder: Path) -> None:
    pass


def two_results(folder: Path) -> None:
    for name in ("one_rank.json", "later.json"):
        shutil.copy(folder / "benchmark/results/h200/one_rank.json", folder / name)


def a_site(folder: Path) -> None:
    """The environment that make made, with upstream's package in it."""
    (folder / f".venv/lib/python3.11/site-packages/sglang-{PINNED}.dist-info").mkdir(parents=True)


def no_environment(folder: Path) -> None:
    shutil.rmtree(folder / "../kdtree")


def a_repository(folder: Path) -> None:
    """What the rules of make list with `git ls-files`, and the one tool that they do not call by Python."""
    if not (folder / ".git").exists():
        subprocess.run(["git", "init", "--quiet", folder], check=True)
        subprocess.run(["git", "-C", folder, "add", "--all"], check=True)
        (folder / ".venv" / "bin" / "clang-format").symlink_to(Path(sys.executable).with_name("clang-format"))


def a_commit(folder: Path) -> None:
    """A release is of one."""
    a_repository(folder)
    who = ["-c", "user.name=A Reader", "-c", "user.email=reader@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(
        ["git", "-C", folder, *who, "commit", "--quiet", "--all", "--allow-empty", "-m", "As it is"], check=True
    )


class Run(NamedTuple):
    says: str = ""  # a part of what it prints
    cwd: str = "."  # where the text around it says that it is typed
    codes: tuple[int, ...] = (0,)
    setup: Callable[[Path], None] = no_setup
    makes: str = ""  # a file that is there afterwards
    mark: str = ""


class By(NamedTuple):
    """A test runs it, with smaller sizes perhaps."""

    test: str  # file::name in test/
    mark: str = ""  # that it has: it is not run by default


class Ran(NamedTuple):
    """It ran once, and this file has the line."""

    record: str = "docs/commands.json"


class Wrote(NamedTuple):
    """It ran once, on a machine that few have, and what it wrote is committed."""

    files: tuple[str, ...]


class Same(NamedTuple):
    """As a line of LITERAL."""

    line: str


class OfTests(NamedTuple):
    """It runs tests, which are found here and are part of `make test`, or with -m gpu of that on a GPU."""


class Cannot(NamedTuple):
    """Nobody here can run it."""

    why: str
    instead: str  # the record of what comes closest


def h200(*names: str, ranks: str = "") -> Wrote:
    return Wrote(tuple(f"benchmark/results/h200{ranks}/{name}.json" for name in names))


LITERAL = {
    # The operator's kit. 1 is a finding, of this machine.
    "python -m sglang.kdtree doctor": Run("kernel package", codes=(0, 1)),
    "python -m sglang.kdtree doctor --port 30000": Run("127.0.0.1:30000", codes=(0, 1)),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000 "
    # A wish that does not fit is a finding.
    "--mem-fraction-static 0.93": Run("190,495", codes=(1,)),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 184000": Run(
        "The wish fits"
    ),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 90000 "
    "--accounting layer-scaled --mem-fraction-static 0.85": Run("98,209"),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000 "
    "--observed 0.93:195011": Run("195,011", codes=(1,)),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000 "
    "--concurrency 2": Run("pool", codes=(1,)),
    "python -m sglang.kdtree schema probe-moe": Run('"$schema"'),
    "python -m sglang.launch_server --help": Run("--speculative-ddtree-budget"),
    "make release": Run(setup=a_commit, makes="dist/SHA256SUMS", mark="network"),
    "make lint": Run("codespell_lib", setup=a_repository),
    "make format": Run("delta --write", setup=a_repository),
    "python sgl-kernel-sm120/tools/resources.py check": Run("kernels", mark="long"),
    "python sgl-kernel-sm120/tools/resources.py update": Run(makes="sgl-kernel-sm120/RESOURCES.txt", mark="long"),
    # The overlay
    "make delta": Run("edits in"),
    "make pr": Run("patches/0001-"),
    "cd python && python -m overlay drift --to VERSION": Run("no work needed"),
    "python -m overlay check": Run("every anchor found", cwd="python"),
    "python -m overlay delta": Run("edits in", cwd="python"),
    "python -m overlay delta | head": Run("edits in", cwd="python"),
    "python -m overlay drift --to VERSION": Run("no work needed", cwd="python"),
    "python3.11 -m venv ../kdtree && . ../kdtree/bin/activate": Run(setup=no_environment, makes="../kdtree/bin/pip"),
    "python -m overlay link ../.venv/lib/python3.11/site-packages": Run(
        cwd="python", setup=a_site, makes="../.venv/lib/python3.11/site-packages/sglang/kdtree/cli.py"
    ),
    "python -m overlay pin --to VERSION": Run("cp311-cp311", cwd="python", mark="network"),
    "python -m overlay drift --to newest": Run(codes=(0, 1), cwd="python", mark="network"),
    "python -m overlay sign": Run("every edit was signed already", cwd="python"),
    # Benchmarks
    "python benchmark/report.py": Run(),
    "cd benchmark && python report.py": Run(),
    "python benchmark/merge_results.py one_rank.json later.json --out one_rank.json": Run(setup=two_results),
    "cd benchmark && python -m one_rank.plot results/h200/one_rank.json": Run(),
    "python benchmark/kernels/bench_mla_tree_verify.py --list": Run("triton_extend"),
    "python benchmark/kernels/bench_mla_tree_verify.py --arms ours flashinfer_100k --shapes context fp8": Run(
        "ours", mark="gpu"
    ),
    "python benchmark/kernels/bench_mla_tree_verify.py --shape bs=1,q=9,h=8,prefix=65536,kv=bf16,page=1": Run(
        "ours", mark="gpu"
    ),
    # Keys, packages and releases
    "pip show sglang": Run("+kdtree."),
    "head -c 32 /dev/urandom | base64 | tr -dc A-Za-z0-9 > api-key": Run(makes="api-key"),
    "chmod 400 api-key && chown 10001 api-key": Run(setup=lambda folder: (folder / "api-key").write_text("k" * 32)),
    "export MODEL_DIR=/data/Kimi-K2.6 DRAFT_DIR=/data/Kimi-K2.6-DFlash API_KEY_FILE=$PWD/api-key "
    "GRAFANA_PASSWORD=...": Run(),
    "export SGLANG_API_KEY=$(cat api-key)": Run(setup=lambda folder: (folder / "api-key").write_text("k" * 32)),
}
# Beginning of a line -> what runs it. Of several the longest counts. "@ folder" is where it is typed.
PARSED = {
    "make serve": Ran(),
    "make test": Ran(),
    "make test TESTS=test/overlay": OfTests(),
    "make PYTHON=python3.12 test": Ran(),
    "make release CUDA=1": Ran("docs/release-check.json"),
    "make check-release": Ran("docs/release-check.json"),
    "pip install": Ran(),
    "pip install ./sgl-kernel-sm120 './python[cuda,kit]'": Ran("docs/image-check.json"),
    "pip install ./sgl-kernel-sm120 './python[cpu,kit]'": Ran("docs/first-hour.json"),
    "pip install ./sgl-kernel-sm120 './python[cpu,kit]' -c": Ran(),
    "python -m pytest": OfTests(),
    "pytest": OfTests(),
    "python setup.py build_ext @ sgl-kernel-sm120": Ran(),
    "python -m overlay drift --to newest @ python": Same("python -m overlay drift --to newest"),
    "python -m overlay pin --to VERSION @ python": Same("python -m overlay pin --to VERSION"),
    "python -m sglang.kdtree bench longctx": By("kit/test_server.py::test_longctx_over_each_api_and_compare"),
    "python -m sglang.kdtree probe verify --url": By("kit/test_server.py::test_validate_mode_counts_a_sound_kernel"),
    "python -m sglang.kdtree probe gpu": By("kit/test_on_gpu.py::test_probe_gpu", "gpu"),
    "python -m sglang.kdtree probe gpu --watch": By(
        "kit/test_on_gpu.py::test_probe_gpu_watches_what_runs_anyway", "gpu"
    ),
    "python -m sglang.launch_server": By("e2e/test_small_model.py::test_this_server_is_the_one_of_the_documents"),
    "python -m kv_churn @ benchmark": By(
        "srt/mem_cache/test_churn_replay.py::test_ranks_replay_the_requests_between_them"
    ),
    "python -m kv_churn --mode @ benchmark": Ran("benchmark/results/cpu/churn.json"),
    "python benchmark/kernels/build_native.py": Ran(),
    "python benchmark/pack_gpu.py": Ran(),
    "python benchmark/kernels/bench_mla_tree_verify.py": h200("mla_tree_verify"),
    "python benchmark/kernels/bench_ddtree.py": h200("ddtree"),
    "python -m acceptance --engine @ benchmark": h200("acceptance"),
    "python benchmark/bench_kv_layout.py": h200("kv_layout"),
    "python benchmark/backend_e2e.py": h200("backend_e2e"),
    "python benchmark/backend_e2e.py --device cpu": By(
        "benchmark/test_backend_e2e.py::test_the_comparison_runs_end_to_end_on_a_cpu", "long"
    ),
    "cd benchmark && python -m one_rank": h200("one_rank"),
    "cd benchmark && python -m one_rank.tune_experts": h200("expert_tiles"),
    "cd benchmark && python -m one_rank --scale small": By(
        "benchmark/test_one_rank.py::test_the_benchmark_runs_end_to_end_on_a_small_model", "long"
    ),
    "cd benchmark && python -m two_ranks": h200("equal", "steps", "moe", ranks="x2"),
    "cd benchmark && python -m two_ranks --device cpu": By(
        "benchmark/test_two_ranks.py::test_two_ranks_run_end_to_end_on_a_cpu", "long"
    ),
    # Its steps, called with a stand-in for Python, are in test_run_gpu.py.
    "bash benchmark/run_gpu.sh": h200(
        "backend_e2e", "acceptance", "backend_churn", "one_rank", "mla_tree_verify", "ddtree", "kv_layout"
    ),
    "bash benchmark/run_gpu.sh backend e2e one_rank": h200("backend_e2e", "one_rank"),
    "bash benchmark/run_gpu.sh --site TREE backend e2e one_rank": h200("backend_e2e", "one_rank"),
    "bash benchmark/run_gpu.sh one_rank": h200("one_rank"),
    "bash benchmark/run_gpu.sh acceptance": h200("acceptance"),
    "bash benchmark/run_gpu.sh two_ranks": h200("equal", "steps", "moe", ranks="x2"),
    "bash benchmark/run_gpu.sh --bundle": h200("mla_tree_verify", "ddtree", "kv_layout"),
    "python -m training.corpus @ test/models": Ran(),
    "python -m training.train_all @ test/models": Wrote(("test/models/training/log.txt",)),
    "python -m training.make_expected_steps @ test/models": Wrote(("test/models/expected_steps.json",)),
    "python -m training.acceptance @ test/models": Wrote(("test/models/acceptance.json",)),
    "python -m training.check_server @ test/models": Wrote(("test/models/training/server_check.txt",)),
    "docker": Cannot("no machine of ours has an engine", "docs/image-check.json"),
}
# Names that a text calls something by; nobody can type them.
NAMES = {"python -m sglang.kdtree VERB", "python -m sglang.launch_server", "python3 FILE", "git am"}
STAND_INS = ("docker", "chown", "useradd", "systemctl", "compute-sanitizer")


def all_lines() -> dict[str, list[str]]:
    """Line -> the documents that have it."""
    found: dict[str, list[str]] = {}
    for document in documents():
        for line in command_lines(document):
            found.setdefault(line, []).append(document.relative_to(ROOT).as_posix())
    return found


def claimed() -> dict[str, str]:
    """Line -> the test that takes it from its document."""
    found = {}
    for path in sorted({*(ROOT / "test").rglob("test_*.py")} - {Path(__file__)}):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "documented(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "documented":
                document, beginning = (argument.value for argument in node.args)
                words = documented(document, beginning)
                lines = [line for line in command_lines(ROOT / document) if words in parts(line)]
                found |= dict.fromkeys(lines, path.relative_to(ROOT).as_posix())
    return found


def longest(line: str) -> str | None:
    """The entry of PARSED for a line."""
    line = re.sub(r"^([A-Z_0-9]+=\S+ )+", "", line)
    found = [key for key in PARSED if (line + " ").startswith(key.partition(" @ ")[0] + " ")]
    return max(found, key=len, default=None)


def is_a_name(line: str, lines: dict[str, list[str]]) -> bool:
    """Said in short of a line that is somewhere in full."""
    return line in NAMES or any(other.startswith(line + " ") for other in lines if other != line)


LINES, CLAIMED = all_lines(), claimed()
# Those that a test runs, too: it may be one that takes minutes and is left out by default.
TO_PARSE = [line for line in LINES if line not in {*LITERAL, *NAMES} and longest(line)]
MARKED = [pytest.param(line, marks=[getattr(pytest.mark, r.mark)] if r.mark else []) for line, r in LITERAL.items()]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("shell"), stand_ins=STAND_INS)
    for place, name in (("/data/Kimi-K2.6", "kimi_k2_6"), ("/data/Kimi-K2.6-DFlash", "kimi_k2_6_dflash")):
        folder = shell.folder / PUT[place]
        folder.mkdir(parents=True)
        shutil.copy(DATA / f"{name}.json", folder / "config.json")
    # What earlier lines of the same documents would have made.
    for made in ("../kdtree/bin/activate", "benchmark/bundle/COMMIT"):
        (shell.folder / made).parent.mkdir(parents=True)
        (shell.folder / made).touch()
    yield shell
    shell.close()


PINNED = tomllib.loads((ROOT / "python" / "UPSTREAM.toml").read_text())["version"]


def put(line: str, folder: Path) -> str:
    line = line.replace("--to VERSION", f"--to {PINNED}")
    for name, place in PUT.items():
        line = line.replace(name, str(folder / place))
    return line


def test_every_command_is_run_or_read():
    unknown = {
        line: where
        for line, where in LINES.items()
        if line not in LITERAL
        and line not in CLAIMED
        and longest(line) is None
        and not line.startswith(tuple(RELEASE))
        and not is_a_name(line, LINES)
    }
    assert unknown == {}, "list it in LITERAL or PARSED, or take it from the document where it is tested"


def test_no_entry_is_left_over():
    assert [line for line in (*LITERAL, *NAMES) if line not in LINES] == []
    assert set(PARSED) - {longest(line) for line in LINES} == set()
    recorded = {step["command"] for step in steps_of("docs/commands.json")}
    assert recorded - {line for line in LINES if isinstance(PARSED.get(longest(line)), Ran)} == set()


@pytest.mark.parametrize("line", [line for line in TO_PARSE if line not in CLAIMED])
def test_what_runs_a_line_is_there(line, shell):
    how = PARSED[longest(line)]
    match how:
        case By(test, mark):
            assert marks_of(test) & {"gpu", "long"} == ({mark} if mark else set()), test
        case Ran(record):
            assert any(is_of(step, line) for step in steps_of(record)), (
                f"{record} has no run of {line!r}: python test/docs/record.py --at CLONE {shlex.quote(line)}"
            )
        case Wrote(files):
            assert all((ROOT / name).stat().st_size for name in files)
        case Same(other):
            assert other in LITERAL
        case Cannot(why, instead):
            assert why and steps_of(instead)
        case OfTests():
            assert collected(line, shell) > 0
        case _:
            pytest.fail(
                f"say in PARSED what runs {line!r}, and how: {how!r} is none of By, Ran, Wrote, Same, Tests, Cannot"
            )


def collected(line: str, shell: Shell) -> int:
    """How many tests a line of pytest, or of make, would run."""
    if folders := re.findall(r"\bTESTS=(\S+)", line):
        line = f"pytest {folders[0]}"
    done = shell.run(f"{line} --collect-only --quiet")
    counts = re.findall(r"^(\d+)(?:/\d+)? tests? collected", done.output, re.M)
    assert done.returncode == 0 and counts, done
    return int(counts[-1])


def marks_of(test: str) -> set[str]:
    """Names of the marks of a test, file::name, its file's included; AssertionError if there is no such test."""
    name, _, function = test.partition("::")
    tree = ast.parse((ROOT / "test" / name).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    assert len(found) == 1, f"{test}: {len(found)} such tests"
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    marks = [node for where in (*found[0].decorator_list, *of_file) for node in ast.walk(where)]
    return {node.attr for node in marks if isinstance(node, ast.Attribute)}


def steps_of(record: str) -> list[dict]:
    """What a record says that was run: its steps, or the one command of a result."""
    content = json.loads((ROOT / record).read_text())
    steps = content.get("steps") or [content]
    assert all(step.get("exit", 0) == 0 for step in steps), record
    return steps


def is_of(step: dict, line: str) -> bool:
    """A step of docs/commands.json has the line itself; other records say where programs lie, and set a variable."""

    def words(text):
        return [[Path(program).name, *rest] for program, *rest in parts(text)]

    return step.get("command") == line or "in" not in step and words(step.get("command", "")) == words(line)


@pytest.mark.parametrize("line", MARKED)
def test_a_command_as_it_stands(line, shell):
    run = LITERAL[line]
    run.setup(shell.folder)
    done = shell.run(
        put(line, shell.folder),
        cwd=run.cwd,
    )
    assert done.returncode in run.codes and run.says in done.output, done
    assert (shell.folder / run.cwd / run.makes).exists(), done


@pytest.mark.parametrize("line", TO_PARSE)
def test_a_command_is_accepted_by_its_parser(line, shell):
    _, _, cwd = longest(line).partition(" @ ")
    done = shell.run(put(line, shell.folder), cwd=cwd or ".", parse_only=True)
    assert done.returncode == 0, done
    for words in parts(line):
        if words[0] == "pip" and "install" in words:
            assert local_projects(words) <= known_projects(), words
        if words[0] == "docker":
            assert docker_accepts(words, shell), words


def local_projects(words: list[str]) -> set[tuple[str, str]]:
    """(folder, extra) of each project that pip is given by its path."""
    found = set()
    for word in words:
        if match := re.fullmatch(r"(\./[\w/-]+)(?:\[([\w,]+)\])?", word):
            found |= {(match[1], extra) for extra in (match[2] or "").split(",")}
    return found


def known_projects() -> set[tuple[str, str]]:
    extras = tomllib.loads((ROOT / "python" / "REQUIREMENTS.toml").read_text())["extras"]
    return {("./sgl-kernel-sm120", ""), *(("./python", extra) for extra in ["", "cuda", *extras])}


# What we say to docker and its compose plugin, which few machines have.
DOCKER = {"build": {"-f", "-t"}, "compose": {"-f", "-d"}}


def docker_accepts(words: list[str], shell: Shell) -> bool:
    """Flags, files, what is built from, and the services by the names that the compose file has."""
    flags = {word for word in words[2:] if word.startswith("-")}
    values = {word: words[i + 1] for i, word in enumerate(words) if word in ("-f", "-t")}
    rest = [word for word in words[2:] if word not in flags and word not in values.values()]
    if not flags <= DOCKER[words[1]] or not (shell.folder / values["-f"]).is_file():
        return False
    if words[1] == "build":
        return len(rest) == 1 and (shell.folder / rest[0]).is_dir()
    services = yaml.safe_load((shell.folder / values["-f"]).read_text())["services"]
    return rest[0] in ("up", "down", "logs", "ps") and set(rest[1:]) <= set(services)


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml"])
def test_the_heads_of_the_docker_files(name, shell):
    text = re.sub(r"\\\n#", " ", (ROOT / "docker" / name).read_text())
    lines = re.findall(r"^# .*?(docker (?:build|compose) -f [^(\n]+)", text, re.MULTILINE)
    assert lines and all(docker_accepts(line.split(), shell) for line in lines), lines


def test_wrong_commands_are_refused(shell):
    """Each kind of program reads its arguments for real, and does nothing."""
    for line in (
        "python -m sglang.launch_server --model-path x --no-such",
        "python -m sglang.launch_server --model-path x --attention-backend kdtree_sm1200",
        "python -m sglang.kdtree probe gpu --no-such",
        "python -m pytest test/kernels --no-such",
        "python -m pytest test/no-such",
        "pip install --no-such ./sgl-kernel-sm120",
        "bash benchmark/run_gpu.sh one_rank -- --no-such",
        "cd sgl-kernel-sm120 && python setup.py build_ext --no-such",
        "python benchmark/no-such.py",
        "make no-such",
    ):
        done = shell.run(line, parse_only=True)
        assert done.returncode != 0, done
    assert not local_projects(["pip", "install", "./gone", "./python[cpu]"]) <= known_projects()
    for line in (
        "docker build -f docker/gone .", "docker build -f docker/Dockerfile gone", "docker build -f docker/Dockerfile",
        "docker compose -f docker/compose.yaml up -d gone", "docker compose -f docker/compose.yaml start server",
    ):  # fmt: skip
        assert not docker_accepts(line.split(), shell), line
    assert docker_accepts("docker compose -f docker/compose.yaml up -d server".split(), shell)
    assert not (shell.folder / "benchmark" / "build").exists()


def test_lines_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n    cd benchmark\n    python report.py  # fills\n\nSay `make test LONG=1`, `A=1 pip x`, `make`.\n\n"
        "```\nA=1 make nothing  # a comment\ncd x && foo --bar | head -2\n    indented \\\n  --port 1\n```\n"
        "```bash\n$ python -m overlay drift\nits output --here\n    curl -s URL\n    ...\n```\n"
        "```python\nno command\n```\n"
    )
    assert command_lines(page) == [
        "A=1 make nothing",
        "cd x && foo --bar | head -2",
        "indented  --port 1",
        "python -m overlay drift",
        "curl -s URL",
        "cd benchmark && python report.py",
        "make test LONG=1",
        "A=1 pip x",
    ]
    assert parts("A=1 cd x && foo 'a b' --bar | head -2 > out") == [
        ["cd", "x"],
        ["foo", "a b", "--bar"],
        ["head", "-2"],
    ]
    for beginning, count in (("no such command", 0), ("pip install", 2)):
        with pytest.raises(ValueError, match=f"{count} commands"):
            documented("README.md", beginning)


# Python


PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_PYTHON = [path.relative_to(ROOT).as_posix() for path in documents() if PYTHON.search(path.read_text())]


@pytest.mark.parametrize("document", WITH_PYTHON)
def test_python_in_a_document_runs(document, shell):
    blocks = PYTHON.findall((ROOT / document).read_text())
    for number, block in enumerate(blocks):
        script = shell.folder / f"block_{number}.py"
        script.write_text(re.sub(r"^>>> ", "", block, flags=re.MULTILINE))
        done = shell.run(f"python {script.name}", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done


# Two procedures, each in its order


def test_a_release_is_signed_as_the_procedure_says(shell, tmp_path):
    """With keys that live as long as this test, and a repository of its own to push to."""
    for tool in ("ssh-keygen", "gpg"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    (shell.folder / "dist").mkdir(exist_ok=True)
    (shell.folder / "dist" / "a.whl").write_text("a wheel")
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    home = {"GNUPGHOME": str(keys), "HOME": str(keys)}
    prepared = shell.run(
        f"""
        ssh-keygen -q -t ed25519 -N '' -f {keys}/ssh
        echo "reader@example.org $(cat {keys}/ssh.pub)" > {keys}/allowed
        git init --quiet && git init --quiet --bare {tmp_path}/origin.git
        git config user.name reader && git config user.email reader@example.org
        git config gpg.format ssh && git config user.signingkey {keys}/ssh.pub
        git config gpg.ssh.allowedSignersFile {keys}/allowed
        git remote add origin {tmp_path}/origin.git
        git commit --quiet --allow-empty --message all
        gpg --batch --quiet --passphrase '' --quick-generate-key reader@example.org
        cd dist && sha256sum a.whl > SHA256SUMS
        """,
        **home,
    )
    assert prepared.returncode == 0, prepared
    for beginning, cwd in RELEASE.items():
        (line,) = [line for line in LINES if line.startswith(beginning)]
        done = shell.run(line, cwd=cwd, **home)
        assert done.returncode == 0, done
    shell.run("gpgconf --kill all", **home)
    tags = shell.run(f"git -C {tmp_path}/origin.git tag").output
    assert re.fullmatch(r"v[\d.]+\+kdtree\.\d+\n", tags)


RELEASE = {
    "git tag --sign": ".",
    "git tag --verify": ".",
    "git push origin": ".",
    "gpg --armor --detach-sign": ".",
    "gpg --verify": "dist",
    "sha256sum --check": "dist",
}


def test_the_head_of_the_systemd_unit(shell, tmp_path):
    """Its lines install what its ExecStart names, on a machine whose root folder is this test's."""
    unit = (ROOT / "docker" / "sglang-kdtree.service").read_text()
    lines = re.findall(r"^#   (\S.*)$", unit, re.MULTILINE)
    assert len(lines) > 5
    (shell.folder / "api-key").write_text("k" * 32)
    (tmp_path / "data").mkdir()
    for line in lines:
        here = re.sub(r"(?<=[ =])/(?=opt|etc|models|data|var)", f"{tmp_path}/", line)
        here = here.replace(f"{tmp_path}/opt/kdtree/bin/pip", "pip")
        done = shell.run(here, parse_only=True)
        assert done.returncode == 0, done
    assert (tmp_path / "etc/systemd/system/sglang-kdtree.service").read_text() == unit
    for place in re.findall(r"(?:ExecStart|KDTREE_RECIPE|LoadCredential)=(?:api-key:)?(/\S+)", unit):
        assert (tmp_path / place.lstrip("/")).is_file(), place
    recipe = (tmp_path / "etc/kdtree/recipe.yaml").read_text()
    for place in re.findall(r"^(?:speculative-draft-)?model-path: (/\S+)$", recipe, re.MULTILINE):
        assert (tmp_path / place.lstrip("/")).is_symlink(), place
