# SPDX-License-Identifier: Apache-2.0
"""Releases: the same bytes twice, of a described commit, with licences inside; and a check that notices."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from repository import commit_all, git

from overlay import __main__ as cli
from overlay import release, upstream
from overlay.errors import Refused
from overlay.plan import FORK

ROOT = FORK.parent


@pytest.fixture
def repository(small, monkeypatch, tmp_path):
    """The small fork and the real kernel package as a repository of their own, committed."""
    root = small.root.parent
    (root / ".gitignore").write_text("/wheels\n/out*\n__pycache__\n")
    (root / release.CHANGELOG).write_text(
        "# Changelog\n\n## 1.0+kdtree.1 (unreleased)\n\nWith `sgl-kernel-sm120` "
        + release.kernel_version(ROOT)
        + ".\n\n## 0.9+kdtree.3\n"
    )
    for name in git(ROOT, "ls-files", release.KERNELS).splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    commit_all(root)
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(small.wheels))
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's way to say: without isolation
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    return small


def build(small, out: Path, **options) -> list[Path]:
    return release.build(small.root, small.pin(), out, small.pin().sha256, cuda=False, **options)


def test_two_builds_are_the_same_bytes(repository):
    root = repository.root.parent
    one = build(repository, root / "out1")
    for path in (root / release.KERNELS).rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (0, 0))
    (root / release.KERNELS / "build").mkdir()
    (root / release.KERNELS / "build" / "left_behind.py").write_text("")
    two = build(repository, root / "out2")
    assert [path.name for path in one] == [path.name for path in two] and len(one) == 3
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    wheels = release.check_sums(root / "out1")
    assert sorted(wheel.name.partition("-")[0] for wheel in wheels) == ["sgl_kernel_sm120", "sglang"]
    kernels = zipfile.ZipFile(next(wheel for wheel in wheels if wheel.name.startswith("sgl_kernel")))
    for name in ("LICENSE", "NOTICE"):
        (inside,) = [entry for entry in kernels.namelist() if entry.endswith(f"licenses/{name}")]
        assert kernels.read(inside) == (ROOT / name).read_bytes()


def test_what_writes_its_version_into_a_wheel_is_pinned(repository, monkeypatch):
    given, run = [], release.run

    def recorded(command, **options):
        if "wheel" in command:
            names = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
            given.extend(Path(options["env"][name]).read_text() for name in names)
        return run(command, **options)

    monkeypatch.setattr(release, "run", recorded)
    wheel = release.build_kernels(repository.root.parent, repository.root.parent, cuda=False)
    assert given == [f"{release.BUILD_TOOL}\n"] * 2
    (written,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/WHEEL")]
    assert b"Generator: setuptools (" in zipfile.ZipFile(wheel).read(written)


def test_what_is_not_committed_is_not_released(repository):
    (repository.root / "sglang/srt/ours.py").write_text("VALUE = 2\n")
    with pytest.raises(Refused, match="(?s)differ from it.*srt/ours.py"):
        build(repository, repository.root.parent / "out")
    assert not (repository.root.parent / "out").exists()


def test_a_tag_of_another_version_is_not_released(repository):
    root = repository.root.parent
    subprocess.run(["git", "-C", root, "tag", "v1.0+kdtree.9"], check=True)
    with pytest.raises(Refused, match=r"tagged v1\.0\+kdtree\.9, python/UPSTREAM\.toml says 1\.0\+kdtree\.1"):
        build(repository, root.parent / "out")
    subprocess.run(["git", "-C", root, "tag", "v1.0+kdtree.1"], check=True)
    build(repository, root.parent / "out")


@pytest.mark.parametrize(
    "text, message",
    [
        ("# Changelog\n", "newest section is none"),
        ("## 0.9+kdtree.3\n", "newest section is 0.9.kdtree.3, the version is 1.0.kdtree.1"),
        ("## 1.0+kdtree.1\n\nNothing.\n", "does not name `sgl-kernel-sm120`"),
    ],
)
def test_a_version_that_nobody_described_is_not_released(repository, text, message):
    (repository.root.parent / release.CHANGELOG).write_text(text)
    with pytest.raises(Refused, match=message):
        build(repository, repository.root.parent / "out")


def test_this_version_is_described_and_its_copies_of_the_notices_are_the_same(pin):
    release.check_changelog(ROOT, pin)
    for name, copies in (("NOTICE", ["python", release.KERNELS]), ("LICENSE", [release.KERNELS])):
        for folder in copies:
            assert (ROOT / folder / name).read_bytes() == (ROOT / name).read_bytes()


def test_a_changed_or_missing_wheel_is_noticed(tmp_path):
    def sums(**files):
        return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}.whl\n" for name, data in files.items())

    (tmp_path / release.SUMS).write_text(sums(a=b"a", b=b"b", c=b"c"))
    for name, data in (("a", b"a"), ("b", b"other"), ("d", b"d")):
        (tmp_path / f"{name}.whl").write_bytes(data)
    with pytest.raises(Refused) as refusal:
        release.check_sums(tmp_path)
    assert refusal.value.reasons == [
        "b.whl is not what SHA256SUMS says",
        "c.whl is missing",
        "d.whl is not in SHA256SUMS",
    ]


def test_the_check_wants_an_environment_of_its_own(small, tmp_path, monkeypatch):
    (tmp_path / "env").mkdir()
    names = [f"sglang-1.0-{tag}" for tag in ("cp310-x-linux", f"{upstream_tag()}")] + [
        "sgl_kernel_sm120-1-py3-none-any"
    ]
    monkeypatch.setattr(release, "check_sums", lambda folder: [folder / f"{name}.whl" for name in names])
    with pytest.raises(Refused, match="an environment that nothing was installed into"):
        release.check(small.root, small.pin(), tmp_path, tmp_path / "env", print)
    monkeypatch.setattr(release, "check_sums", lambda folder: [folder / f"{name}.whl" for name in names[:1]])
    with pytest.raises(Refused, match="the release has 0 wheels"):
        release.check(small.root, small.pin(), tmp_path, tmp_path / "env", print)


def upstream_tag() -> str:
    import sys

    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{version}-{version}-manylinux_2_34_{os.uname().machine}"


@pytest.fixture
def server():
    """A server that gives every prompt the same answer; -> (port, the answer to change)"""
    entries = json.loads((ROOT / "test/models/expected_steps.json").read_text())["entries"]
    answer = {"output_ids": None, "spec_verify_ct": 5}
    by_prompt = {entry["prompt"]: entry["tokens"][: release.NUM_TOKENS] for entry in entries}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = answer["output_ids"] or by_prompt[body["text"]]
            reply = {"output_ids": tokens, "meta_info": {"spec_verify_ct": answer["spec_verify_ct"]}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_):
            pass

    service = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=service.serve_forever, daemon=True).start()
    yield service.server_port, answer
    service.shutdown()
    service.server_close()


def test_the_answers_are_compared(server):
    port, answer = server
    release.compare_answers(port, ROOT)
    answer["spec_verify_ct"] = release.NUM_TOKENS
    with pytest.raises(Refused, match="nothing was drafted"):
        release.compare_answers(port, ROOT)
    answer |= {"spec_verify_ct": 5, "output_ids": [1, 2]}
    with pytest.raises(Refused, match=r"tokens are \[1, 2\], recorded are"):
        release.compare_answers(port, ROOT)


def test_the_command_builds_every_tag_unless_told(repository, monkeypatch, capsys):
    root = repository.root.parent
    monkeypatch.setattr(cli, "FORK", repository.root)
    monkeypatch.setattr(cli, "load_pin", lambda fork: repository.pin())
    monkeypatch.setattr("sys.argv", ["overlay", "release", "--out", str(root / "out")])
    assert cli.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(root / "out" / release.SUMS)
    monkeypatch.setattr("sys.argv", ["overlay", "release", "--out", str(root / "out2"), "--tag", "cp39-cp39-none"])
    assert cli.main() == 2 and not list((root / "out2").glob("*.whl"))


def test_the_bill_of_materials_says_nothing_of_the_machine(tmp_path, monkeypatch):
    """The tool writes down where a local wheel was installed from."""
    folder = tmp_path / "dist with space"
    folder.mkdir()
    target, said = folder / "a.cdx.json", []

    def run(command, **_):
        if "cyclonedx_py" in command:
            assert command[-1] == "python" and "--output-reproducible" in command
            target.write_text("".join(said))

    monkeypatch.setattr(release, "run", run)
    said[:] = [f'{{"url": "{folder.as_uri()}/sglang.whl"}}']
    assert release.write_sbom(Path("python"), target, tmp_path / "env").read_text() == '{"url": "sglang.whl"}'
    said[:] = [f'{{"path": "{tmp_path}/env/lib"}}']
    with pytest.raises(Refused, match="a.cdx.json names .*/env: it would say something of this machine"):
        release.write_sbom(Path("python"), target, tmp_path / "env")


def test_metadata_that_the_index_would_not_take_is_noticed(tmp_path, monkeypatch):
    """The tool reads every wheel, those for other machines too; its verdict is ours."""
    commands = []

    def run(command, **_):
        commands.append(command)
        if "twine" in command:
            raise Refused("a.whl: long_description has syntax errors")

    monkeypatch.setattr(release, "run", run)
    with pytest.raises(Refused, match="syntax errors"):
        release.check_metadata([tmp_path / "a.whl", tmp_path / "b.whl"])
    assert commands[-1][1:] == ["-m", "twine", "check", "--strict", str(tmp_path / "a.whl"), str(tmp_path / "b.whl")]
    assert release.METADATA_TOOL in commands[-2] and not Path(commands[-1][0]).exists()


def test_the_check_takes_a_relative_folder(small, tmp_path, monkeypatch):
    """The server is started in another folder than the check."""
    names, given = [f"sglang-1.0-{upstream_tag()}", "sgl_kernel_sm120-1-py3-none-any"], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(release, "check_sums", lambda folder: [folder / f"{name}.whl" for name in names])
    monkeypatch.setattr(release, "run", lambda command, **_: None)
    monkeypatch.setattr(release, "compare_answers", lambda port, root: None)
    monkeypatch.setattr(release, "write_sbom", lambda python, target, environment: given.append(python) or target)

    @contextlib.contextmanager
    def serving(python, root):
        given.append(python)
        yield 1

    monkeypatch.setattr(release, "serving", serving)
    bill = release.check(small.root, small.pin(), Path("dist"), Path("dist/env"), print)
    assert bill.name == f"sglang-1.0+kdtree.1-cpu-{upstream_tag().partition('-')[0]}.cdx.json"
    assert given == [tmp_path / "dist" / "env" / "bin" / "python"] * 2


def test_the_release_that_was_tried_is_told_as_it_was(pin):
    record = json.loads((ROOT / "docs" / "release-check.json").read_text())
    text = (ROOT / "docs" / "release.md").read_text()
    for step in record["steps"]:
        cell = step.get("python") or f"{step['checkout']}, {step['compilers']} at a time"
        assert f"| `{step['command']}` | {cell} | {step['seconds']} |" in text, step
        assert step["exit"] == 0
    built = {
        name.removesuffix(".whl").split("-", 2)[2] for name in record["sums_of_both"] if name.startswith("sglang-")
    }
    assert built == set(pin.sha256) and len(record["sums_of_both"]) == len(built) + 2
