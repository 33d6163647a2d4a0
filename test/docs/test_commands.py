# SPDX-License-Identifier: Apache-2.0
"""Every command of every document runs here, or in a test that takes its words from the document, or at least reaches
the program's own parser, which accepts it.

    LITERAL    typed as it stands, in a shell in a copy of the repository; PUT says what stands for a reader's own paths
    PARSED     needs a GPU, a second machine, a network, minutes or the maintainers' keys: its parser reads it
    otherwise  documented("docs/page.md", "beginning of the command") stands in some test, which runs what it gives
"""

import ast
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
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


class Run(NamedTuple):
    says: str = ""  # a part of what it prints
    cwd: str = "."  # where the text around it says that it is typed
    codes: tuple[int, ...] = (0,)
    setup: Callable[[Path], None] = no_setup
    makes: str = ""  # a file that is there afterwards


LITERAL = {
    # The operator's kit. 1 is a finding, of this machine.
    "python -m sglang.kdtree doctor": Run("kernel package", codes=(0, 1)),
    "python -m sglang.kdtree doctor --port 30000": Run("127.0.0.1:30000", codes=(0, 1)),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000 "
    # A wish that does not fit is a finding.
    "--mem-fraction-static 0.93": Run("190,495", codes=(1,)),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000": Run(
        "--mem-fraction-static"
    ),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000 "
    "--observed 0.93:195011": Run("195,011"),
    "python -m sglang.kdtree plan --model /data/Kimi-K2.6 --draft /data/Kimi-K2.6-DFlash --context 200000 "
    "--concurrency 2": Run("pool", codes=(1,)),
    "python -m sglang.kdtree schema probe-moe": Run('"$schema"'),
    "python -m sglang.launch_server --help": Run("--speculative-ddtree-budget"),
    # The overlay
    "make delta": Run("edits in"),
    "make pr": Run("patches/0001-"),
    "cd python && python -m overlay drift --to VERSION": Run("no work needed"),
    "python -m overlay sign": Run("every edit was signed already", cwd="python"),
    # Benchmarks
    "python benchmark/report.py": Run(),
    "python benchmark/merge_results.py one_rank.json later.json --out one_rank.json": Run(setup=two_results),
    "cd benchmark && python -m one_rank.plot results/h200/one_rank.json": Run(),
    "python benchmark/kernels/bench_mla_tree_verify.py --list": Run("triton_extend"),
    # Keys and releases
    "head -c 32 /dev/urandom | base64 | tr -dc A-Za-z0-9 > api-key": Run(makes="api-key"),
    "chmod 400 api-key && chown 10001 api-key": Run(setup=lambda folder: (folder / "api-key").write_text("k" * 32)),
    "export MODEL_DIR=/data/Kimi-K2.6 DRAFT_DIR=/data/Kimi-K2.6-DFlash API_KEY_FILE=$PWD/api-key "
    "GRAFANA_PASSWORD=...": Run(),
    "export SGLANG_API_KEY=$(cat api-key)": Run(setup=lambda folder: (folder / "api-key").write_text("k" * 32)),
}
# Beginning of a line -> why its program only reads it. Of several the longest counts. "@ folder" is where it is typed.
PARSED = {
    "make": "its rules are printed; `make test` is what runs this",
    "make test LONG=1": "takes minutes",
    "pip": "needs an index; test_environment.py holds what make installs against the README",
    "pip install ./sgl-kernel-sm120": "takes minutes; test_build.py makes its wheel by pip",
    "python3.11 -m venv": "what make does in test_environment.py",
    "python -m pytest": "these are tests",
    "pytest": "these are tests",
    "python sgl-kernel-sm120/tools/resources.py check": "takes minutes; a gate of make test",
    "python setup.py build_ext @ sgl-kernel-sm120": "takes minutes; test_build.py builds",
    "python -m overlay check @ python": "a gate of make test",
    "python -m overlay delta @ python": "make delta is run",
    "python -m overlay drift --to newest @ python": "needs an index; test_drift.py",
    "python -m overlay drift --to VERSION @ python": "run as the README has it",
    "python -m overlay link @ python": "needs an environment of its own; test_tree.py, and make itself",
    "python -m overlay pin @ python": "needs an index; test_drift.py",
    "python -m sglang.kdtree bench longctx": "a server; test_server.py runs it with smaller lengths",
    "python -m kv_churn @ benchmark": "takes minutes; test_churn_replay.py",
    "python -m sglang.kdtree probe verify --url": "a server; test_server.py runs it as docs/kit.md has it",
    "python -m sglang.kdtree probe gpu": "needs a GPU; test_gpu.py with a false one, test_on_gpu.py",
    "python -m sglang.launch_server": "a server; test_small_model.py starts it with these flags",
    "python benchmark/kernels/build_native.py": "needs nvcc",
    "python benchmark/pack_gpu.py": "needs nvcc; test_pack.py",
    "python benchmark/kernels/bench_mla_tree_verify.py": "needs a GPU for its shapes; test_bench_cli.py",
    "python benchmark/kernels/bench_ddtree.py": "needs a GPU",
    "python -m acceptance --engine @ benchmark": "needs a GPU",
    "python benchmark/bench_kv_layout.py": "needs a GPU; test_kv_layout.py",
    "python benchmark/backend_e2e.py": "takes minutes; test_backend_e2e.py with LONG=1",
    "cd benchmark && python report.py": "run from the repository's folder",
    "cd benchmark && python -m one_rank": "takes minutes; test_one_rank.py with LONG=1",
    "cd benchmark && python -m two_ranks": "takes minutes; test_two_ranks.py with LONG=1",
    "bash benchmark/run_gpu.sh": "needs a GPU; here each of its steps reaches its parser",
    "python -m training.corpus @ test/models": "takes a minute, and needs the machine whose texts it names",
    "python -m training.train_all @ test/models": "needs a GPU",
    "python -m training.make_expected_steps @ test/models": "takes minutes; test_offline_walk.py walks some",
    "python -m training.acceptance @ test/models": "takes minutes; test_offline_walk.py holds its numbers",
    "python -m training.check_server @ test/models": "takes minutes; test_check_server.py",
    "docker": "needs an engine; docker/check.py runs what the image runs",
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


@pytest.mark.parametrize("line", LITERAL)
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
    flags = {word for word in words[2:] if word.startswith("-")}
    files = [words[i + 1] for i, word in enumerate(words) if word == "-f"]
    return flags <= DOCKER[words[1]] and all((shell.folder / name).is_file() for name in files)


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
    assert not docker_accepts(["docker", "build", "-f", "docker/gone", "."], shell)
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
