# SPDX-License-Identifier: Apache-2.0
"""What no test can take from this machine: its kernel, its C library and its disk. See also test_environment.py."""

import errno
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import environment  # noqa: E402
import installer  # noqa: E402
import preflight  # noqa: E402


def asked(**changes) -> list[str]:
    return preflight.complaints("cpu", **{"tests": True, "new": True, "place": ROOT / ".venv", **changes})


@pytest.fixture
def roomy(monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda place: 10**12)


def test_this_machine_has_all(roomy):
    assert asked() == []


def test_the_versions_are_those_of_the_pinned_wheels():
    assert preflight.supported() == [(3, 11), (3, 12), (3, 13)]


def test_the_lists_come_from_the_pin(roomy, monkeypatch, tmp_path):
    pin = tmp_path / "UPSTREAM.toml"
    pin.write_text('[sha256]\ncp399-cp399-manylinux_9_99_riscv64 = "0"\n')
    monkeypatch.setattr(preflight, "PIN", pin)
    version, machine, glibc = asked()
    assert "CPython 3.99 only" in version and "riscv64 only" in machine and "need 9.99 or newer" in glibc


def test_another_system_is_refused(roomy, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    (complaint,) = asked()
    assert "wheels are for Linux" in complaint


def test_another_interpreter_is_refused(roomy, monkeypatch):
    monkeypatch.setattr(sys.implementation, "name", "pypy")
    (complaint,) = asked()
    assert "CPython 3.11, 3.12 or 3.13 only" in complaint


@pytest.mark.parametrize("answer, have", [("glibc 2.31", "glibc 2.31"), ("", "no glibc"), (None, "no glibc")])
def test_an_old_or_another_c_library_is_refused(roomy, monkeypatch, answer, have):
    def confstr(name):
        if answer is None:
            raise ValueError("unrecognized configuration name")
        return answer

    monkeypatch.setattr(preflight.os, "confstr", confstr)
    (complaint,) = asked()
    assert f"this system has {have}" in complaint and "need 2.34 or newer" in complaint


def test_room_is_asked_for_only_when_the_environment_is_made(monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda place: 0.4e9)
    environment, scratch = asked()
    assert "0.4 GB are free for" in environment and "make room" in environment
    assert "TMPDIR=" in scratch
    assert asked(new=False) == []


def test_room_is_that_of_the_disk(tmp_path):
    assert preflight.free_bytes(tmp_path / "not" / "yet") > 0
    assert preflight.disk(tmp_path / "not" / "yet", needed=1) is None
    assert preflight.disk(tmp_path / "not" / "yet", needed=1e18)


def test_a_silent_pip_shows_that_it_lives(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(installer, "QUIET_S", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(0.7); print('Collecting x')"]
    started = time.monotonic()
    with (tmp_path / "lock").open("w") as lock:
        installer.run(command, log=tmp_path / "log", environment={}, lock=lock.fileno())
    shown = capsys.readouterr().out
    assert time.monotonic() - started > 0.6 and "... 0 s" in shown and "Collecting x" in shown


@pytest.mark.parametrize("number, word", [(9, "SIGKILL (out of memory?)"), (15, "SIGTERM;")])
def test_a_pip_that_is_killed_is_reported(tmp_path, number, word):
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"]
    with (tmp_path / "lock").open("w") as lock, pytest.raises(installer.Failed) as failure:
        installer.run(command, log=tmp_path / "log", environment={}, lock=lock.fileno())
    assert f"pip was ended by {word}" in str(failure.value) and not failure.value.began


def test_a_file_system_without_locks_is_no_hindrance(monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(environment.fcntl, "flock", flock)
    with environment.only_one() as handle:
        assert handle >= 0
