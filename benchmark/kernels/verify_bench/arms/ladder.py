# SPDX-License-Identifier: Apache-2.0
"""A ladder of plain kernels, one block per (query row, KV split): 16 splits, 64 splits, then 128-bit loads."""

from __future__ import annotations

import ctypes

import torch

from .. import counters
from ..inputs import Problem
from ..shapes import Shape
from .base import Arm, Prepared, current_stream, load_native, need_cuda


class Ladder(Arm):
    vector: int  # bf16 elements a load
    splits: int

    def unsupported(self, shape: Shape) -> str | None:
        return None if shape.kv_dtype == "bf16" else "bf16 KV only"

    def prepare(self, problem: Problem) -> Prepared:
        need_cuda(problem)
        lib = load_native(self.context, "ladder")
        lib.ladder_run.argtypes = (
            [ctypes.c_int] * 2 + [ctypes.c_void_p] * 8 + [ctypes.c_int] * 3 + [ctypes.c_float, ctypes.c_void_p]
        )
        s, device = problem.shape, problem.device
        out = problem.new_out()
        rows = s.s_q * s.h_q
        partial = torch.empty(s.bs, self.splits, rows, counters.D_V, dtype=torch.float32, device=device)
        max_sum = torch.empty(s.bs, self.splits, rows, 2, dtype=torch.float32, device=device)

        def run(layer: int) -> None:
            code = lib.ladder_run(
                self.vector,
                self.splits,
                problem.q.data_ptr(),
                problem.kv[layer].data_ptr(),
                problem.kv_indptr.data_ptr(),
                problem.kv_indices.data_ptr(),
                problem.mask_words.data_ptr(),
                partial.data_ptr(),
                max_sum.data_ptr(),
                out.data_ptr(),
                s.bs,
                s.s_q,
                s.h_q,
                problem.sm_scale,
                current_stream(),
            )
            if code:
                raise RuntimeError(f"{self.name}: CUDA error {code}")

        return Prepared(run, out)


class Loads32Splits16(Ladder):
    name, vector, splits = "ladder_32bit_s16", 2, 16
    label = "32-bit, 16 splits"
    note = "plain kernel, 32-bit loads, 16 splits"


class Loads32Splits64(Ladder):
    name, vector, splits = "ladder_32bit_s64", 2, 64
    label = "32-bit, 64 splits"
    note = "plain kernel, 32-bit loads, 64 splits"


class Loads128Splits64(Ladder):
    name, vector, splits = "ladder_128bit_s64", 8, 64
    label = "128-bit, 64 splits"
    note = "plain kernel, 128-bit loads, 64 splits"
