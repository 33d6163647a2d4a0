# SPDX-License-Identifier: Apache-2.0
"""Is the fork installed whole, with a kernel package and a torch that fit?"""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from sglang.kdtree.doctor.check import Finding, fail, good, warn

BACKEND = "kdtree_sm120"
ALGORITHM = "DDTREE"
BACKEND_MODULE = "sglang.srt.layers.attention.kdtree_backend"
KERNEL_DISTRIBUTION = "sgl-kernel-sm120"
REINSTALL = "python -m pip install --force-reinstall --no-deps ./python"
# What the overlay leaves in an installed wheel and in a linked tree.
NOTICE = "CHANGES-kdtree.txt"
LINKED_MANIFEST = "sglang/.kdtree-overlay.json"
# Versions that the compiled library was built and imported with.
TORCH_FIRST, TORCH_LAST = (2, 11), (2, 14)


def distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_version() -> Iterable[Finding]:
    detail = f"Python {platform.python_version()} on {platform.machine()} {platform.system()}"
    if sys.version_info < (3, 11):
        return fail("Python", detail, "Use Python 3.11 to 3.13.")
    return good("Python", detail)


def fork(
    version: Callable[[str], str | None] = distribution_version,
) -> Iterable[Finding]:
    found = version("sglang")
    if found is None:
        return fail("fork", "no distribution named sglang", REINSTALL)
    if "+kdtree" not in found:
        detail = f"sglang {found} is not this fork (its version ends in +kdtree.N)"
        return fail("fork", detail, REINSTALL)
    return delta(found)


def delta(found: str) -> Iterable[Finding]:
    """What the fork adds to and changes in upstream, by its own notice; a part that is missing breaks it."""
    own, edited = notice()
    if not own:
        return warn("fork", f"sglang {found}, without a notice of changes", REINSTALL)
    site = Path(metadata.distribution("sglang").locate_file(""))
    missing = [path for path in own + edited if not (site / path).exists()]
    if missing:
        detail = f"sglang {found}: {len(missing)} files are missing, first {missing[0]}"
        return fail("fork", detail, REINSTALL)
    return good(
        "fork",
        f"sglang {found}: {len(own)} files of its own, {len(edited)} of upstream's edited",
    )


def notice() -> tuple[list[str], list[str]]:
    """(added, changed) files: of a linked tree by its manifest, of an installed wheel by its CHANGES file."""
    distribution = metadata.distribution("sglang")
    manifest = Path(distribution.locate_file(LINKED_MANIFEST))
    if manifest.exists():
        linked = json.loads(manifest.read_text())
        return linked["own"], linked["edited"]
    changed, _, added = (distribution.read_text(NOTICE) or "").partition("Added files:")
    edited = {
        line.partition(" (")[0]
        for line in changed.splitlines()
        if line.startswith("sglang/")
    }
    return added.split(), sorted(edited)


def backend_registration() -> Iterable[Finding]:
    """The names must be known once the server's arguments are: nothing of the fork is a plugin."""
    if importlib.util.find_spec(BACKEND_MODULE) is None:
        return fail("backend", f"no module {BACKEND_MODULE}", REINSTALL)
    importlib.import_module("sglang.srt.server_args")
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if BACKEND in ATTENTION_BACKENDS:
        findings = good("backend", f"{BACKEND} is registered")
    else:
        findings = fail("backend", f"{BACKEND} is not registered", REINSTALL)
    try:
        SpeculativeAlgorithm.from_string(ALGORITHM)
    except (ValueError, KeyError) as error:
        return findings + fail("algorithm", f"{ALGORITHM}: {error}", REINSTALL)
    return findings + good("algorithm", f"{ALGORITHM} is registered")


def plugins(
    entry_points: Callable[..., Iterable] = metadata.entry_points,
) -> Iterable[Finding]:
    """Plugins of others run inside every server process and may replace what the fork edits."""
    found = [
        f"{group}: {entry.name} = {entry.value}"
        for group in ("sglang.srt.plugins", "sglang.srt.platforms")
        for entry in entry_points(group=group)
    ]
    if not found:
        return good("plugins", "none installed; the fork needs none")
    remedy = "SGLang only logs it when a plugin fails. Uninstall what you do not need."
    return warn("plugins", "; ".join(found), remedy)


def torch_version() -> Iterable[Finding]:
    import torch

    numbers = torch.__version__.split("+")[0].split(".")[:2]
    version = tuple(int(part) for part in numbers)
    cuda = torch.version.cuda or "none (CPU build)"
    detail = f"torch {torch.__version__}, CUDA {cuda}"
    if not TORCH_FIRST <= version <= TORCH_LAST:
        first, last = (".".join(map(str, v)) for v in (TORCH_FIRST, TORCH_LAST))
        remedy = "The compiled kernels were checked with those versions only."
        return warn("torch", f"{detail}: outside {first} to {last}", remedy)
    return good("torch", detail)


def kernel_package(
    capabilities: Callable[[], list[tuple[int, int]]],
) -> Iterable[Finding]:
    """The binary must hold code for each GPU that is present."""
    try:
        kernels = importlib.import_module("sgl_kernel_sm120")
    except ImportError as error:
        remedy = "python -m pip install ./sgl-kernel-sm120"
        return fail("kernel package", str(error), remedy)
    return judge_archs(kernels.build_info(), capabilities())


def judge_archs(info: dict, capabilities: list[tuple[int, int]]) -> list[Finding]:
    archs = info["archs"]
    detail = f"{KERNEL_DISTRIBUTION} {info['version']}, {len(info['cuda_ops'])} CUDA ops, code for {', '.join(archs) or 'no GPU'}"
    if not capabilities:
        return good("kernel package", detail + "; no GPU here, torch ops serve")
    missing = {
        f"sm_{major}{minor}"
        for major, minor in capabilities
        if not covers(archs, major, minor)
    }
    if missing:
        return fail(
            "kernel package",
            f"{detail}; the GPU needs {', '.join(sorted(missing))}",
            "Install a wheel built for it, or build: SGL_KERNEL_SM120_CUDA=1 python -m pip install ./sgl-kernel-sm120",
        )
    if not info["cuda_ops"]:
        remedy = "The library did not load: compare its CUDA version with torch's."
        return fail("kernel package", detail, remedy)
    return good("kernel package", detail)


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
