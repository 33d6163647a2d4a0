# SPDX-License-Identifier: Apache-2.0
"""The build and its gates: what is recompiled, what the wheel may need, what the resource gate refuses."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from docs.documents import documented

PACKAGE = Path(__file__).parents[2] / "sgl-kernel-sm120"
sys.path.insert(0, str(PACKAGE / "tools"))
import kernel_build  # noqa: E402
import resources  # noqa: E402

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN16sgl_kernel_sm12014kv_move_kernelILi1EEEvNS_12KvMoveParamsEi' for 'sm_90a'
ptxas info    : Function properties for _ZN16sgl_kernel_sm12014kv_move_kernelILi1EEEvNS_12KvMoveParamsEi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 29 registers, used 1 barriers, 3452 bytes cmem[0]
ptxas info    : Compile time = 16.119 ms
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_120a'
ptxas info    : Function properties for _Z5otherv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
"""


def test_report_is_understood():
    move, other = resources.parse_log("unit", REPORT)
    assert move[1:] == ("sm_90a", 29, 0, 0, 0, 0)
    assert other == ("_Z5otherv", "sm_120a", 255, 1024, 4, 8, 16)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ptxas info    : 0 bytes gmem\n",
        REPORT.replace("bytes spill stores", "bytes spilled"),
        REPORT + "ptxas info    : Compiling entry function '_Z3newv' for 'sm_90a'\n",
    ],
)
def test_a_kernel_that_is_not_understood_fails(text):
    with pytest.raises(SystemExit, match=r"unit: ptxas compiled \d kernels, \d were understood"):
        resources.parse_log("unit", text)


GOOD = resources.Row("kernel<1>", "sm_120a", 200, 1024, 100352, 0, 0, 0)


@pytest.mark.parametrize(
    "change, fault",
    [
        (dict(spill_stores=4), "spills 4 B out, 0 B in"),
        (dict(spill_loads=8), "spills 0 B out, 8 B in"),
        (dict(stack=16), "uses 16 B of local memory"),
        (dict(dynamic_smem=100353), "uses 101377 B of shared memory, sm_120 has 101376"),
    ],
)
def test_gate_refuses(change, fault):
    assert GOOD.faults() == []
    assert GOOD._replace(**change).faults() == [fault]
    assert GOOD._replace(**change, arch="sm_90a").faults() == [fault]
    smem = "dynamic_smem" in change
    assert GOOD._replace(**change, arch="sm_80").faults() == ([fault] if smem else []), "spills are not refused there"


def test_listing_must_be_the_committed_one():
    other = GOOD._replace(arch="sm_80", regs=64)
    committed = resources.listing([GOOD, other])
    assert resources.compare([GOOD], committed, ["120a"]) == []
    assert resources.compare([GOOD, other], committed, ["120a", "80"]) == []
    more = resources.compare([GOOD._replace(regs=201)], committed, ["120a"])
    assert [line[0] for line in more[2:]] == ["@", "-", "+"]
    assert resources.compare([], committed, ["120a"]), "a kernel that is gone must show"
    assert resources.compare([GOOD, GOOD._replace(kernel="new")], committed, ["120a"]), "a new one too"


def test_dynamic_shared_memory_comes_from_the_symbol_table():
    symbols = [
        "sgl_kernel_sm120::allow_dynamic_smem<&(void sgl_kernel_sm120::kv_move_kernel<16>"
        "(sgl_kernel_sm120::KvMoveParams, int)), 98304>()::done",
        "sgl_kernel_sm120::launch()",
    ]
    assert resources.dynamic_smem(symbols) == {"kv_move_kernel<16>": 98304}


@pytest.mark.parametrize(
    "full, name",
    [
        ("void sgl_kernel_sm120::kv_move_kernel<16>(sgl_kernel_sm120::KvMoveParams, int)", "kv_move_kernel<16>"),
        ("sgl_kernel_sm120::pack_tree_mask_kernel(sgl_kernel_sm120::PackTreeMaskParams)", "pack_tree_mask_kernel"),
        (
            "void sgl_kernel_sm120::op::k<sgl_kernel_sm120::op::C<(bool)1, (int)2> >(void (*)(int))",
            "k<C<(bool)1, (int)2>>",
        ),
    ],
)
def test_kernel_names_are_short(full, name):
    assert resources.short(full) == name


def test_committed_listing_names_every_kernel():
    """Every __global__ function of the sources is in RESOURCES.txt for every architecture that is shipped."""
    rows = [line.split() for line in resources.LISTING.read_text().splitlines() if line.startswith("sm_")]
    archs = {f"sm_{arch}" for arch in kernel_build.DEFAULT_ARCHS.split()}
    sources = "\n".join(p.read_text() for p in kernel_build.CSRC.rglob("*.cuh"))
    for name in re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", sources):
        assert {row[0] for row in rows if row[7].split("<")[0] == name} == archs, name


@pytest.mark.parametrize("value", ["", "75", "sm_90", "90a,120a", "120b"])
def test_unknown_architectures_are_refused(monkeypatch, value):
    monkeypatch.setenv("SGL_KERNEL_SM120_ARCHS", value)
    with pytest.raises(SystemExit, match="SGL_KERNEL_SM120_ARCHS: expected a list such as '80 89 90a 120a'"):
        kernel_build.requested_archs()


def test_the_compiler_is_fetched_with_or_without_pip(monkeypatch, tmp_path):
    """Debian's interpreters have none outside of an environment."""
    made = []
    monkeypatch.setattr(resources.venv, "create", lambda place, with_pip: made.append((place, with_pip)))
    assert resources.pip(tmp_path) == [sys.executable, "-m", "pip"] and not made
    monkeypatch.setattr(resources.importlib.util, "find_spec", lambda name: None)
    assert resources.pip(tmp_path) == [str(tmp_path / "bin" / "python"), "-m", "pip"] and made == [(tmp_path, True)]


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """A tree of one C++ unit and one header, built with the C++ compiler alone."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "size.h").write_text("constexpr int kSize = 3;\n")
    (csrc / "unit.cpp").write_text('#include "size.h"\nint size() { return kSize; }\n')
    monkeypatch.setattr(kernel_build, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_build, "CSRC", csrc)
    monkeypatch.setattr(kernel_build, "nvcc_version", lambda root: "release 13.0, V13.0.88")
    build = kernel_build.Build(["120a"], tmp_path / "cuda")
    return build, csrc


def compiled(build, capsys):
    build.compile_all()
    return capsys.readouterr().out.split()[1::2]


def test_only_what_changed_is_recompiled(toy, monkeypatch, capsys):
    build, csrc = toy
    assert compiled(build, capsys) == ["unit.cpp"]
    assert compiled(build, capsys) == []
    (csrc / "size.h").touch()
    assert compiled(build, capsys) == [], "a newer mtime is no change"
    (csrc / "size.h").write_text("constexpr int kSize = 4;\n")
    assert compiled(build, capsys) == ["unit.cpp"], "a header is"
    moved = kernel_build.Build(["120a"], csrc.parent / "another-temporary-environment")
    assert compiled(moved, capsys) == [], "the toolchain's directory is not"
    monkeypatch.setattr(kernel_build, "nvcc_version", lambda root: "release 13.0, V13.0.99")
    assert compiled(kernel_build.Build(["120a"], build.cuda), capsys) == ["unit.cpp"], "its version is"


def test_a_failed_compilation_is_not_taken_for_fresh(toy, capsys):
    build, csrc = toy
    compiled(build, capsys)
    good = (csrc / "unit.cpp").read_text()
    (csrc / "unit.cpp").write_text("int size() { return }\n")
    with pytest.raises(SystemExit, match="unit.cpp:1"):
        build.compile_all()
    (csrc / "unit.cpp").write_text(good)
    assert compiled(build, capsys) == ["unit.cpp"]


def shared_library(tmp_path, code, *flags):
    library = tmp_path / "lib.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library), *flags]
    subprocess.run(command, input=code, text=True, check=True)
    return library


def test_library_may_use_what_torch_abi_declares(tmp_path):
    code = 'extern "C" int aoti_torch_device_type_cuda(); int f() { return aoti_torch_device_type_cuda(); }'
    kernel_build.check_symbols(shared_library(tmp_path, code))


def test_no_source_parses_numbers_by_the_c_library():
    """With the headers of glibc 2.38 and later, these are new symbols (__isoc23_strtol), which the wheel's tag lacks.
    Compilers of older systems, such as this test may run on, do not show it."""
    sources = [path for path in (PACKAGE / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert len(sources) > 30
    calls = r"\b(?:std::sto\w+|strto\w+|v?f?sscanf|atoi|atol|atoll|atof)\s*\("
    assert [path.name for path in sources if re.search(calls, path.read_text())] == []


def test_library_may_not_use_an_undeclared_symbol(tmp_path):
    library = shared_library(tmp_path, 'extern "C" void aoti_torch_new_thing(); void f() { aoti_torch_new_thing(); }')
    with pytest.raises(SystemExit, match=r"does not declare: \['aoti_torch_new_thing'\]"):
        kernel_build.check_symbols(library)


def test_library_may_not_need_another_library(tmp_path):
    subprocess.run(
        ["g++", "-shared", "-Wl,-soname,libother.so.1", "-x", "c", "/dev/null", "-o", tmp_path / "libother.so"],
        check=True,
    )
    library = shared_library(tmp_path, "void f() {}", "-Wl,--no-as-needed", f"-L{tmp_path}", "-lother")
    with pytest.raises(SystemExit, match=r"needs \['libother.so.1'\], which manylinux_2_34_x86_64 does not have"):
        kernel_build.check_symbols(library)


def test_library_may_not_need_a_newer_symbol_version(tmp_path, monkeypatch):
    library = shared_library(tmp_path, "#include <cstdlib>\nvoid f() { abort(); }")
    monkeypatch.setitem(kernel_build.NEWEST_SYMBOL, "GLIBC", (2, 1))
    with pytest.raises(SystemExit, match=r"needs GLIBC_2\.\S+, newer than manylinux_2_34_x86_64"):
        kernel_build.check_symbols(library)


def test_library_may_not_depend_on_its_folder(tmp_path):
    """nvcc registers a device variable by its name, and puts a hash of the path into that of an internal one."""
    name = "_ZN46_INTERNAL_6b59599d_15_ddtree_build_cu_c8a8cb10{}kTableE"
    code = f'extern "C" const char* declared() {{ return "{name}"; }}'
    with pytest.raises(SystemExit, match="depends on the folder.*_INTERNAL_6b59599d_15_ddtree_build_cu.*extern"):
        kernel_build.check_no_folder(shared_library(tmp_path, code))
    kernel_build.check_no_folder(shared_library(tmp_path, code.replace("_INTERNAL_", "_")))


def test_declarations_agree_with_this_torch():
    (script,) = documented("sgl-kernel-sm120/README.md", "tools/check_torch_abi.sh")
    done = subprocess.run(
        [str(PACKAGE / script)],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def build_wheel(tmp_path, **environment):
    """`pip wheel` of a copy of the sources, isolated, as a user runs it."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("build", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(PACKAGE, source, ignore=ignore)
    (source / "python" / "sgl_kernel_sm120" / "left_over.so").touch()  # of an earlier in-place build
    objects = Path("build", "obj", "120a")  # what the resource gate compiled, if it ran: fresh in another folder too
    if (PACKAGE / objects).exists():
        shutil.copytree(PACKAGE / objects, source / objects)
    out = tmp_path / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(out), str(source)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_cpu_only_wheel_is_pure(tmp_path):
    wheel, names = build_wheel(tmp_path, SGL_KERNEL_SM120_CUDA="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "sgl_kernel_sm120/reference.py" in names and not [n for n in names if n.endswith(".so")]


@pytest.mark.slow
def test_wheel_with_cuda_code(tmp_path):
    """One architecture is enough for tag, contents, import and exported facts."""
    wheel, names = build_wheel(tmp_path, SGL_KERNEL_SM120_ARCHS="120a")
    assert wheel.name.endswith(f"-py3-none-{kernel_build.PLATFORM}.whl")
    assert [n for n in names if n.endswith(".so")] == ["sgl_kernel_sm120/libsgl_kernel_sm120.so"]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    library = (tmp_path / "site" / "sgl_kernel_sm120" / "libsgl_kernel_sm120.so").read_bytes()
    assert b"tmpxft" not in library, "nvcc's temporary names are others in every build"
    code = "import sgl_kernel_sm120 as k; i = k.build_info(); print(*i['archs'], *sorted(i['cuda_ops']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True
    )
    assert done.stdout.split()[0] == "120a" and "pack_tree_mask" in done.stdout, done.stderr
