# SPDX-License-Identifier: Apache-2.0
"""Reproducer files: one verify call of one request in one layer, as validate mode dumps it on a mismatch.

A safetensors file "kdtree-mismatch-*.safetensors" with the tensors

  q              [s_q, h_q, 576] bf16    queries of the tree, root first
  kv_rows        [n, 576] bf16 or fp8    KV rows in the order of kv_indices, already gathered
  kv_indptr      [2] int64               0, n
  kv_indices     [n] int64               the slots the rows came from; the last s_q are the draft slots
  tree_mask      by mask_layout          QLEN uint8 [s_q, s_q]; BITS int64 [s_q, ceil(s_q / 64)];
                                         FULL uint8 [s_q * n]; absent for CAUSAL
  out_reference  [s_q, h_q, 512] bf16    what upstream's kernel returned
  out_kdtree     [s_q, h_q, 512] bf16    what ours returned

and the string metadata format = "kdtree-reproducer-1", layer, context, s_q, h_q, page_size,
mask_layout, sm_scale, logit_cap, k_scale, v_scale, tp_rank, and for the reader request_id,
max_abs, mean_rel, versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sglang.kdtree.errors import KitError
from sglang.kdtree.optional import require
from sglang.kdtree.result import looks_of

FORMAT = "kdtree-reproducer-1"
FILE_PATTERN = "kdtree-mismatch-*.safetensors"
TENSORS = ("q", "kv_rows", "kv_indptr", "kv_indices", "out_reference", "out_kdtree")
INTEGERS = ("layer", "context", "s_q", "h_q", "page_size")
NUMBERS = ("sm_scale", "logit_cap", "k_scale", "v_scale")
MASK_LAYOUTS = ("CAUSAL", "QLEN", "BITS", "FULL")


class Reproducer(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    tensors: dict[str, Any]
    layer: int
    context: int
    s_q: int
    h_q: int
    page_size: int
    mask_layout: str
    sm_scale: float
    logit_cap: float
    k_scale: float
    v_scale: float


def load_reproducer(path: Path) -> Reproducer:
    safetensors = require("safetensors", needed_for="reproducers")
    require("torch", needed_for="reproducers")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise unusable(path, "a complete safetensors file", looks_of(path)) from error
    if meta.get("format") != FORMAT:
        raise unusable(path, f"metadata format = {FORMAT}", repr(meta.get("format")))
    missing = [name for name in (*TENSORS,) if name not in tensors] + [
        name for name in (*INTEGERS, *NUMBERS, "mask_layout") if name not in meta
    ]
    if missing:
        raise unusable(
            path,
            "all tensors and metadata of the format",
            f"without {', '.join(missing)}",
        )
    try:
        values = {name: int(meta[name]) for name in INTEGERS} | {
            name: float(meta[name]) for name in NUMBERS
        }
    except ValueError as error:
        raise unusable(path, "numbers in the metadata", str(error)) from error
    reproducer = Reproducer(
        path=path, tensors=tensors, mask_layout=meta["mask_layout"], **values
    )
    check_shapes(reproducer)
    return reproducer


def unusable(path: Path, expected: str, got: str) -> KitError:
    return KitError(
        what=f"--dump {path}",
        expected=expected,
        got=got,
        remedy="Dump it again in validate mode; the format is described in sglang/kdtree/probe/reproducer.py.",
    )


def check_shapes(r: Reproducer) -> None:
    n, d_qk, d_v = r.tensors["kv_rows"].shape[0], 576, 512
    wanted = {
        "q": (r.s_q, r.h_q, d_qk),
        "kv_rows": (n, d_qk),
        "kv_indptr": (2,),
        "kv_indices": (n,),
        "out_reference": (r.s_q, r.h_q, d_v),
        "out_kdtree": (r.s_q, r.h_q, d_v),
    }
    if r.mask_layout not in MASK_LAYOUTS:
        raise unusable(
            r.path, f"mask_layout of {', '.join(MASK_LAYOUTS)}", repr(r.mask_layout)
        )
    mask_shape = {
        "QLEN": (r.s_q, r.s_q),
        "BITS": (r.s_q, -(-r.s_q // 64)),
        "FULL": (r.s_q * n,),
    }.get(r.mask_layout)
    if mask_shape:
        wanted["tree_mask"] = mask_shape
    for name, shape in wanted.items():
        if name not in r.tensors:
            raise unusable(r.path, f"a tensor {name}", "none")
        if tuple(r.tensors[name].shape) != shape:
            raise unusable(
                r.path, f"{name} of shape {shape}", str(tuple(r.tensors[name].shape))
            )


def recompute(r: Reproducer) -> Any:
    """The output in float32 by the kernel package's reference, [s_q, h_q, 512]."""
    import torch

    kernels = require("sgl_kernel_sm120", needed_for="the reference of mla_tree_verify")
    n = r.tensors["kv_rows"].shape[0]
    mask = r.tensors.get("tree_mask")
    layout = kernels.MaskLayout[r.mask_layout]
    out = kernels.mla_tree_verify_reference(
        r.tensors["q"].float()[None],
        r.tensors["kv_rows"],
        torch.tensor([0, n], dtype=torch.int64),
        torch.arange(n, dtype=torch.int64),
        sm_scale=r.sm_scale,
        tree_mask=(
            None if mask is None else (mask if r.mask_layout == "FULL" else mask[None])
        ),
        mask_layout=layout,
        mask_indptr=(
            torch.tensor([0, r.s_q * n], dtype=torch.int64)
            if r.mask_layout == "FULL"
            else None
        ),
        logit_cap=r.logit_cap,
        k_scale=r.k_scale,
        v_scale=r.v_scale,
    )
    return out[0].float()
