# SPDX-License-Identifier: Apache-2.0
"""The source of mla_tree_verify (plan, main and merge kernel), run on the CPU thread by thread, against the reference.

on_host_verify/ stands in for csrc/arch/: warps are fibers that take turns in random order, copies land as late as their
barrier allows, matrix fragments are exchanged as on the GPU. It finds wrong results, barriers that are never
completed, and races that some order of the warps shows. It says nothing about speed or about ptxas.
"""

import ctypes
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from kernels.cases import CASES, Case, make_inputs
from kernels.host_build import load_host_build

from sgl_kernel_sm120 import MaskLayout, mla_tree_verify_reference

ON_HOST = Path(__file__).parent / "on_host_verify"
NAMES = [
    "ragged",
    "bits-random",
    "fp8-scales",
    "growing",
    "empty-and-short",
    "tiny-values",
    "index-int32-indptr-int64-split",
]
BY_NAME = {case.name: case for case in CASES}
P, I32, I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Params(ctypes.Structure):
    """MlaTreeVerifyParams of csrc/params.h."""

    _fields_ = [
        *[
            (n, P)
            for n in ("q", "kv_cache", "kv_indptr", "kv_indices", "draft_slots", "tree_mask", "mask_indptr", "plan")
        ],
        *[(n, P) for n in ("out", "lse", "workspace", "status")],
        *[(n, I64) for n in ("q_stride_b", "q_stride_s", "q_stride_h", "kv_stride", "num_slots", "num_indices")],
        *[(n, I64) for n in ("mask_bytes", "workspace_bytes", "plan_ints")],
        *[(n, I32) for n in ("b", "s_q", "h_q", "page_size", "num_sms", "mask_layout")],
        *[(n, ctypes.c_bool) for n in ("kv_is_fp8", "indptr_is_64", "indices_are_64")],
        *[(n, ctypes.c_float) for n in ("score_scale", "logit_cap", "v_scale")],
    ]


class PlanParams(ctypes.Structure):
    """MlaTreeVerifyPlanParams of csrc/params.h."""

    _fields_ = [
        *[("kv_indptr", P), ("plan", P), ("num_indices", I64), ("plan_ints", I64)],
        *[(n, I32) for n in ("b", "s_q", "h_q", "num_sms")],
        *[("indptr_is_64", ctypes.c_bool), ("has_draft_slots", ctypes.c_bool)],
    ]


def build(folder, *flags):
    loaded = load_host_build(ON_HOST / "kernel.cpp", folder / "verify.so", "-fno-extern-tls-init", *flags)
    loaded.host_workspace_bytes.restype = loaded.host_plan_ints.restype = I64
    sizes = (ctypes.c_int * 2)()
    loaded.host_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(Params), ctypes.sizeof(PlanParams)]
    return loaded


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("on_host_verify"))


def aligned(size: int) -> torch.Tensor:
    """uint8 [size], all 0xff (NaN in fp16 and fp32), 16-byte aligned."""
    storage = torch.full((size + 16,), 0xFF, dtype=torch.uint8)
    return storage[-storage.data_ptr() % 16 :][:size]


def pointer(tensor):
    return tensor.data_ptr() if tensor is not None and tensor.numel() else None


def run(library, case, num_sms: int, seed: int):
    """-> out [b, s_q, h_q, 512], lse [b, s_q, h_q], status, the arguments of the call."""
    a = make_inputs(case).arguments
    q, cache, indptr, indices = a["q"], a["kv_cache"], a["kv_indptr"], a["kv_indices"]
    b, s_q, h_q, _ = q.shape
    workspace = aligned(library.host_workspace_bytes(b, s_q, h_q, num_sms))
    plan = aligned(4 * library.host_plan_ints(b))
    out = torch.full((b, s_q, h_q, 512), math.nan, dtype=torch.bfloat16)
    lse, status = torch.full((b, s_q, h_q), math.nan), torch.zeros(1, dtype=torch.int32)
    wide, split = indptr.dtype == torch.int64, "draft_slots" in a
    ints = plan.numel() // 4
    plan_params = PlanParams(pointer(indptr), pointer(plan), indices.numel(), ints, b, s_q, h_q, num_sms, wide, split)
    library.host_plan(ctypes.byref(plan_params))
    mask_bytes = a["tree_mask"].numel() if case.layout == MaskLayout.FULL else 0
    params = Params(
        *map(pointer, (q, cache, indptr, indices)),
        *(pointer(a.get(n)) for n in ("draft_slots", "tree_mask", "mask_indptr")), pointer(plan),
        *map(pointer, (out, lse, workspace, status)),
        *q.stride()[:3], cache.stride(0), cache.shape[0], indices.numel(), mask_bytes, workspace.numel(), ints,
        b, s_q, h_q, case.page_size, num_sms, int(case.layout),
        case.kv == "fp8", wide, indices.dtype == torch.int64,
        a["sm_scale"] * case.k_scale, case.logit_cap, case.v_scale,
    )  # fmt: skip
    library.host_verify(ctypes.byref(params), ctypes.c_uint(seed))
    return out, lse, int(status), a


@pytest.mark.parametrize(("name", "num_sms"), [*((name, 6) for name in NAMES), ("ragged", 13)])
def test_matches_the_reference(library, name, num_sms):
    out, lse, status, arguments = run(library, BY_NAME[name], num_sms, seed=num_sms)
    want, want_lse = torch.empty_like(out), torch.empty_like(lse)
    mla_tree_verify_reference(**arguments, out=want, lse=want_lse)
    assert status == 0
    assert (out.double() - want.double()).norm() <= 4e-3 * want.double().norm()
    torch.testing.assert_close(out.float(), want.float(), rtol=3e-2, atol=2e-2 * float(want.float().abs().max()))
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=2e-2)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_slow_warp_among_many_short_segments(library, kv):
    """A score warp that comes late must find its own phase although the next segment's Q is scaled (fp8), too."""
    case = Case("short", (5, 7, 3, 40, 0, 20, 90, 5), s_q=2, h_q=4, kv=kv)
    for seed in range(10):
        out, _, status, arguments = run(library, case, num_sms=3, seed=seed)
        want = torch.empty_like(out)
        mla_tree_verify_reference(**arguments, out=want)
        assert status == 0
        assert (out.double() - want.double()).norm() <= 4e-3 * want.double().norm()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("kv", "s_q"), [("bf16", 9), ("fp8", 9), ("fp8", 1)])
def test_blocks_with_several_long_segments(library, kv, s_q, seed):
    """A warp without a row block (fp8: 3 of 4 softmax warps have one, or 1 of 4) must not mistake a round of the ring
    for a later one, and a slow role must not miss one."""
    case = Case("segments", (200, 290, 180), s_q=s_q, kv=kv)
    out, _, status, arguments = run(library, case, num_sms=2 if s_q == 1 else 4, seed=seed)
    want = torch.empty_like(out)
    mla_tree_verify_reference(**arguments, out=want)
    assert status == 0
    assert (out.double() - want.double()).norm() <= 4e-3 * want.double().norm()


def test_the_order_of_warps_does_not_change_a_bit(library):
    case = dataclasses.replace(BY_NAME["ragged"], prefixes=(200, 1, 40))
    first, *others = (run(library, case, 7, seed)[0].view(torch.int16) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_the_build_for_racecheck_gives_the_same_bits(library, tmp_path):
    """Every lane arrives at the barriers there: each must expect 32 times as many."""
    every_lane = build(tmp_path, "-DSGL_KERNEL_EVERY_LANE_ARRIVES")
    for kv in ("bf16", "fp8"):
        case = Case("short", (5, 40, 0, 20), s_q=3, kv=kv)
        first, second = (run(lib, case, num_sms=2, seed=1)[0].view(torch.int16) for lib in (library, every_lane))
        assert torch.equal(first, second)
