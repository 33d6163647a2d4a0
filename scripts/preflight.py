# SPDX-License-Identifier: Apache-2.0
"""What set-up needs of the machine, asked before anything is downloaded. Each complaint says what to do.

This file also runs under an interpreter that is too old or too new, in order to say so: nothing newer than Python 3.8.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

PIN = Path(__file__).resolve().parent.parent / "python" / "UPSTREAM.toml"
TAG = re.compile(r"^cp(\d)(\d+)-\w+-manylinux_(\d+)_(\d+)_(\w+) *=", re.MULTILINE)
# Bytes that an environment takes when it is new; torch for CUDA brings NVIDIA's libraries along.
ENVIRONMENT_BYTES = {"cpu": 3e9, "cuda": 13e9}
# outlines_core 0.1.26, which upstream's full set pins, has no wheel for a newer Python and is built there, in Rust.
NEWEST_WITHOUT_RUST = (3, 12)
SCRATCH_BYTES = {"cpu": 1e9, "cuda": 4e9}  # of the directory for temporary files, where pip puts what it downloads


def complaints(chosen: str, *, tests: bool, new: bool, place: Path) -> list[str]:
    """Whatever keeps a set-up of this set from working here; empty if nothing does. `new`: the environment is made."""
    found = [interpreter(), *system()]
    if not found[0]:
        found += [modules()] if new else []
        found += [disk(place, ENVIRONMENT_BYTES[chosen]), scratch(SCRATCH_BYTES[chosen])] if new else []
        found += [rust()] if chosen == "cuda" else []
    if tests or chosen == "cuda":
        found.append(compiler())
    if tests and not shutil.which("git"):
        found.append("git is missing: the tests read the list of files from it (Debian, Ubuntu: apt install git)")
    return [complaint for complaint in found if complaint]


def supported() -> list[tuple[int, int]]:
    """The Python versions that upstream has wheels for."""
    return sorted({(int(tag[1]), int(tag[2])) for tag in TAG.finditer(PIN.read_text(encoding="utf-8"))})


def interpreter() -> str | None:
    names = [dotted(version) for version in supported()]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    build = f"{platform.python_implementation()} {platform.python_version()}"
    remedy = f"install CPython {listed} and name it, for example: make PYTHON=python{names[0]} serve"
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in supported():
        return f"{sys.executable} is {build}, and upstream has wheels for CPython {listed} only: {remedy}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return f"{sys.executable} is a free-threaded {build}, which upstream has no wheel for: {remedy}"
    return None


def system() -> list[str]:
    tags = list(TAG.finditer(PIN.read_text(encoding="utf-8")))
    machines, oldest = sorted({tag[5] for tag in tags}), min((int(tag[3]), int(tag[4])) for tag in tags)
    if sys.platform != "linux":
        return [f"this is {platform.system()}, and upstream's wheels are for Linux: use a container"]
    found = []
    if platform.machine() not in machines:
        found.append(f"this is {platform.machine()}, and upstream has wheels for {' and '.join(machines)} only")
    glibc = glibc_version()
    if glibc is None or glibc < oldest:
        have = "no glibc" if glibc is None else f"glibc {dotted(glibc)}"
        found.append(
            f"this system has {have}, and upstream's wheels need {dotted(oldest)} or newer "
            "(Debian 12, Ubuntu 22.04, RHEL 9): use a newer system, or a container of one"
        )
    return found


def glibc_version() -> tuple[int, int] | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    version = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    return (int(version[1]), int(version[2])) if version else None


def modules() -> str | None:
    """Parts of Python that a distribution packages apart, or that a build from source lacks without their headers."""
    name = f"python{dotted(sys.version_info[:2])}"
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        return (
            f"{sys.executable} cannot make an environment, it has no venv or no ensurepip: "
            f"apt install python3-venv (Debian, Ubuntu; for another Python than the system's: {name}-venv)"
        )
    missing = [module for module in ("ssl", "ctypes", "zlib", "lzma", "bz2") if not importable(module)]
    if missing:
        return (
            f"{sys.executable} was built without {', '.join(missing)}: install the headers (Debian, Ubuntu: apt "
            "install libssl-dev libffi-dev zlib1g-dev liblzma-dev libbz2-dev) and build it again"
        )
    return None


def importable(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def compiler() -> str | None:
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(words[0]):
        return None
    return (
        f"no C++ compiler: {words[0]} is missing (Debian, Ubuntu: apt install g++; another one: make CXX=clang++ ...)"
    )


def rust() -> str | None:
    if sys.version_info[:2] <= NEWEST_WITHOUT_RUST or shutil.which("cargo"):
        return None
    have, other = dotted(sys.version_info[:2]), dotted(NEWEST_WITHOUT_RUST)
    return (
        f"the GPU set has a package without a wheel for Python {have}, built in Rust, and cargo is missing: name "
        f"another interpreter, for example make PYTHON=python{other} serve; with Rust installed pip tries to build it"
    )


def disk(place: Path, needed: float) -> str | None:
    free = free_bytes(place)
    if free >= needed:
        return None
    return f"{gigabytes(free)} are free for {place}, and the environment takes about {gigabytes(needed)}: make room"


def scratch(needed: float) -> str | None:
    folder = tempfile.gettempdir()
    free = free_bytes(Path(folder))
    if free >= needed:
        return None
    return (
        f"{gigabytes(free)} are free in {folder}, and what is downloaded takes about {gigabytes(needed)} there: "
        "make room, or name another folder: TMPDIR=... make ..."
    )


def free_bytes(place: Path) -> int:
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
