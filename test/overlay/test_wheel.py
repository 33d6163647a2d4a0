# SPDX-License-Identifier: Apache-2.0
"""The fork's wheel: valid for others' tools, the same bytes twice, and with requirements that fit the machine."""

import csv
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from overlay import backend, pack, plan, upstream


def read_all(path: Path) -> dict[str, bytes]:
    """`wheel` checks every file against RECORD while it reads, and refuses files that RECORD does not name."""
    with WheelFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def contents(fork_wheel):
    return read_all(fork_wheel)


def test_the_name_is_a_valid_wheel_name(fork_wheel, pin):
    name, version, _, tags = parse_wheel_filename(fork_wheel.name)
    assert (name, str(version)) == ("sglang", f"{pin.version}+{pin.local}")
    assert "-".join(fork_wheel.name.removesuffix(".whl").split("-")[2:]) in pin.sha256


def test_other_packages_pins_of_upstream_still_hold(pin):
    assert Requirement(f"sglang=={pin.version}").specifier.contains(pin.fork_version)


def test_record_names_every_file_with_its_hash(contents, pin):
    info = f"sglang-{pin.fork_version}.dist-info"
    rows = list(csv.reader(contents[f"{info}/RECORD"].decode().splitlines()))
    assert {row[0] for row in rows} == set(contents)
    for name, digest, size in rows:
        expected = ("", "") if name.endswith("/RECORD") else pack.record_row(name, contents[name])[1:]
        assert (digest, size) == tuple(map(str, expected))


def test_a_damaged_file_does_not_pass_the_reader(small, tmp_path):
    """The reader that the tests above trust does refuse."""
    wheel = pack.build(small.root, small.pin(), small.wheel, small.plan(), tmp_path)
    damaged = tmp_path / "damaged" / wheel.name
    damaged.parent.mkdir()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + b" " * name.endswith("ours.py"))
    with pytest.raises(Exception, match="ours.py"):
        read_all(damaged)


def test_the_wheel_holds_upstream_plus_our_files(contents, pinned, fork_plan, pin):
    ours = fork_plan.files()
    for name in pinned.names:
        if name.startswith("sglang/"):
            assert contents[name] == ours.get(name, pinned.read(name)), name
    assert {name for name in contents if name.startswith("sglang/")} == {
        name for name in pinned.names | ours.keys() if name.startswith("sglang/")
    }
    kept = ("WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    for name in kept:
        assert contents[f"sglang-{pin.fork_version}.dist-info/{name}"] == pinned.read(f"{pinned.info}/{name}")


def test_changed_files_are_named_as_the_licence_asks(contents, fork_plan, pin):
    notice = contents[f"sglang-{pin.fork_version}.dist-info/{pack.CHANGES}"].decode()
    assert all(edit.module in notice for edit in fork_plan.edits)
    assert all(path in notice for path in fork_plan.own)


def test_the_wheel_holds_the_licence_and_our_notice(contents, metadata, fork, pin):
    folder = f"sglang-{pin.fork_version}.dist-info/licenses"
    assert {f"{folder}/{name}" for name in metadata.get_all("License-File")} <= contents.keys()
    assert contents[f"{folder}/NOTICE-kdtree"] == (fork / "NOTICE").read_bytes()
    assert b"Apache License" in contents[f"{folder}/LICENSE"]


def test_time_and_umask_do_not_reach_the_wheel(small, tmp_path, monkeypatch):
    one = pack.build(small.root, small.pin(), small.wheel, small.plan(), tmp_path / "one")
    source = small.root / "sglang/srt/ours.py"
    source.chmod(0o700)
    os.utime(source, (0, 0))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    two = pack.build(small.root, small.pin(), small.wheel, small.plan(), tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()


# Requirements


@pytest.fixture(scope="session")
def metadata(contents, pin):
    return Parser().parsestr(contents[f"sglang-{pin.fork_version}.dist-info/METADATA"].decode())


def required(metadata, extra: str, machine: str = "x86_64") -> set[str]:
    environment = {"extra": extra, "sys_platform": "linux", "platform_machine": machine}
    requirements = map(Requirement, metadata.get_all("Requires-Dist"))
    return {
        str(Requirement(str(r).partition(";")[0]))
        for r in requirements
        if not r.marker or r.marker.evaluate(environment)
    }


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_cuda_extra_is_upstreams_own_list(metadata, pinned, machine):
    upstreams = Parser().parsestr(pinned.read(f"{pinned.info}/METADATA").decode())
    assert required(upstreams, "", machine) <= required(metadata, "cuda", machine)


def test_the_base_needs_nothing_of_a_gpu(metadata):
    names = {Requirement(line).name.lower() for line in required(metadata, "cpu")}
    assert names == {Requirement(line).name.lower() for line in required(metadata, "")}
    assert {"torch", "torchvision", "transformers", "sgl-kernel-sm120"} <= names
    assert not [
        name for name in names if name.startswith(("nvidia", "cuda", "flashinfer", "sglang-kernel", "flash", "sgl-d"))
    ]
    assert len(names) < 45


def test_upstreams_extras_stay(metadata, pinned):
    upstreams = Parser().parsestr(pinned.read(f"{pinned.info}/METADATA").decode())
    assert set(metadata.get_all("Provides-Extra")) == {*upstreams.get_all("Provides-Extra"), "cpu", "cuda", "kit"}
    assert required(upstreams, "diffusion") - required(upstreams, "") <= required(metadata, "diffusion")


def test_the_rest_of_the_metadata_is_upstreams(metadata, pinned):
    upstreams = Parser().parsestr(pinned.read(f"{pinned.info}/METADATA").decode())
    assert metadata.get_payload() == upstreams.get_payload()
    assert metadata.get_all("License-File") == [*upstreams.get_all("License-File"), "NOTICE-kdtree"]
    rewritten = {"Version", "Requires-Dist", "Provides-Extra", "License-File"}
    assert [item for item in metadata.items() if item[0] not in rewritten] == [
        item for item in upstreams.items() if item[0] not in rewritten
    ]


def test_what_this_environment_has_installed_satisfies_the_base(metadata):
    for line in required(metadata, "cpu"):
        requirement = Requirement(line)
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True), line


# pip's view


def test_two_builds_are_identical_and_the_second_is_pips(fork, fork_wheel, pinned, tmp_path):
    environment = os.environ | {upstream.WHEELS_VARIABLE: str(pinned.path.parent)}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, fork]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert (tmp_path / fork_wheel.name).read_bytes() == fork_wheel.read_bytes()


def test_the_metadata_hook_says_what_the_wheel_says(fork, contents, tmp_path, monkeypatch, pinned):
    monkeypatch.setattr(backend, "FORK", fork)
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(pinned.path.parent))
    info = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    written = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in (tmp_path / info).rglob("*")
        if path.is_file()
    }
    assert written == {
        name: data for name, data in contents.items() if name.startswith(info) and not name.endswith("/RECORD")
    }


def test_the_sdist_builds_the_same_fork(fork, fork_plan, tmp_path, pinned, monkeypatch):
    monkeypatch.setattr(backend, "FORK", fork)
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / name.removesuffix(".tar.gz")
    assert plan.make_plan(root, pinned).files() == fork_plan.files()
    # A second one, from what was unpacked: at other times, beside no repository.
    assert {"PKG-INFO", "LICENSE", "NOTICE"} <= {path.name for path in root.iterdir()}
    monkeypatch.setattr(backend, "FORK", root)
    (tmp_path / "again").mkdir()
    assert (tmp_path / "again" / backend.build_sdist(str(tmp_path / "again"))).read_bytes() == (
        tmp_path / name
    ).read_bytes()


def test_caches_of_tools_are_no_files_of_ours(small):
    before = small.plan().own
    for name in ("srt/.ruff_cache/0.15.1/123", "srt/__pycache__/ours.cpython-311.pyc", ".hidden.py"):
        small.own(name, "")
    assert small.plan().own == before


def test_the_constraints_allow_either_build_of_torch():
    """Without PyTorch's CPU index pip finds the CUDA build alone, whose metadata names one Triton."""
    asked_by_the_cuda_build = {"2.13.0": "3.7.1"}
    lines = (plan.FORK / "constraints-cpu.txt").read_text().splitlines()
    given = {r.name: r.specifier for r in (Requirement(line) for line in lines if line and line[0] != "#")}
    (torch,) = [version for version in asked_by_the_cuda_build if version in given["torch"]]
    assert str(given["torch"]) == f"=={torch}" and asked_by_the_cuda_build[torch] in given["triton"]
