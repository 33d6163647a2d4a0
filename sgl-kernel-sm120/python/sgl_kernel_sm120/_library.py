# SPDX-License-Identifier: Apache-2.0
"""The torch op namespace: schemas, CPU and fake kernels are registered here, CUDA kernels by the compiled library."""

import json
from pathlib import Path
from typing import Callable

import torch

NAMESPACE = "sgl_kernel_sm120"
LIBRARY_PATH = Path(__file__).with_name("libsgl_kernel_sm120.so")
BUILD_PATH = Path(__file__).with_name("build.json")

_library = torch.library.Library(NAMESPACE, "DEF")
_names: list[str] = []


def register(name: str, arguments: str, *, cpu: Callable, fake: Callable) -> Callable:
    """Define op `name` with a CPU and a fake kernel and return its callable overload.

    Every op writes into tensors that the caller allocated and returns nothing, so one schema serves eager mode, graph
    capture and the C ABI. torch.library.custom_op is avoided: it costs 12 to 100 us a call, `define` 3 to 4 us.
    """
    _library.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _names.append(name)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def op_names() -> tuple[str, ...]:
    """Names of all ops, in the order of their registration."""
    return tuple(_names)


def load_compiled_library() -> bool:
    """Add the CUDA kernels if this installation has them; False for a CPU-only installation."""
    if not LIBRARY_PATH.exists():
        return False
    try:
        torch.ops.load_library(LIBRARY_PATH)
    except OSError as error:
        raise ImportError(
            f"{LIBRARY_PATH.name} does not load under torch {torch.__version__}: {error}. Supported are torch 2.11 to "
            "2.14; reinstall sgl-kernel-sm120, or delete the file to run the CPU ops alone."
        ) from error
    return True


def has_cuda_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "CUDA")


def cuda_available_ops() -> tuple[str, ...]:
    """Names of the ops that have a CUDA kernel in this installation."""
    return tuple(name for name in _names if has_cuda_kernel(name))


def require_kernel(name: str, tensor: torch.Tensor) -> None:
    """Raise NotImplementedError when `tensor` lives on a CUDA device and the op has no kernel for it."""
    if tensor.is_cuda and not has_cuda_kernel(name):
        reason = (
            "this installation has the CPU ops only; reinstall sgl-kernel-sm120 without SGL_KERNEL_SM120_CUDA=0"
            if not LIBRARY_PATH.exists()
            else "it has no CUDA kernel yet; move its inputs to the CPU"
        )
        raise NotImplementedError(f"{NAMESPACE}::{name}: expected CPU tensors, got {tensor.device}: {reason}")


def build_info() -> dict:
    """How this installation was built, for a doctor: version, library, architectures, toolchain, ops with a CUDA kernel."""
    from ._version import __version__

    built = json.loads(BUILD_PATH.read_text()) if LIBRARY_PATH.exists() and BUILD_PATH.exists() else {}
    return {
        "version": __version__,
        "library": str(LIBRARY_PATH) if LIBRARY_PATH.exists() else None,
        "archs": built.get("archs", []),
        "nvcc": built.get("nvcc"),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "ops": list(op_names()),
        "cuda_ops": list(cuda_available_ops()),
    }
