# SPDX-License-Identifier: Apache-2.0
"""Is the fork installed whole, with a kernel package and a torch that fit?"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata

from sglang.kdtree.doctor.check import FAIL, OK, WARN, Finding

BACKEND = "kdtree_sm120"
ALGORITHM = "DDTREE"
BACKEND_MODULE = "sglang.srt.layers.attention.kdtree_backend"
KERNEL_DISTRIBUTION = "sgl-kernel-sm120"
REINSTALL = "python -m pip install --force-reinstall --no-deps ./python"
# Versions that the compiled library was built and imported with.
TORCH_FIRST, TORCH_LAST = (2, 11), (2, 14)


def distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_version() -> Iterable[Finding]:
    version = sys.version_info
    detail = f"Python {platform.python_version()} on {platform.machine()} {platform.system()}"
    if version < (3, 10):
        return [
            Finding(
                name="Python",
                status=FAIL,
                detail=detail,
                remedy="Use Python 3.10 to 3.13.",
            )
        ]
    return [Finding(name="Python", status=OK, detail=detail)]


def fork(
    version: Callable[[str], str | None] = distribution_version,
) -> Iterable[Finding]:
    found = version("sglang")
    if found is None:
        return [
            Finding(
                name="fork",
                status=FAIL,
                detail="no distribution named sglang",
                remedy=REINSTALL,
            )
        ]
    if "+kdtree" not in found:
        return [
            Finding(
                name="fork",
                status=FAIL,
                detail=f"sglang {found} is not this fork (its version ends in +kdtree.N)",
                remedy=REINSTALL,
            )
        ]
    return [Finding(name="fork", status=OK, detail=f"sglang {found}, {delta()}")]


OWN_NAMES = ("kdtree", "ddtree", "defrag", "torch_cpu", "torch_reference")


def delta() -> str:
    """How many installed modules are the fork's own, from the installation record."""
    files = [str(f) for f in metadata.files("sglang") or [] if str(f).endswith(".py")]
    own = [f for f in files if any(name in f for name in OWN_NAMES)]
    return f"{len(own)} of its {len(files)} modules bear names of the fork"


def backend_registration() -> Iterable[Finding]:
    """The names must be known once the server's arguments are: nothing of the fork is a plugin."""
    if importlib.util.find_spec(BACKEND_MODULE) is None:
        return [
            Finding(
                name="backend",
                status=FAIL,
                detail=f"no module {BACKEND_MODULE}",
                remedy=REINSTALL,
            )
        ]
    importlib.import_module("sglang.srt.server_args")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    findings = []
    if BACKEND in ATTENTION_BACKENDS:
        findings.append(
            Finding(name="backend", status=OK, detail=f"{BACKEND} is registered")
        )
    else:
        findings.append(
            Finding(
                name="backend",
                status=FAIL,
                detail=f"{BACKEND} is not registered",
                remedy=REINSTALL,
            )
        )
    try:
        SpeculativeAlgorithm.from_string(ALGORITHM)
        findings.append(
            Finding(name="algorithm", status=OK, detail=f"{ALGORITHM} is registered")
        )
    except (ValueError, KeyError) as error:
        findings.append(
            Finding(
                name="algorithm",
                status=FAIL,
                detail=f"{ALGORITHM}: {error}",
                remedy=REINSTALL,
            )
        )
    return findings


def plugins(
    entry_points: Callable[..., Iterable] = metadata.entry_points,
) -> Iterable[Finding]:
    """Plugins of others run inside every server process and may replace what the fork edits."""
    found = []
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        found += [
            f"{group}: {entry.name} = {entry.value}"
            for entry in entry_points(group=group)
        ]
    if not found:
        return [
            Finding(
                name="plugins", status=OK, detail="none installed; the fork needs none"
            )
        ]
    return [
        Finding(
            name="plugins",
            status=WARN,
            detail="; ".join(found),
            remedy="SGLang only logs it when a plugin fails. Uninstall what you do not need.",
        )
    ]


def torch_version() -> Iterable[Finding]:
    import torch

    version = tuple(
        int(part) for part in torch.__version__.split("+")[0].split(".")[:2]
    )
    cuda = torch.version.cuda or "none (CPU build)"
    detail = f"torch {torch.__version__}, CUDA {cuda}"
    if not TORCH_FIRST <= version <= TORCH_LAST:
        return [
            Finding(
                name="torch",
                status=WARN,
                detail=f"{detail}: outside {TORCH_FIRST[0]}.{TORCH_FIRST[1]} to {TORCH_LAST[0]}.{TORCH_LAST[1]}",
                remedy="The compiled kernels were checked with those versions only.",
            )
        ]
    return [Finding(name="torch", status=OK, detail=detail)]


def kernel_package(
    capabilities: Callable[[], list[tuple[int, int]]],
) -> Iterable[Finding]:
    """The binary must hold code for each GPU that is present."""
    try:
        kernels = importlib.import_module("sgl_kernel_sm120")
    except ImportError as error:
        return [
            Finding(
                name="kernel package",
                status=FAIL,
                detail=str(error),
                remedy="python -m pip install ./sgl-kernel-sm120",
            )
        ]
    info = kernels.build_info()
    return [judge_archs(info, capabilities())]


def judge_archs(info: dict, capabilities: list[tuple[int, int]]) -> Finding:
    archs = info["archs"]
    detail = f"{KERNEL_DISTRIBUTION} {info['version']}, {len(info['cuda_ops'])} CUDA ops, code for {', '.join(archs) or 'no GPU'}"
    if not capabilities:
        return Finding(
            name="kernel package",
            status=OK,
            detail=detail + "; no GPU here, torch ops serve",
        )
    missing = [
        f"sm_{major}{minor}"
        for major, minor in capabilities
        if not covers(archs, major, minor)
    ]
    if missing:
        return Finding(
            name="kernel package",
            status=FAIL,
            detail=f"{detail}; the GPU needs {', '.join(sorted(set(missing)))}",
            remedy="Install a wheel built for it, or build: SGL_KERNEL_SM120_CUDA=1 python -m pip install ./sgl-kernel-sm120",
        )
    if not info["cuda_ops"]:
        return Finding(
            name="kernel package",
            status=FAIL,
            detail=detail,
            remedy="The library did not load: compare its CUDA version with torch's.",
        )
    return Finding(name="kernel package", status=OK, detail=detail)


def covers(archs: list[str], major: int, minor: int) -> bool:
    """Code for 120a runs on 12.0 only; code for 80 runs on 8.x from 8.0 on."""
    for arch in archs:
        digits = "".join(character for character in arch if character.isdigit())
        arch_major, arch_minor = int(digits[:-1]), int(digits[-1])
        exact = arch.endswith(("a", "f"))
        if arch_major == major and (
            arch_minor == minor or (not exact and arch_minor < minor)
        ):
            return True
    return False
