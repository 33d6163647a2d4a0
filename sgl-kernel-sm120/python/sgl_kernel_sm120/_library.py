# SPDX-License-Identifier: Apache-2.0
"""The torch op namespace: schemas, CPU and fake kernels are registered here, CUDA kernels by the compiled library."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

NAMESPACE = "sgl_kernel_sm120"
LIBRARY_PATH = Path(__file__).with_name("libsgl_kernel_sm120.so")
NO_LIBRARY = "this installation has the CPU ops only; reinstall sgl-kernel-sm120 without SGL_KERNEL_SM120_CUDA=0"

_library = torch.library.Library(NAMESPACE, "DEF")
_names: list[str] = []
_cuda_names: set[str] = set()  # a set, so that torch.compile can trace the question


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
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    _cuda_names.update(name for name in _names if has_kernel(f"{NAMESPACE}::{name}", "CUDA"))
    return True


def has_cuda_kernel(name: str) -> bool:
    return name in _cuda_names


def cuda_available_ops() -> tuple[str, ...]:
    """Names of the ops that have a CUDA kernel in this installation."""
    return tuple(name for name in _names if has_cuda_kernel(name))


def require_kernel(name: str, tensor: torch.Tensor) -> None:
    """Raise NotImplementedError when `tensor` lives on a CUDA device and the op has no kernel for it."""
    if tensor.is_cuda and not has_cuda_kernel(name):
        no_kernel = "it has no CUDA kernel; move its inputs to the CPU"
        reason = no_kernel if LIBRARY_PATH.exists() else NO_LIBRARY
        raise NotImplementedError(f"{NAMESPACE}::{name}: expected CPU tensors, got {tensor.device}: {reason}")


def host_function(name: str, result, *arguments):
    """Function `sgl_kernel_sm120_<name>` of the compiled library, plain C without torch; None without the library."""
    if not LIBRARY_PATH.exists():
        return None
    function = getattr(ctypes.CDLL(str(LIBRARY_PATH)), f"{NAMESPACE}_{name}")
    function.restype, function.argtypes = result, arguments
    return function


def build_info() -> dict:
    """How this installation was built, for a doctor: version, architectures, compiler, ops with a CUDA kernel."""
    from ._version import __version__

    archs, nvcc = (host_function(name, ctypes.c_char_p) for name in ("archs", "nvcc_version"))
    return {
        "version": __version__,
        "library": str(LIBRARY_PATH) if LIBRARY_PATH.exists() else None,
        "archs": archs().decode().split() if archs else [],
        "nvcc": nvcc().decode() if nvcc else None,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "ops": list(op_names()),
        "cuda_ops": list(cuda_available_ops()),
    }
