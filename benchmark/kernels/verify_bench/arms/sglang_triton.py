# SPDX-License-Identifier: Apache-2.0
"""Upstream's two Triton kernels, called as TritonAttnBackend calls them.

`triton_extend` is the path that a tree verify takes: the prefix by index list, the draft rows as contiguous K/V, a
boolean mask with row stride prefix + s_q of which only the draft block is read. `triton_decode` is the grouped
split-KV decode with the s_q x h_q rows folded into heads; it has no tree mask, so it is checked with all rows
visible. Its split counts are computed once a step, outside the timed graph, and programmatic dependent launch is off,
as upstream has it on compute capability 12.0.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata

import torch

from .. import counters
from ..inputs import Problem
from .base import Arm, Context, Prepared, Unavailable, need_cuda

OPS = "sglang.kernels.ops.attention"
DEFAULT_KV_SPLITS = 8  # --triton-attention-num-kv-splits
MIN_BLOCK_KV = 32
INTERPRETED_SMS = 4


def load_ops(context: Context, module: str):
    """The module from the installed sglang, else from the files that pack_gpu.py packed."""
    try:
        return importlib.import_module(f"{OPS}.{module}")
    except ImportError as e:
        first = e
    packed = context.sglang_kernels
    if not (packed / "sglang").is_dir():
        raise Unavailable(f"sglang is not installed ({first}) and there are no packed kernel files in {packed}")
    if str(packed) not in sys.path:
        sys.path.insert(0, str(packed))
    for name in [
        n for n in sys.modules if n == "sglang" or n.startswith("sglang.")
    ]:  # a half-imported package would shadow it
        if not str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(packed)):
            del sys.modules[name]
    importlib.invalidate_caches()
    try:
        return importlib.import_module(f"{OPS}.{module}")
    except ImportError as e:
        raise Unavailable(f"sglang's {module} does not import: {e}") from e


def need_triton(problem: Problem) -> None:
    """A CUDA device, or Triton's interpreter (TRITON_INTERPRET=1), which runs the same kernels on the CPU for tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        need_cuda(problem)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def max_kv_splits(sm_count: int, max_context: int) -> int:
    """Upstream's cap for MLA decode."""
    by_context = next_power_of_2(-(-max_context // MIN_BLOCK_KV))
    return max(DEFAULT_KV_SPLITS, min(next_power_of_2(sm_count), by_context))


class _Triton(Arm):
    # With an fp8 cache upstream converts q and the probabilities to e4m3 as well, so it is off by about 3e-2, not 2e-3.
    max_error = {**Arm.max_error, "fp8": (6e-2, 1.2e-1)}

    def version(self) -> str | None:
        packed = self.context.sglang_kernels / "VERSION"
        try:
            return metadata.version("sglang")
        except metadata.PackageNotFoundError:
            return packed.read_text().strip() if packed.is_file() else None


class Extend(_Triton):
    name = "triton_extend"
    label = "Triton extend"
    note = "upstream's tree verify: extend_attention_fwd"

    def prepare(self, problem: Problem) -> Prepared:
        need_triton(problem)
        extend = load_ops(self.context, "extend_attention").extend_attention_fwd
        s = problem.shape
        q = problem.q.flatten(0, 1)
        out = problem.new_out()
        k_buffers = [kv[:, None, :] for kv in problem.kv]
        # The draft rows arrive in the dtype of q; of an fp8 cache the rows as cached, so that the answer is the
        # oracle's.
        draft = [kv[problem.draft_slots.flatten()].to(q.dtype)[:, None, :].contiguous() for kv in problem.kv]
        draft_v = [k[..., : counters.D_V].contiguous() for k in draft]
        qo_indptr = torch.arange(0, s.bs * s.s_q + 1, s.s_q, dtype=torch.int64, device=q.device)
        row_sizes = [s.s_q * (p + s.s_q) for p in s.prefixes]
        mask_indptr = torch.tensor([0] + row_sizes, device=q.device).cumsum(0)
        mask = torch.cat(
            [
                torch.cat([v.new_ones(s.s_q, p), v], 1).flatten()
                for p, v in zip(s.prefixes, problem.visible, strict=True)
            ]
        )

        def run(layer: int) -> None:
            extend(
                q,
                draft[layer],
                draft_v[layer],
                out.flatten(0, 1),
                k_buffers[layer],
                k_buffers[layer][..., : counters.D_V],
                qo_indptr,
                problem.prefix_indptr,
                problem.prefix_indices,
                mask,
                True,
                mask_indptr,
                s.s_q,
                1.0,
                1.0,
                sm_scale=problem.sm_scale,
                page_size=s.page_size,
            )

        return Prepared(run, out)


class Decode(_Triton):
    name = "triton_decode"
    label = "Triton decode*"
    note = "upstream's grouped decode, rows folded into heads; no tree mask"
    tree_mask = False

    def prepare(self, problem: Problem) -> Prepared:
        need_triton(problem)
        decode = load_ops(self.context, "decode_attention").decode_attention_fwd
        splits_kernel = load_ops(self.context, "metadata").get_num_kv_splits_triton
        s = problem.shape
        rows = s.s_q * s.h_q
        q = problem.q.view(s.bs, rows, counters.D_QK)
        out = problem.new_out()
        sm_count = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else INTERPRETED_SMS
        most = max_kv_splits(sm_count, s.prefix + s.s_q)
        num_splits = torch.empty(s.bs, dtype=torch.int32, device=q.device)
        lengths = problem.kv_indptr.diff()
        splits_kernel[(1,)](
            num_splits, lengths, s.bs, 1, rows, 1, most, sm_count, MAX_NUM_SEQ=max(256, next_power_of_2(s.bs))
        )
        logits = torch.empty(s.bs, rows, most, counters.D_V, dtype=torch.float32, device=q.device)
        lse = torch.empty(s.bs, rows, most, dtype=torch.float32, device=q.device)
        k_buffers = [kv[:, None, :] for kv in problem.kv]

        def run(layer: int) -> None:
            decode(
                q,
                k_buffers[layer],
                k_buffers[layer][..., : counters.D_V],
                out.view(s.bs, rows, counters.D_V),
                problem.kv_indptr,
                problem.kv_indices,
                logits,
                lse,
                num_splits,
                most,
                problem.sm_scale,
                1.0,
                1.0,
                has_mla=True,
                use_pdl=False,
                page_size=s.page_size,
            )

        return Prepared(run, out)
