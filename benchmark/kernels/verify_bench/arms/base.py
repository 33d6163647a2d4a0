# SPDX-License-Identifier: Apache-2.0
"""What an arm is: a name, what it can run, and how to get a callable for one problem."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from ..inputs import Problem
from ..shapes import Shape


class Unavailable(Exception):
    """This arm cannot run here, or not at this shape; the message is the reason that the report prints."""


@dataclasses.dataclass
class Prepared:
    """run(layer) is one attention call over that layer's KV pool, written to `out` [b, s_q, h_q, 512]."""

    run: Callable[[int], None]
    out: torch.Tensor
    begin_step: Callable[[], None] | None = None  # once a step, before the layers; inside the timed graph
    graph: bool = True  # can be captured


@dataclasses.dataclass(frozen=True)
class Context:
    """Where the arms find what is not a Python package."""

    native: Path  # libraries of build_native.py
    sglang_kernels: Path  # upstream's kernel files as pack_gpu.py writes them, for a host without sglang


class Arm:
    name: str
    label: str  # in tables and plots; a star there says that the arm has no tree mask
    note: str
    tree_mask = True  # False: computes with every listed row visible, and is checked against that
    # Largest relative error, whole output and worst row, by KV dtype. A bf16 output of fp32 accumulation lies near
    # 2e-3.
    max_error = {"bf16": (6e-3, 2e-2), "fp8": (6e-3, 2e-2)}

    def __init__(self, context: Context):
        self.context = context

    def unsupported(self, shape: Shape) -> str | None:
        """The reason this shape is outside the arm, or None."""
        return None

    def prepare(self, problem: Problem) -> Prepared:
        raise NotImplementedError

    def version(self) -> str | None:
        """The version of what the arm runs, for the report's header."""
        return None


def load_native(context: Context, name: str) -> ctypes.CDLL:
    path = context.native / f"lib{name}.so"
    if not path.is_file():
        raise Unavailable(f"no {path.name} in {context.native}: run build_native.py")
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise Unavailable(f"{path.name} does not load: {e}") from e


def lack_of_resources(error: Exception) -> str | None:
    """The reason, if the error says that the card has too little for this arm and not that the arm is broken."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory"
    if type(error).__name__ == "OutOfResources":  # Triton's, without importing Triton
        return str(error).splitlines()[0]
    return None


def need_cuda(problem: Problem) -> None:
    if problem.device.type != "cuda":
        raise Unavailable("needs a CUDA device")


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def current_stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
