# SPDX-License-Identifier: Apache-2.0
"""What is allocated after the KV pool, out of the slack: row table, graph and mask buffers, activations."""

from __future__ import annotations

# SGLang reserves this much per request of the largest captured batch (arg_groups/memory_hook.py).
GRAPH_BYTES_PER_REQUEST = 2 << 20
# Peak of a prefill chunk, per token. Calibrated, not derived: on 8 x RTX PRO 6000 (Kimi K2.6, TP 8)
# chunks of 4096 tokens ran with --mem-fraction-static 0.93 and ran out of memory with 0.94, which
# leaves 5.06 and 4.07 GB for them (layer-scaled accounting, Triton buffers) and so brackets 0.99 to
# 1.24 MB. SGLang's own heuristic for a default fraction takes 1.57 MB.
# Scaled to other models by their width.
ACTIVATION_BYTES_PER_CHUNK_TOKEN, CALIBRATED_HIDDEN = 1_150_000, 7168
SMS = 188  # RTX PRO 6000; the RTX 5090 has 170, the H200 132
# kdtree_sm120's own limits (sgl_kernel_sm120.attention).
MAX_BATCH, MAX_TREE = 256, 128
# MLA decode of SGLang's Triton backend: a power of two at or above the SM count (188 here).
TRITON_MAX_KV_SPLITS = 256


def row_table_bytes(
    *, max_requests: int, context: int, tree_size: int, page_size: int
) -> int:
    """req_to_token: int32, one row a request and one padding row."""
    width = row_width(context=context, tree_size=tree_size, page_size=page_size)
    return (max_requests + 1) * width * 4


def row_width(*, context: int, tree_size: int, page_size: int) -> int:
    """Slots of a row: the context and room for two trees, as SGLang's allocation_sizing reserves."""
    return context + max(4 + tree_size, 2 * tree_size + page_size - 1)


def kdtree_buffer_bytes(
    *, batch: int, context: int, tree_size: int, heads: int, page_size: int
) -> int:
    """Static buffers of the kdtree_sm120 backend for a captured verify: two slot lists (int64 for
    the stock kernel, int32 for ours), tree mask, row numbers and lengths, work plan and partials.

    The stock kernel's scratch is kept for one token, and for the whole batch without a tree.
    """
    width = row_width(context=context, tree_size=tree_size, page_size=page_size)
    lists = batch * width * (8 + 4) + (batch + 1) * 4 + batch * 8
    mask = batch * tree_size * tree_size if tree_size > 1 else 0
    plan = (batch + 1) * 16
    scratch = triton_scratch_bytes(
        tokens=1 if tree_size > 1 else batch, heads=heads, splits=TRITON_MAX_KV_SPLITS
    )
    return (
        lists
        + mask
        + plan
        + scratch
        + workspace_bytes(batch=batch, tree_size=tree_size, heads=heads)
    )


def workspace_bytes(*, batch: int, tree_size: int, heads: int, sms: int = SMS) -> int:
    """The verify kernel's partial results: csrc/mla_tree_verify/schedule.h in Python.

    A slot for every column of blocks and request, in fp16 with float32 maxima and sums of 4 warps; the most
    that any KV format takes (row tiles of up to 5, 4 or 2 blocks of 8 rows).
    """
    blocks = -(-tree_size * heads // 8)

    def partials(largest: int) -> int:
        tile = min(range(largest, 0, -1), key=lambda n: -(-blocks // n) * (n + 3))
        tiles = -(-blocks // tile)
        slots = max(1, sms // tiles) + batch - 1
        return slots * tiles * 8 * tile * (512 * 2 + 4 * 8)

    return max(partials(largest) for largest in (5, 4, 2))


def triton_scratch_bytes(*, tokens: int, heads: int, splits: int) -> int:
    """Split partials of the stock decode kernel: float32 outputs and log-sum-exps."""
    return tokens * heads * splits * (512 + 1) * 4


def triton_buffer_bytes(*, batch: int, context: int, tree_size: int, heads: int) -> int:
    """Graph state that SGLang's Triton backend holds for a captured tree verify."""
    rows = batch * tree_size
    scratch = triton_scratch_bytes(
        tokens=rows, heads=heads, splits=TRITON_MAX_KV_SPLITS
    )
    indices = rows * context * 8
    mask = batch * tree_size * (context + tree_size)
    return scratch + indices + mask


def activation_bytes(*, chunk: int, hidden: int) -> int:
    return chunk * hidden * ACTIVATION_BYTES_PER_CHUNK_TOKEN // CALIBRATED_HIDDEN


def graph_bytes(*, batch: int) -> int:
    return batch * GRAPH_BYTES_PER_REQUEST
