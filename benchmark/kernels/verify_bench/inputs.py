# SPDX-License-Identifier: Apache-2.0
"""The inputs that all arms of a shape share, and the fp64 answer they are checked against.

The slots of a request are drawn at random from the pool, page by page; the draft slots too. The KV pools of the
layers differ only in content, so that a CUDA graph over them reads memory and not L2. The tree is random: node i
hangs on a random earlier node.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from . import counters
from .shapes import Shape

SM_SCALE = 1 / math.sqrt(192)  # 128 + 64: the head dimension before absorption
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclasses.dataclass
class Problem:
    shape: Shape
    q: torch.Tensor  # [b, s_q, h_q, 576] bf16
    kv: list[torch.Tensor]  # a layer: [slots, 576]
    kv_indptr: torch.Tensor  # [b + 1] int32, over kv_indices
    kv_indices: torch.Tensor  # int64: each request's prefix slots, then its draft slots
    prefix_indptr: torch.Tensor  # [b + 1] int32, over prefix_indices
    prefix_indices: torch.Tensor  # int64
    draft_slots: torch.Tensor  # [b, s_q] int64
    visible: torch.Tensor  # [b, s_q, s_q] bool
    mask_words: torch.Tensor  # [b, s_q, ceil(s_q / 64)] int64
    sm_scale: float = SM_SCALE

    @property
    def layers(self) -> int:
        return len(self.kv)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def new_out(self) -> torch.Tensor:
        """Output buffer, poisoned: what a kernel does not write shows up as NaN."""
        s = self.shape
        return torch.full((s.bs, s.s_q, s.h_q, counters.D_V), math.nan, dtype=self.q.dtype, device=self.device)


def layers_for(shape: Shape, l2_bytes: int, max_layers: int = 256) -> int:
    """KV pools to rotate over: at least four times L2 in all, and never fewer than two."""
    return min(max_layers, max(2, math.ceil(4 * l2_bytes / counters.kv_bytes(shape))))


def random_tree(s_q: int, generator: torch.Generator) -> torch.Tensor:
    """[s_q, s_q] bool: row i sees itself and its ancestors, back to the root 0."""
    visible = torch.eye(s_q, dtype=torch.bool)
    for node in range(1, s_q):
        parent = int(torch.randint(node, (1,), generator=generator))
        visible[node] |= visible[parent]
    return visible


def pack_words(visible: torch.Tensor) -> torch.Tensor:
    """[..., N] bool to [..., ceil(N / 64)] int64, bit j % 64 of word j / 64."""
    n = visible.shape[-1]
    padded = torch.nn.functional.pad(visible, (0, -n % 64)).unflatten(-1, (-1, 64))
    bits = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)], dtype=torch.int64, device=visible.device)
    return torch.where(padded, bits, 0).sum(-1)


def build(shape: Shape, layers: int, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    device = torch.device(device)
    host = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(device=device).manual_seed(seed)
    lengths = [p + shape.s_q for p in shape.prefixes]
    pages = [math.ceil(n / shape.page_size) for n in lengths]
    total_pages = sum(pages) + 1  # page 0 is left unused, as the engine leaves it
    num_slots = total_pages * shape.page_size

    order = torch.randperm(total_pages - 1, generator=on_device, device=device) + 1
    within = torch.arange(shape.page_size, device=device)
    lists = []
    for n, page_ids in zip(lengths, order.split(pages), strict=True):
        lists.append((page_ids[:, None] * shape.page_size + within).flatten()[:n])
    indptr = torch.tensor([0] + lengths).cumsum(0).to(torch.int32).to(device)
    prefix_indptr = torch.tensor([0, *shape.prefixes]).cumsum(0).to(torch.int32).to(device)
    visible = torch.stack([random_tree(shape.s_q, host) for _ in lengths]).to(device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=on_device, device=device, dtype=torch.bfloat16)

    kv = [normal(num_slots, counters.D_QK).to(TORCH_DTYPE[shape.kv_dtype]) for _ in range(layers)]
    return Problem(
        shape=shape,
        q=normal(shape.bs, shape.s_q, shape.h_q, counters.D_QK),
        kv=kv,
        kv_indptr=indptr,
        kv_indices=torch.cat(lists),
        prefix_indptr=prefix_indptr,
        prefix_indices=torch.cat([slots[:p] for slots, p in zip(lists, shape.prefixes, strict=True)]),
        draft_slots=torch.stack([slots[p:] for slots, p in zip(lists, shape.prefixes, strict=True)]),
        visible=visible,
        mask_words=pack_words(visible),
    )


def oracle(problem: Problem, layer: int = 0, tree: bool = True, chunk: int = 32768) -> torch.Tensor:
    """[b, s_q, h_q, 512] fp64: the answer under the tree mask, or (tree=False) with every listed row visible."""
    shape = problem.shape
    out = torch.empty(shape.bs, shape.s_q, shape.h_q, counters.D_V, dtype=torch.float64, device=problem.device)
    bounds = problem.kv_indptr.tolist()
    for b, prefix in enumerate(shape.prefixes):
        slots = problem.kv_indices[bounds[b] : bounds[b + 1]]
        q = problem.q[b].flatten(0, 1).double() * problem.sm_scale
        running_max = torch.full((q.shape[0], 1), -math.inf, dtype=torch.float64, device=q.device)
        total = torch.zeros_like(running_max)
        acc = torch.zeros(q.shape[0], counters.D_V, dtype=torch.float64, device=q.device)
        for start in range(0, len(slots), chunk):
            rows = problem.kv[layer][slots[start : start + chunk]].double()
            scores = (q @ rows.T).unflatten(0, (shape.s_q, shape.h_q))
            first_draft = max(0, prefix - start)
            if tree and first_draft < len(rows):
                seen = problem.visible[b, :, start + first_draft - prefix :][:, : len(rows) - first_draft]
                scores[:, :, first_draft:].masked_fill_(~seen[:, None, :], -math.inf)
            scores = scores.flatten(0, 1)
            new_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - new_max).nan_to_num_(0.0)
            rescale = torch.exp(running_max - new_max).nan_to_num_(0.0)
            total = total * rescale + weights.sum(-1, keepdim=True)
            acc = acc * rescale + weights @ rows[:, : counters.D_V]
            running_max = new_max
        out[b] = (acc / total).unflatten(0, (shape.s_q, shape.h_q))
    return out


def relative_error(out: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(||out - want|| / ||want||, the same of the worst query row); NaN in `out` gives NaN."""
    diff = out.double() - want
    rows = diff.norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    return float(diff.norm() / want.norm()), float(rows.max())
