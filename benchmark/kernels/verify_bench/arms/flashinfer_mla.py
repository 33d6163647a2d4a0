# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's FA2 paged MLA attention, as it configures itself on this card and with 100 KB of shared memory.

The second is what sm_120 gets. It has no tree mask, so it is checked with all rows visible. Its host planning is not
timed.
"""

from __future__ import annotations

import ctypes
import json

import torch

from ..inputs import Problem
from .base import Arm, Prepared, Unavailable, current_stream, load_native, need_cuda, pointer

PLAN_WORDS = 18
FLOAT_WORKSPACE, INT_WORKSPACE = 256 << 20, 8 << 20


class FlashInfer(Arm):
    tree_mask = False

    def version(self) -> str | None:
        info = self.context.native / "build_info.json"
        return json.loads(info.read_text()).get("flashinfer") if info.is_file() else None

    def prepare(self, problem: Problem) -> Prepared:
        need_cuda(problem)
        lib = load_native(self.context, self.name_of_library)
        lib.flashinfer_mla_error.restype = ctypes.c_char_p
        scalar = (ctypes.c_int, ctypes.c_float, ctypes.c_float)
        lib.flashinfer_mla_run.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 7 + [*scalar, ctypes.c_void_p]

        def checked(code: int) -> None:
            if code:
                raise Unavailable(f"FlashInfer: {lib.flashinfer_mla_error().decode()} (code {code})")

        s, device = problem.shape, problem.device
        out = problem.new_out()
        kv_indices = problem.kv_indices.to(torch.int32)
        float_ws = torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        int_ws = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)
        pinned = torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=True)
        qo_indptr = torch.arange(0, s.bs * s.s_q + 1, s.s_q, dtype=torch.int32)
        kv_indptr = problem.kv_indptr.cpu()
        kv_len = kv_indptr.diff().contiguous()
        plan = (ctypes.c_int64 * PLAN_WORDS)()
        checked(
            lib.flashinfer_mla_plan(
                pointer(qo_indptr),
                pointer(kv_indptr),
                pointer(kv_len),
                s.bs,
                s.h_q,
                pointer(float_ws),
                ctypes.c_int64(FLOAT_WORKSPACE),
                pointer(int_ws),
                pointer(pinned),
                ctypes.c_int64(INT_WORKSPACE),
                plan,
                current_stream(),
            )
        )
        torch.cuda.synchronize()
        fp8 = int(s.kv_dtype == "fp8")

        def run(layer: int) -> None:
            checked(
                lib.flashinfer_mla_run(
                    fp8,
                    plan,
                    float_ws.data_ptr(),
                    int_ws.data_ptr(),
                    problem.q.data_ptr(),
                    problem.kv[layer].data_ptr(),
                    kv_indices.data_ptr(),
                    out.data_ptr(),
                    s.h_q,
                    problem.sm_scale,
                    1.0,
                    current_stream(),
                )
            )

        run.keep = (pinned,)  # the graph's copies of pointers do not keep tensors alive; this closure does
        return Prepared(run, out)


class Full(FlashInfer):
    name = "flashinfer_full"
    label = "FlashInfer*"
    name_of_library = "flashinfer_mla_full"
    note = "FlashInfer FA2 MLA, this card's shared memory; no tree mask"


class Limited(FlashInfer):
    name = "flashinfer_100k"
    label = "FlashInfer 100 KB*"
    name_of_library = "flashinfer_mla_100k"
    note = "FlashInfer FA2 MLA as on sm_120 (100 KB); no tree mask"
