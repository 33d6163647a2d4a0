# SPDX-License-Identifier: Apache-2.0
"""Set-up does what changed, once, and shows what it does."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """scripts/environment.py, working on a checkout of a few files; what it asks of pip is written down."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fork, kernels = tmp_path / "python", tmp_path / "sgl-kernel-sm120"
    names = ("UPSTREAM.toml", "REQUIREMENTS.toml", "constraints-cpu.txt", "pyproject.toml")
    files = [*names, "overlay/plan.py", "edits/a.py.toml", "sglang/ours.py"]
    for path in [*(fork / name for name in files), kernels / "setup.py", tmp_path / "test/requirements.txt"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    values = {"ROOT": tmp_path, "VENV": tmp_path / ".venv", "PYTHON": tmp_path / ".venv/bin/python", "FORK": fork}
    values |= {"STAMPS": tmp_path / ".venv/stamps", "KERNELS": kernels, "TESTS": tmp_path / "test/requirements.txt"}
    values |= {"REQUIREMENTS": [fork / name for name in names]}
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)
    module.done = []
    monkeypatch.setattr(module, "pip", lambda *arguments, **_: module.done.append(" ".join(map(str, arguments))))
    monkeypatch.setattr(module, "link", lambda: module.done.append("link"))
    return module


def run(module, monkeypatch, *arguments) -> list[str]:
    module.done.clear()
    monkeypatch.setattr(sys, "argv", ["environment.py", "--set", "cpu", *arguments])
    assert module.main() == 0
    return [line.split()[0] if line == "link" else line for line in module.done]


def test_the_second_start_does_nothing(environment, monkeypatch):
    first = run(environment, monkeypatch, "--tests")
    assert len(first) == 3 and first[0].startswith("install") and first[1] == "link" and "requirements.txt" in first[2]
    assert "python[cpu,kit] -c" in first[0] and first[0].endswith("constraints-cpu.txt")
    assert run(environment, monkeypatch, "--tests") == []


@pytest.mark.parametrize(
    "path, expected",
    [
        ("python/sglang/ours.py", []),  # linked: the saved file is the installed one
        ("python/sglang/new.py", ["link"]),
        ("python/edits/a.py.toml", ["link"]),
        ("python/overlay/plan.py", ["link"]),
        ("sgl-kernel-sm120/setup.py", ["install --no-deps"]),
        ("python/REQUIREMENTS.toml", ["install", "link"]),
        ("sgl-kernel-sm120/build/object.o", []),
        ("python/overlay/__pycache__/plan.pyc", []),
    ],
)
def test_a_change_redoes_its_own_step(environment, monkeypatch, path, expected):
    run(environment, monkeypatch)
    changed = environment.ROOT / path
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text("two")
    done = run(environment, monkeypatch)
    assert len(done) == len(expected)
    assert all(line.startswith(start) for line, start in zip(done, expected, strict=True))


def test_another_set_installs_again_without_the_cpu_versions(environment, monkeypatch):
    run(environment, monkeypatch)
    (again, link) = run(environment, monkeypatch, "--set", "cuda")
    assert "[cuda,kit]" in again and "constraints" not in again and link == "link"


def test_a_failed_step_is_tried_again(environment, monkeypatch):
    def fail(*arguments, **_):
        raise SystemExit("no network")

    working = environment.pip
    monkeypatch.setattr(environment, "pip", fail)
    with pytest.raises(SystemExit, match="no network"):
        run(environment, monkeypatch)
    monkeypatch.setattr(environment, "pip", working)
    assert len(run(environment, monkeypatch)) == 2
