# SPDX-License-Identifier: Apache-2.0
"""mla_tree_verify: attention of s_q draft rows over prefix + draft KV rows of an MLA cache, with a tree mask."""

import ctypes
import functools
import itertools

import torch

from . import _library
from ._check import (
    check_contiguous,
    check_device,
    check_dtype,
    check_last_dim_contiguous,
    check_ndim,
    check_power_of_two,
    check_range,
    check_shape,
    describe,
    fail,
)
from .reference import BITS_PER_WORD, D_QK, D_V, MaskLayout, mla_tree_verify_reference

MAX_S_Q = 128
MAX_H_Q = 128
MAX_B = 256
MAX_PAGE_SIZE = 64

_OP = "mla_tree_verify"
_PLAN_OP = "mla_tree_verify_plan"
_INDEX_DTYPES = (torch.int32, torch.int64)
_BYTE_DTYPES = (torch.bool, torch.uint8)
_FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def mla_tree_verify(
    q, kv_cache, kv_indptr, kv_indices, *, sm_scale,
    draft_slots=None, tree_mask=None, mask_layout=MaskLayout.CAUSAL, mask_indptr=None,
    logit_cap=0.0, k_scale=1.0, v_scale=1.0, page_size=1,
    out=None, lse=None, workspace=None, plan=None, status=None,
):  # fmt: skip
    """softmax(sm_scale * k_scale * q k^T, tree mask) (v_scale * v), all rows and heads at once. Returns out.

    Inputs
      q            bf16 [b, s_q, h_q, 576], last dimension contiguous, other strides free; on the CPU any float dtype
      kv_cache     [num_slots, 576] or [num_slots, 1, 576], bf16 or float8_e4m3fn (CPU: any float dtype), row stride
                   free; the first 512 columns of a row are its value
      kv_indptr    int32 or int64 [b + 1]: request r's list is kv_indices[kv_indptr[r] : kv_indptr[r + 1]]
      kv_indices   int32 or int64 [any]: KV slots. Without draft_slots the last s_q entries of a list are the draft
                   slots and prefix = max(length - s_q, 0); with draft_slots the list holds the prefix alone
      draft_slots  [b, s_q], dtype of kv_indices
      tree_mask    see MaskLayout; mask_indptr, int64 [b] or [b + 1], belongs to FULL alone
      page_size    a promise: every aligned group of page_size entries of a list is contiguous in slots and starts at a
                   multiple of page_size (the last group may be partial)
      sm_scale, logit_cap (0 = none), k_scale, v_scale are host numbers
    Outputs and scratch, allocated here when None (inside torch.compile on CUDA give workspace and plan)
      out          dtype of q, [b, s_q, h_q, 512], contiguous
      lse          fp32 [b, s_q, h_q], natural logarithm; written only when given
      workspace    uint8, at least mla_tree_verify_workspace_bytes(b, s_q, h_q) bytes; need not be cleared
      plan         what mla_tree_verify_plan returned for these lengths; shared by all layers of a step
      status       int32 [1]; Status bits are ORed into it. Clear it before the first call

    A row that sees no key gives out 0 and lse -inf. Lengths are read on the device, and the launch depends only on
    shapes, so a captured graph may be replayed with other lengths. On the CPU this is mla_tree_verify_reference.
    """
    _library.require_kernel(_OP, q)
    check_ndim(_OP, "q", q, 4, "[b, s_q, h_q, 576]")
    b, s_q, h_q, _ = q.shape
    if out is None:
        out = q.new_empty(b, s_q, h_q, D_V)
    if workspace is None:
        workspace = q.new_empty(mla_tree_verify_workspace_bytes(b, s_q, h_q, device=q.device), dtype=torch.uint8)
    if plan is None and q.is_cuda:
        plan = mla_tree_verify_plan(
            kv_indptr, kv_indices.numel(), s_q=s_q, h_q=h_q, has_draft_slots=draft_slots is not None
        )
    absent = functools.partial(q.new_empty, 0)
    _mla_tree_verify(
        q, kv_cache, kv_indptr, kv_indices,
        absent(dtype=kv_indices.dtype) if draft_slots is None else draft_slots,
        absent(dtype=torch.uint8) if tree_mask is None else tree_mask,
        absent(dtype=torch.int64) if mask_indptr is None else mask_indptr,
        absent(dtype=torch.int32) if plan is None else plan,
        out,
        absent(dtype=torch.float32) if lse is None else lse,
        workspace,
        absent(dtype=torch.int32) if status is None else status,
        int(mask_layout), page_size, float(sm_scale), float(logit_cap), float(k_scale), float(v_scale),
    )  # fmt: skip
    return out


def mla_tree_verify_workspace_bytes(b, s_q, h_q, *, device="cuda") -> int:
    """Bytes of workspace for any batch of at most b requests, s_q rows and h_q heads, whatever the lengths."""
    device = torch.device(device)
    return 0 if device.type != "cuda" else _host_function("workspace_bytes")(b, s_q, h_q, _num_sms(device))


def mla_tree_verify_plan(kv_indptr, num_indices, *, s_q, h_q, has_draft_slots=False, plan=None):
    """The device-side work plan of one step: how the KV lists are split over the SMs. int32, shared by all layers.

    kv_indptr as for mla_tree_verify, num_indices = kv_indices.numel(). `plan` is written in place when given. The CPU
    needs no plan: its plan is empty.
    """
    _library.require_kernel(_PLAN_OP, kv_indptr)
    if plan is None:
        b = kv_indptr.shape[0] - 1
        ints = _host_function("plan_ints")(b, s_q, h_q, _num_sms(kv_indptr.device)) if kv_indptr.is_cuda else 0
        plan = kv_indptr.new_empty(ints, dtype=torch.int32)
    _mla_tree_verify_plan(kv_indptr, plan, num_indices, s_q, h_q, has_draft_slots)
    return plan


@functools.cache
def _host_function(name):
    """A planning function of the compiled library, int64 f(int32 b, s_q, h_q, num_sms); csrc/ops.cpp exports it."""
    function = _library.host_function(f"{_OP}_{name}", ctypes.c_int64, *[ctypes.c_int32] * 4)
    if function is None:
        raise NotImplementedError(f"{_library.NAMESPACE}::{_OP} on a CUDA device: {_library.NO_LIBRARY}")
    return function


def _num_sms(device) -> int:
    return _num_sms_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _num_sms_of(index) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _check(
    q, kv_cache, kv_indptr, kv_indices, draft_slots, tree_mask, mask_indptr, plan, out, lse, workspace, status,
    mask_layout, page_size, sm_scale, logit_cap, k_scale, v_scale,
):  # fmt: skip
    check_ndim(_OP, "q", q, 4, "[b, s_q, h_q, 576]")
    b, s_q, h_q, _ = q.shape
    check_shape(_OP, "q", q, (b, s_q, h_q, D_QK), "[b, s_q, h_q, 576]")
    if kv_cache.dim() == 3:
        check_shape(_OP, "kv_cache", kv_cache, (kv_cache.shape[0], 1, D_QK), "[num_slots, 1, 576]")
    else:
        check_ndim(_OP, "kv_cache", kv_cache, 2, "[num_slots, 576] (or [num_slots, 1, 576])")
        check_shape(_OP, "kv_cache", kv_cache, (kv_cache.shape[0], D_QK), "[num_slots, 576]")
    check_range(_OP, "q: b", b, 1, MAX_B)
    check_range(_OP, "q: s_q", s_q, 1, MAX_S_Q)
    check_range(_OP, "q: h_q", h_q, 1, MAX_H_Q)
    if kv_cache.shape[0] == 0:
        fail(_OP, "kv_cache", "at least one slot", describe(kv_cache))
    check_power_of_two(_OP, "page_size", page_size, MAX_PAGE_SIZE)
    if logit_cap < 0:
        fail(_OP, "logit_cap", "0 (none) or a positive number", str(logit_cap))

    check_device(
        _OP, q.device, kv_cache=kv_cache, kv_indptr=kv_indptr, kv_indices=kv_indices, draft_slots=draft_slots,
        tree_mask=tree_mask, mask_indptr=mask_indptr, plan=plan, out=out, lse=lse, workspace=workspace, status=status,
    )  # fmt: skip

    check_dtype(_OP, "q", q, _FLOAT_DTYPES)
    check_dtype(_OP, "kv_cache", kv_cache, (*_FLOAT_DTYPES, torch.float8_e4m3fn))
    check_dtype(_OP, "kv_indptr", kv_indptr, _INDEX_DTYPES)
    check_dtype(_OP, "kv_indices", kv_indices, _INDEX_DTYPES)
    check_dtype(_OP, "draft_slots", draft_slots, (kv_indices.dtype,), "kv_indices and draft_slots share one dtype")
    check_dtype(_OP, "mask_indptr", mask_indptr, (torch.int64,))
    check_dtype(_OP, "plan", plan, (torch.int32,))
    check_dtype(_OP, "lse", lse, (torch.float32,))
    check_dtype(_OP, "workspace", workspace, (torch.uint8,))
    check_dtype(_OP, "status", status, (torch.int32,))
    check_dtype(_OP, "out", out, (q.dtype,), "out takes the dtype of q")

    check_shape(_OP, "kv_indptr", kv_indptr, (b + 1,), "[b + 1]")
    check_ndim(_OP, "kv_indices", kv_indices, 1, "[any]")
    if draft_slots.numel():
        check_shape(_OP, "draft_slots", draft_slots, (b, s_q), "[b, s_q]")
    check_shape(_OP, "out", out, (b, s_q, h_q, D_V), "[b, s_q, h_q, 512]")
    if lse.numel():
        check_shape(_OP, "lse", lse, (b, s_q, h_q), "[b, s_q, h_q]")
    if status.numel():
        check_shape(_OP, "status", status, (1,), "[1]")
    _check_mask(b, s_q, tree_mask, mask_layout, mask_indptr)

    check_last_dim_contiguous(_OP, "q", q)
    check_last_dim_contiguous(_OP, "kv_cache", kv_cache)
    check_contiguous(
        _OP, kv_indptr=kv_indptr, kv_indices=kv_indices, draft_slots=draft_slots, tree_mask=tree_mask,
        mask_indptr=mask_indptr, out=out, lse=lse, workspace=workspace, plan=plan, status=status,
    )  # fmt: skip


def _check_mask(b, s_q, tree_mask, mask_layout, mask_indptr):
    check_range(_OP, "mask_layout", mask_layout, min(MaskLayout), max(MaskLayout), "use a MaskLayout member")
    layout = MaskLayout(mask_layout)
    if layout == MaskLayout.CAUSAL:
        if tree_mask.numel():
            fail(
                _OP, "tree_mask", "None for MaskLayout.CAUSAL", describe(tree_mask), "pass the mask_layout of the mask"
            )
    elif layout == MaskLayout.QLEN:
        check_dtype(_OP, "tree_mask", tree_mask, _BYTE_DTYPES, "MaskLayout.QLEN holds one byte a key")
        check_shape(_OP, "tree_mask", tree_mask, (b, s_q, s_q), "[b, s_q, s_q]")
    elif layout == MaskLayout.BITS:
        words = (s_q + BITS_PER_WORD - 1) // BITS_PER_WORD
        check_dtype(_OP, "tree_mask", tree_mask, (torch.int64,), "make it with pack_tree_mask")
        check_shape(_OP, "tree_mask", tree_mask, (b, s_q, words), "[b, s_q, ceil(s_q / 64)]")
    else:
        check_dtype(_OP, "tree_mask", tree_mask, _BYTE_DTYPES, "MaskLayout.FULL holds one byte a key")
        check_ndim(_OP, "tree_mask", tree_mask, 1, "[sum of s_q * (prefix + s_q)]")
        if mask_indptr.dim() != 1 or mask_indptr.shape[0] not in (b, b + 1):
            fail(_OP, "mask_indptr", f"[b] or [b + 1] with b = {b}", describe(mask_indptr), "slice it to the batch")
    if layout != MaskLayout.FULL and mask_indptr.numel():
        fail(_OP, "mask_indptr", "None unless MaskLayout.FULL", describe(mask_indptr))


def _check_page_promise(kv_indptr, kv_indices, draft_slots, page_size):
    """The promise of `page_size`, checked where reading the lists costs little: on the CPU."""
    pointers = kv_indptr.tolist()
    for r, (begin, end) in enumerate(itertools.pairwise(pointers)):
        slots = kv_indices[begin:end].long()
        if draft_slots.numel():
            slots = torch.cat([slots, draft_slots[r].long()])
        position = torch.arange(slots.numel())
        first = slots[position - position % page_size]
        broken = (first % page_size != 0) | (slots != first + position % page_size)
        if bool(broken.any()):
            at = int(broken.int().argmax())
            fail(
                _OP, "kv_indices", f"whole pages of {page_size} slots",
                f"slot {int(slots[at])} at entry {at} of request {r}", "pass page_size=1, which promises nothing",
            )  # fmt: skip


def _cpu(
    q, kv_cache, kv_indptr, kv_indices, draft_slots, tree_mask, mask_indptr, plan, out, lse, workspace, status,
    mask_layout, page_size, sm_scale, logit_cap, k_scale, v_scale,
):  # fmt: skip
    _check(
        q, kv_cache, kv_indptr, kv_indices, draft_slots, tree_mask, mask_indptr, plan, out, lse, workspace, status,
        mask_layout, page_size, sm_scale, logit_cap, k_scale, v_scale,
    )  # fmt: skip
    if page_size > 1:
        _check_page_promise(kv_indptr, kv_indices, draft_slots, page_size)
    mla_tree_verify_reference(
        q, kv_cache, kv_indptr, kv_indices,
        draft_slots=draft_slots if draft_slots.numel() else None,
        tree_mask=tree_mask, mask_layout=MaskLayout(mask_layout), mask_indptr=mask_indptr,
        sm_scale=sm_scale, logit_cap=logit_cap, k_scale=k_scale, v_scale=v_scale,
        out=out, lse=lse if lse.numel() else None, status=status if status.numel() else None,
    )  # fmt: skip


def _check_plan(kv_indptr, plan, num_indices, s_q, h_q, has_draft_slots):
    check_ndim(_PLAN_OP, "kv_indptr", kv_indptr, 1, "[b + 1]")
    check_range(_PLAN_OP, "kv_indptr: b", kv_indptr.shape[0] - 1, 1, MAX_B)
    check_range(_PLAN_OP, "s_q", s_q, 1, MAX_S_Q)
    check_range(_PLAN_OP, "h_q", h_q, 1, MAX_H_Q)
    check_device(_PLAN_OP, kv_indptr.device, plan=plan)
    check_dtype(_PLAN_OP, "kv_indptr", kv_indptr, _INDEX_DTYPES)
    check_dtype(_PLAN_OP, "plan", plan, (torch.int32,))
    check_contiguous(_PLAN_OP, kv_indptr=kv_indptr, plan=plan)


_mla_tree_verify = _library.register(
    _OP,
    "Tensor q, Tensor kv_cache, Tensor kv_indptr, Tensor kv_indices, Tensor draft_slots, Tensor tree_mask, "
    "Tensor mask_indptr, Tensor plan, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) workspace, Tensor(d!) status, "
    "int mask_layout, int page_size, float sm_scale, float logit_cap, float k_scale, float v_scale",
    cpu=_cpu,
    fake=_check,
)
_mla_tree_verify_plan = _library.register(
    _PLAN_OP,
    "Tensor kv_indptr, Tensor(a!) plan, int num_indices, int s_q, int h_q, bool has_draft_slots",
    cpu=_check_plan,
    fake=_check_plan,
)
