# SPDX-License-Identifier: Apache-2.0
"""mla_tree_verify in plain torch: the specification of the op, and its CPU kernel.

Names: b requests, s_q draft rows a request, h_q query heads, n keys of one request, d_qk = 576 columns of a KV row, of
which the first d_v = 512 are the value.
"""

from enum import IntEnum, IntFlag

import torch

D_QK = 576
D_V = 512
BITS_PER_WORD = 64


class MaskLayout(IntEnum):
    """How `tree_mask` says which of its request's s_q draft keys a draft row sees. Every row sees the whole prefix."""

    CAUSAL = 0  # no tensor: row i sees draft keys 0..i
    QLEN = 1  # uint8 or bool [b, s_q, s_q], nonzero = visible
    BITS = 2  # int64 [b, s_q, ceil(s_q / 64)], bit j % 64 of word j // 64 = draft key j
    FULL = 3  # uint8 or bool, flat; request r: row-major [s_q, prefix + s_q] at mask_indptr[r], last s_q columns read


class Status(IntFlag):
    """Bits that an op ORs into `status` when it had to bend its inputs to stay inside its buffers."""

    LIST_CLAMPED = 1  # kv_indptr decreases or leaves kv_indices
    SLOT_CLAMPED = 2  # a slot outside kv_cache was read as the nearest valid slot
    MASK_CLAMPED = 4  # a FULL mask block leaves tree_mask; the missing bytes count as not visible


def mla_tree_verify_reference(
    q, kv_cache, kv_indptr, kv_indices, *, sm_scale,
    draft_slots=None, tree_mask=None, mask_layout=MaskLayout.CAUSAL, mask_indptr=None,
    logit_cap=0.0, k_scale=1.0, v_scale=1.0, page_size=1,
    out=None, lse=None, workspace=None, plan=None, status=None,
    compute_dtype=torch.float32,
):  # fmt: skip
    """out[r] = softmax(sm_scale * k_scale * q[r] k^T, tree mask) (v_scale * v) for every request r.

    The arguments are those of mla_tree_verify. `compute_dtype` is that of all arithmetic; out takes the dtype of q, or
    of the `out` passed in. page_size, workspace and plan cannot change a result and are ignored.
    """
    b, s_q, h_q, _ = q.shape
    out = q.new_empty(b, s_q, h_q, D_V) if out is None else out
    for r in range(b):
        prefix, slots, list_flag = slots_of_request(r, s_q, kv_cache.shape[0], kv_indptr, kv_indices, draft_slots)
        tree, mask_flag = visible_draft_keys(r, s_q, prefix, tree_mask, mask_layout, mask_indptr, device=q.device)
        visible = torch.cat([tree.new_ones(s_q, prefix), tree[:, : slots.numel() - prefix]], dim=1)

        keys = gather_rows(kv_cache, slots).to(compute_dtype)
        scores = torch.einsum("qhd,nd->qhn", q[r].to(compute_dtype), keys) * (sm_scale * k_scale)
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        weights, log_sum = softmax_of_visible(scores, visible)
        out[r] = (weights @ (keys[:, :D_V] * v_scale)).to(out.dtype)
        if lse is not None:
            lse[r] = log_sum
        if status is not None:
            status.bitwise_or_(int(list_flag | mask_flag))
    return out


def softmax_of_visible(scores, visible):
    """scores [s_q, h_q, n], visible [s_q, n] -> weights like scores, lse [s_q, h_q]. No key seen: 0 and -inf."""
    scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    log_sum = scores.logsumexp(dim=-1)
    finite = log_sum.masked_fill(log_sum == float("-inf"), 0.0)
    return torch.exp(scores - finite[..., None]), log_sum


def slots_of_request(r, s_q, num_slots, kv_indptr, kv_indices, draft_slots):
    """-> number of prefix keys, KV slots of all keys (prefix, then draft) as int64, Status.

    Without draft_slots the last s_q entries of the list are the draft slots. A list shorter than s_q has no prefix and
    fewer draft keys than rows.
    """
    begin, end = int(kv_indptr[r]), int(kv_indptr[r + 1])
    first = min(max(begin, 0), kv_indices.numel())
    last = min(max(end, first), kv_indices.numel())
    flags = Status(0) if (first, last) == (begin, end) else Status.LIST_CLAMPED
    slots = kv_indices[first:last].long()
    prefix = max(slots.numel() - s_q, 0) if draft_slots is None else slots.numel()
    if draft_slots is not None:
        slots = torch.cat([slots, draft_slots[r].long()])
    inside = slots.clamp(0, num_slots - 1)
    if not torch.equal(inside, slots):
        flags |= Status.SLOT_CLAMPED
    return prefix, inside, flags


def visible_draft_keys(r, s_q, prefix, tree_mask, mask_layout, mask_indptr, *, device):
    """-> bool [s_q, s_q]: row i sees draft key j; Status."""
    if mask_layout == MaskLayout.CAUSAL:
        return torch.ones(s_q, s_q, dtype=torch.bool, device=device).tril(), Status(0)
    if mask_layout == MaskLayout.QLEN:
        return tree_mask[r] != 0, Status(0)
    if mask_layout == MaskLayout.BITS:
        return bits_to_bool(tree_mask[r], s_q), Status(0)
    size = s_q * (prefix + s_q)
    start = int(mask_indptr[r])
    block = tree_mask[max(start, 0) : max(start + size, 0)]
    complete = start >= 0 and block.numel() == size
    if not complete:
        block = torch.nn.functional.pad(block, (size - block.numel(), 0) if start < 0 else (0, size - block.numel()))
    return block.view(s_q, prefix + s_q)[:, prefix:] != 0, Status(0) if complete else Status.MASK_CLAMPED


def bits_to_bool(words, width):
    """int64 [..., ceil(width / 64)] -> bool [..., width]."""
    column = torch.arange(width, device=words.device)
    return ((words[..., column // BITS_PER_WORD] >> (column % BITS_PER_WORD)) & 1).bool()


def gather_rows(kv_cache, slots):
    """KV rows [n, 576] of a cache [num_slots, 576] or [num_slots, 1, 576]; float8 is indexed as bytes."""
    rows = kv_cache.squeeze(1) if kv_cache.dim() == 3 else kv_cache
    if rows.element_size() == 1:
        return rows.view(torch.uint8)[slots].view(rows.dtype)
    return rows[slots]
