# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the CPU and fake kernels. A message names op, tensor, what was expected, what came and the cure.

The CUDA kernels make the same checks in csrc/api/*.h.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch


class ArgumentError(ValueError, RuntimeError):
    """A wrong argument. Also a RuntimeError, which is what the CUDA kernels raise for the same mistake."""


def describe(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def fail(op: str, name: str, expected: str, got: str, remedy: str = "") -> NoReturn:
    raise ArgumentError(f"{op}: {name}: expected {expected}, got {got}" + (f"; {remedy}" if remedy else ""))


def check_ndim(op: str, name: str, tensor: torch.Tensor, ndim: int, layout: str) -> None:
    if tensor.dim() != ndim:
        fail(op, name, f"{ndim} dimensions {layout}", describe(tensor))


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: Sequence[int], layout: str) -> None:
    if tensor.dim() != len(shape) or any(a != b for a, b in zip(tensor.shape, shape, strict=True)):
        fail(op, name, f"{layout} = {list(shape)}", describe(tensor))


def check_dtype(op: str, name: str, tensor: torch.Tensor, dtypes: Iterable[torch.dtype], remedy: str = "") -> None:
    dtypes = tuple(dtypes)
    if tensor.dtype not in dtypes:
        fail(op, name, " or ".join(str(d).removeprefix("torch.") for d in dtypes), describe(tensor), remedy)


def check_device(op: str, device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            fail(op, name, f"a tensor on {device}", describe(tensor), f"move it with .to('{device}')")


def check_last_dim_contiguous(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, name, "stride 1 in the last dimension", f"strides {list(tensor.stride())}", "call .contiguous()")


def check_contiguous(op: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            fail(op, name, "a contiguous tensor", f"strides {list(tensor.stride())}", "call .contiguous()")


def check_range(op: str, name: str, value: int, low: int, high: int, remedy: str = "") -> None:
    if value < low or value > high:
        fail(op, name, f"{low}..{high}", str(value), remedy)


def check_power_of_two(op: str, name: str, value: int, high: int) -> None:
    if value < 1 or value > high or value & (value - 1):
        fail(op, name, f"a power of two in 1..{high}", str(value))
