# SPDX-License-Identifier: Apache-2.0
"""Compile csrc/ with the CUDA compiler from the package index and link one library that any torch 2.11 to 2.14 loads.

Neither a CUDA toolkit, nor torch, nor a GPU is needed. Objects stay in build/obj and are reused while the command, the
compiler and the contents of a unit's own files are unchanged. Used by setup.py and by tools/resources.py.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
TOOLCHAIN = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
]
NVCC_RELEASE = "release 13.0"
DEFAULT_ARCHS = "80 89 90a 120a"

PLATFORM = "manylinux_2_34_x86_64"
NEWEST_SYMBOL = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (12,)}
ALLOWED_LIBRARIES = {
    "libtorch.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2",
}  # fmt: skip

HOST_FLAGS = ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
NVCC_ENV = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # nvcc reads these itself, e.g. -lineinfo for a profile


def cuda_requested() -> bool:
    return os.environ.get("SGL_KERNEL_SM120_CUDA", "1") != "0"


def requested_archs() -> list[str]:
    archs = os.environ.get("SGL_KERNEL_SM120_ARCHS", DEFAULT_ARCHS).split()
    unknown = [a for a in archs if not re.fullmatch(r"(8|9|10|12)\d[af]?", a)]
    if unknown or not archs:
        raise SystemExit(f"SGL_KERNEL_SM120_ARCHS: expected a list such as '{DEFAULT_ARCHS}', got {archs}")
    return archs


def toolchain_root() -> Path:
    """The directory that the nvidia-* wheels share, <site-packages>/nvidia/cu13, with the compiler release we pin."""
    try:
        import nvidia
    except ImportError:
        bases = []
    else:
        bases = list(nvidia.__path__)
    for base in bases:
        root = Path(base) / "cu13"
        if (root / "bin/nvcc").exists() and (root / "nvvm/bin/cicc").exists() and NVCC_RELEASE in nvcc_version(root):
            return root
    raise SystemExit(f"no nvcc {NVCC_RELEASE} in {bases or sys.prefix}; pip install {' '.join(TOOLCHAIN)}")


def nvcc_version(root: Path) -> str:
    return subprocess.run([str(root / "bin/nvcc"), "--version"], capture_output=True, text=True, check=True).stdout


def units() -> list[Path]:
    """Every translation unit, those of the largest op first, so that the slowest does not start last."""
    found = [p for p in CSRC.rglob("*") if p.suffix in (".cu", ".cpp")]

    def op_size(unit: Path) -> int:
        op = CSRC / unit.relative_to(CSRC).parts[0]
        return sum(p.stat().st_size for p in op.rglob("*")) if op.is_dir() else 0

    return sorted(found, key=lambda p: (-op_size(p), p))


class Build:
    """The objects of one list of architectures."""

    def __init__(self, archs: list[str], cuda: Path):
        self.archs = archs
        self.cuda = cuda
        self.obj_dir = ROOT / "build" / "obj" / "-".join(archs)
        self.compiler = nvcc_version(cuda)

    def object(self, unit: Path) -> Path:
        return self.obj_dir / (str(unit.relative_to(CSRC)).replace("/", ".") + ".o")

    def log(self, unit: Path) -> Path:
        return self.object(unit).with_suffix(".log")

    def compile_all(self) -> list[Path]:
        """Compile what is stale; return all objects."""
        self.obj_dir.mkdir(parents=True, exist_ok=True)
        stale = [u for u in units() if not self.is_fresh(u)]
        jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
        threads = max(1, jobs // max(1, sum(u.suffix == ".cu" for u in stale)))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda unit: self.compile(unit, threads), stale))
        return [self.object(u) for u in units()]

    def command(self, unit: Path) -> list[str]:
        if unit.suffix == ".cpp":
            facts = {"ARCHS": " ".join(self.archs), "NVCC": re.search(r"V([0-9.]+)", self.compiler)[1]}
            defines = [f'-DSGL_KERNEL_SM120_{name}="{value}"' for name, value in facts.items()]
            compiler = [os.environ.get("CXX", "g++"), "-O2", "-std=c++17", "-Wall", *HOST_FLAGS, *defines]
            return [*compiler, f"-I{CSRC}", f"-isystem{self.cuda}/include"]
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.archs]
        nvcc = [str(self.cuda / "bin/nvcc"), "-O3", "-std=c++17", "-Xptxas=-v", *codes]
        return [*nvcc, "-Xcompiler=" + ",".join(HOST_FLAGS), f"-I{CSRC}"]

    def recipe(self, unit: Path) -> str:
        """All that decides the object besides file contents; without directories, which an isolated build changes."""
        command = " ".join(self.command(unit)).replace(str(self.cuda), "CUDA").replace(str(ROOT), "ROOT")
        return "\n".join([command, self.compiler, *(os.environ.get(name, "") for name in NVCC_ENV)])

    def is_fresh(self, unit: Path) -> bool:
        stamp = self.object(unit).with_suffix(".json")
        if not (stamp.exists() and self.object(unit).exists()):
            return False
        old = json.loads(stamp.read_text())
        same = all((ROOT / f).exists() and digest(ROOT / f) == h for f, h in old["files"].items())
        return same and old["recipe"] == self.recipe(unit)

    def compile(self, unit: Path, threads: int) -> None:
        obj = self.object(unit)
        stamp, dep = obj.with_suffix(".json"), obj.with_suffix(".d")
        stamp.unlink(missing_ok=True)
        command = [*self.command(unit), "-c", str(unit), "-o", str(obj), "-MD", "-MF", str(dep)]
        if unit.suffix == ".cu":
            command += ["--threads", str(threads)]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.log(unit).write_text(run.stdout)
        if run.returncode:
            raise SystemExit(f"{' '.join(command)}\n{run.stdout}")
        print("compiled", unit.relative_to(CSRC), flush=True)
        names = dep.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        own = sorted({Path(n).resolve() for n in names if Path(n).resolve().is_relative_to(CSRC)})
        files = {str(p.relative_to(ROOT)): digest(p) for p in own}
        stamp.write_text(json.dumps({"recipe": self.recipe(unit), "files": files}))

    def link(self, objects: list[Path], library: Path) -> None:
        # An empty library with torch's soname gives the NEEDED entry without torch at build time. At run time torch
        # is loaded already and the loader resolves the entry to that copy, so no RPATH. Without the entry nothing
        # resolves: Python loads torch's libraries RTLD_LOCAL. The symbol table is left out: it names nvcc's temporary
        # files, which are named after process numbers, and the same sources would give other bytes in every build.
        stub = self.obj_dir / "libtorch.so"
        cxx = os.environ.get("CXX", "g++")
        run([cxx, "-shared", "-Wl,-soname,libtorch.so", "-x", "c", "/dev/null", "-o", str(stub)])
        run(
            [cxx, "-shared", "-o", str(library), *map(str, objects), "-Wl,--no-as-needed", str(stub),
             "-Wl,--as-needed", f"-L{self.cuda}/lib", "-lcudart_static", "-ldl", "-lpthread", "-lrt",
             "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,relro,-z,noexecstack", "-Wl,--build-id=sha1",
             "-Wl,--strip-all"]
        )  # fmt: skip


def run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}")
    return done.stdout


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_symbols(library: Path) -> None:
    """Refuse a library that needs more than the wheel's tag and torch's stable C interface promise."""
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run(["readelf", "-dW", str(library)])))
    if needed - ALLOWED_LIBRARIES:
        raise SystemExit(f"{library.name} needs {sorted(needed - ALLOWED_LIBRARIES)}, which {PLATFORM} does not have")
    versions = run(["readelf", "-VW", str(library)])
    for family, text in set(re.findall(r"Name: (GLIBCXX|GLIBC|CXXABI|GCC)_([0-9.]+)", versions)):
        if tuple(map(int, text.split("."))) > NEWEST_SYMBOL[family]:
            raise SystemExit(f"{library.name} needs {family}_{text}, newer than {PLATFORM}")
    # Columns of readelf: number, value, size, type, bind, visibility, section, name. A weak symbol may stay undefined.
    table = [line.split() for line in run(["readelf", "--dyn-syms", "-W", str(library)]).splitlines()]
    foreign = [row[7] for row in table if len(row) == 8 and row[4] == "GLOBAL" and row[6] == "UND"]
    declared = set(re.findall(r"\b(\w+)\(", (CSRC / "torch_abi.h").read_text()))
    unknown = sorted(set(foreign) - declared)
    if unknown:
        raise SystemExit(f"{library.name} has undefined symbols that csrc/torch_abi.h does not declare: {unknown}")


def check_no_folder(library: Path) -> None:
    """Refuse a name of nvcc's that holds a hash of the source's path: each build would be other bytes."""
    names = set(re.findall(rb"_INTERNAL_[0-9a-f]{8}_\w+", library.read_bytes()))
    if names:
        raise SystemExit(
            f"{library.name} depends on the folder that it was compiled in: {sorted(map(bytes.decode, names))[:4]}. A "
            "variable on the device with internal linkage is named so; declare it extern"
        )


def build_library(library: Path) -> None:
    """Compile what is stale, link and check."""
    build = Build(requested_archs(), toolchain_root())
    library.parent.mkdir(parents=True, exist_ok=True)
    build.link(build.compile_all(), library)
    check_symbols(library)
    check_no_folder(library)
