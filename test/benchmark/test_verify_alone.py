# SPDX-License-Identifier: Apache-2.0
"""The sanitizer run of the verify kernel: which program meets which tool, and what becomes of what the tools say."""

import sys

import pytest
import verify_alone
from docs.documents import documented
from verify_experiments import read_run

FAKE_NVCC = """#!{python}
import pathlib, sys
at = sys.argv.index("-o")
pathlib.Path(sys.argv[at + 1]).write_text(" ".join(sys.argv))
"""
FAKE_SANITIZER = """#!{python}
import sys
tool, program = sys.argv[2], sys.argv[3]
print("check", *sys.argv[5:])
dirty = tool == "{dirty}"
if tool == "racecheck":
    print("========= RACECHECK SUMMARY: %d hazards displayed (%d errors, 0 warnings)" % (dirty, dirty))
else:
    print("========= ERROR SUMMARY: %d errors" % dirty)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """-> function(name, text): an executable on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("NVCC", raising=False)

    def make(name, text, **fields):
        (folder / name).write_text(text.format(python=sys.executable, **fields))
        (folder / name).chmod(0o755)

    return make


def test_builds_the_product_and_every_lane(fake, tmp_path):
    fake("nvcc", FAKE_NVCC)
    typed = documented("benchmark/README.md", "python benchmark/kernels/verify_alone.py build")[2:]
    assert verify_alone.main([*typed, "--programs", str(tmp_path / "out")]) == 0
    objects = {p.parent.name: p.read_text() for p in tmp_path.glob("out/obj/*/bf16_rows40.o")}
    assert all("sm_90a" in command for command in objects.values())
    assert {name: "EVERY_LANE" in command for name, command in objects.items()} == {
        "product": False,
        "every_lane": True,
    }


@pytest.mark.parametrize("dirty", ["none", "memcheck", "racecheck"])
def test_every_tool_and_what_it_finds(fake, tmp_path, dirty):
    fake("compute-sanitizer", FAKE_SANITIZER, dirty=dirty)
    programs, raw = tmp_path / "programs", tmp_path / "raw"
    programs.mkdir()
    for name in verify_alone.BUILDS:
        (programs / name).touch()
    typed = documented("benchmark/README.md", "python benchmark/kernels/verify_alone.py sanitize")[2:]
    typed[typed.index("--out") + 1] = str(raw)
    assert verify_alone.main([*typed, "--programs", str(programs)]) == (dirty != "none")
    rows = list(read_run(raw, "product"))
    assert {(r["variant"], r["tool"], r["kv_dtype"]): r["errors"] for r in rows} == {
        ("every_lane" if tool == "racecheck" else "product", tool, kv): int(tool == dirty)
        for tool in ("memcheck", "initcheck", "synccheck", "racecheck")
        for kv in ("bf16", "fp8")
    }


def test_says_what_is_missing(fake, tmp_path):
    with pytest.raises(SystemExit, match="no compute-sanitizer on PATH"):
        verify_alone.main(["sanitize", "--out", str(tmp_path)])
    fake("compute-sanitizer", FAKE_SANITIZER, dirty="none")
    with pytest.raises(SystemExit, match="lacks product, every_lane; the verb build makes them"):
        verify_alone.main(["sanitize", "--out", str(tmp_path), "--programs", str(tmp_path)])
