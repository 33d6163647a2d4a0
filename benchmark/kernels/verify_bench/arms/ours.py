# SPDX-License-Identifier: Apache-2.0
"""This project's kernel (the CPU op on a CPU), and the fp32 torch reference that specifies it."""

from __future__ import annotations

import torch

from ..inputs import Problem
from .base import Arm, Prepared, Unavailable


def package():
    try:
        import sgl_kernel_sm120
    except (ImportError, OSError) as e:
        raise Unavailable(f"sgl_kernel_sm120 does not import: {e}") from e
    return sgl_kernel_sm120


class Ours(Arm):
    name = "ours"
    label = "ours"
    note = "sgl_kernel_sm120.mla_tree_verify, plan and merge included"

    def version(self) -> str | None:
        try:
            return package().__version__
        except Unavailable:
            return None

    def prepare(self, problem: Problem) -> Prepared:
        kernels, s = package(), problem.shape
        on_gpu = problem.device.type == "cuda"
        if on_gpu and "mla_tree_verify" not in kernels.cuda_available_ops():
            raise Unavailable("this sgl_kernel_sm120 has no CUDA kernel of mla_tree_verify")
        out = problem.new_out()
        workspace = plan = begin_step = None
        if on_gpu:
            size = kernels.mla_tree_verify_workspace_bytes(s.bs, s.s_q, s.h_q, device=problem.device)
            workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=problem.device)  # NaN in every fp32 word
            count = problem.kv_indices.numel()
            plan = kernels.mla_tree_verify_plan(problem.kv_indptr, count, s_q=s.s_q, h_q=s.h_q)

            def begin_step() -> None:
                kernels.mla_tree_verify_plan(problem.kv_indptr, count, s_q=s.s_q, h_q=s.h_q, plan=plan)

        def run(layer: int) -> None:
            kernels.mla_tree_verify(
                problem.q, problem.kv[layer], problem.kv_indptr, problem.kv_indices, sm_scale=problem.sm_scale,
                tree_mask=problem.mask_words, mask_layout=kernels.MaskLayout.BITS, page_size=s.page_size,
                out=out, workspace=workspace, plan=plan,
            )  # fmt: skip

        return Prepared(run, out, begin_step)


class Reference(Arm):
    name = "torch_reference"
    label = "torch fp32"
    note = "the fp32 specification, eager torch"

    def prepare(self, problem: Problem) -> Prepared:
        kernels, s = package(), problem.shape
        out = problem.new_out()

        def run(layer: int) -> None:
            kernels.mla_tree_verify_reference(
                problem.q, problem.kv[layer], problem.kv_indptr, problem.kv_indices, sm_scale=problem.sm_scale,
                tree_mask=problem.mask_words, mask_layout=kernels.MaskLayout.BITS, page_size=s.page_size, out=out,
            )  # fmt: skip

        return Prepared(run, out, graph=False)
