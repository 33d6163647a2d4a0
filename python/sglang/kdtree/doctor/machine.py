# SPDX-License-Identifier: Apache-2.0
"""GPUs, driver, limits and folders of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang.kdtree.doctor.check import Finding, fail, good, warn
from sglang.kdtree.errors import KitError
from sglang.kdtree.probe.nvml import Nvml, open_nvml

# Shared memory that a block of the verify kernel may ask for: sm_120's opt-in limit.
KERNEL_SHARED_MEMORY = 101_376
# As NVML counts: 1000 x major + 10 x minor. The wheels of torch and of the kernels are built for CUDA 13.
MIN_CUDA_DRIVER = 13_000
# NCCL's segments and SGLang's own; Docker's default of 64 MB is too little.
SHM_BYTES_PER_GPU = 1 << 30
MIN_FREE_DISK = 20 << 30
MIN_OPEN_FILES = 65_536


def capabilities() -> list[tuple[int, int]]:
    import torch

    return [
        torch.cuda.get_device_capability(index)
        for index in range(torch.cuda.device_count())
    ]


def driver(open_: Callable[[], Nvml] = open_nvml) -> Iterable[Finding]:
    try:
        nvml = open_()
    except KitError as error:
        remedy = "Nothing to do on a machine without a GPU: --device cpu serves."
        return warn("GPU", f"none: {error.got}", remedy)
    cuda = nvml.module.nvmlSystemGetCudaDriverVersion()
    names = nvml.names()
    detail = f"{len(names)} x {names[0] if names else '?'}, driver {nvml.driver()}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    if cuda < MIN_CUDA_DRIVER:
        return fail("GPU", detail, "Install a driver for CUDA 13 (580 or newer).")
    return [*good("GPU", detail), *pcie(nvml), *power(nvml)]


def pcie(nvml: Nvml) -> Iterable[Finding]:
    """A slot that negotiated fewer lanes than the card has slows every all-reduce."""
    slow = []
    for index, handle in enumerate(nvml.handles):
        width = nvml.module.nvmlDeviceGetCurrPcieLinkWidth(handle)
        best = nvml.module.nvmlDeviceGetMaxPcieLinkWidth(handle)
        if width < best:
            slow.append(f"GPU {index} x{width} of x{best}")
    if slow:
        remedy = "Check the slot, riser and bifurcation settings."
        return warn("PCIe", ", ".join(slow), remedy)
    return good("PCIe", "all lanes in use")


def power(nvml: Nvml) -> Iterable[Finding]:
    limited = []
    for index, handle in enumerate(nvml.handles):
        now = nvml.module.nvmlDeviceGetEnforcedPowerLimit(handle)
        default = nvml.module.nvmlDeviceGetPowerManagementDefaultLimit(handle)
        if now < default:
            limited.append(f"GPU {index} {now // 1000} of {default // 1000} W")
    if limited:
        remedy = "Intended? Otherwise: nvidia-smi -pl WATTS."
        return warn("power limit", ", ".join(limited), remedy)
    return good("power limit", "at its default")


def peers(
    open_: Callable[[], Nvml] = open_nvml, environ: Mapping[str, str] = os.environ
) -> Iterable[Finding]:
    """GPUs that cannot reach each other's memory send every all-reduce through host memory."""
    try:
        nvml = open_()
    except KitError:
        return []
    if len(nvml.handles) < 2:
        return []
    module = nvml.module
    reads, allowed = module.NVML_P2P_CAPS_INDEX_READ, module.NVML_P2P_STATUS_OK
    blocked = [
        f"{a}-{b}"
        for a, first in enumerate(nvml.handles)
        for b, second in enumerate(nvml.handles)
        if a < b and module.nvmlDeviceGetP2PStatus(first, second, reads) != allowed
    ]
    if blocked:
        return warn(
            "peer access",
            f"no peer-to-peer reads between GPUs {', '.join(blocked[:6])}{'...' if len(blocked) > 6 else ''}",
            "Turn off IOMMU/ACS (iommu=off or iommu=pt) and see nvidia-smi topo -p2p r; without it use --disable-custom-all-reduce.",
        )
    level = environ.get("NCCL_P2P_LEVEL", "unset: SYS also uses it across CPU sockets")
    return good("peer access", f"all pairs; NCCL_P2P_LEVEL {level}")


def kernel_shared_memory() -> Iterable[Finding]:
    import torch

    findings: list[Finding] = []
    for index in range(torch.cuda.device_count()):
        limit = torch.cuda.get_device_properties(index).shared_memory_per_block_optin
        name = f"shared memory, GPU {index}"
        detail = (
            f"{limit:,} B a block, the kernels ask for at most {KERNEL_SHARED_MEMORY:,}"
        )
        if limit < KERNEL_SHARED_MEMORY:
            remedy = (
                "This GPU is too small for the kernels: --attention-backend triton."
            )
            findings += fail(name, detail, remedy)
        else:
            findings += good(name, detail)
    return findings


def host_shared_memory(
    gpus: int, path: str = "/dev/shm", usage: Callable[[str], Any] = shutil.disk_usage
) -> Iterable[Finding]:
    name = "shared memory, host"
    total, wanted = usage(path).total, SHM_BYTES_PER_GPU * max(1, gpus)
    detail = f"{path} has {total / 2**30:.1f} GiB"
    if total < wanted:
        remedy = f"docker run --shm-size {wanted >> 30}g (or --ipc=host)."
        return (fail if gpus > 1 else warn)(name, detail, remedy)
    return good(name, detail)


def port_free(port: int, host: str = "127.0.0.1") -> Iterable[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "Another server runs, or choose --port."
            return warn("port", f"{host}:{port}: {error.strerror}", remedy)
    return good("port", f"{host}:{port} is free")


def model_cache(
    environ: Mapping[str, str], usage: Callable[[Path], Any] = shutil.disk_usage
) -> Iterable[Finding]:
    name = "model cache"
    default = Path(environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    path = Path(environ.get("HF_HUB_CACHE", default / "hub"))
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        remedy = "Set HF_HOME to a folder of yours."
        return warn(name, f"{path} is not writable", remedy)
    free = usage(existing).free
    detail = f"{path}, {free / 2**30:,.0f} GiB free"
    if free < MIN_FREE_DISK:
        remedy = "Kimi K2.6 takes 555 GiB: point HF_HOME at a larger disk."
        return warn(name, detail, remedy)
    return good(name, detail)


def allocator(environ: Mapping[str, str], gpus: int) -> Iterable[Finding]:
    value = environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF", "")
    )
    detail = f"PYTORCH_CUDA_ALLOC_CONF is {value or 'unset'}"
    if gpus and "expandable_segments:True" not in value:
        remedy = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (fragments cost gigabytes near the limit)."
        return warn("allocator", detail, remedy)
    return good("allocator", detail)


def open_files(limits: tuple[int, int] | None = None) -> Iterable[Finding]:
    limits = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if n == resource.RLIM_INFINITY else n for n in limits)
    if soft < MIN_OPEN_FILES:
        remedy = f"LimitNOFILE in the unit, docker run --ulimit nofile={MIN_OPEN_FILES}"
        if hard >= MIN_OPEN_FILES:  # beyond it only root may go
            remedy = f"ulimit -n {MIN_OPEN_FILES}, or {remedy}"
        return warn("open files", f"limit {soft} (hard {hard})", f"{remedy}.")
    return good("open files", f"limit {soft}")
