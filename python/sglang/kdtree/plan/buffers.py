# SPDX-License-Identifier: Apache-2.0
"""What is allocated after the KV pool, out of the slack: row table, graph and mask buffers, activations."""

from __future__ import annotations

# SGLang reserves this much per request of the largest captured batch (arg_groups/memory_hook.py).
GRAPH_BYTES_PER_REQUEST = 2 << 20
# Peak of a prefill chunk, per token. Calibrated, not derived: on the case study's machine chunks
# of 4096 tokens ran with --mem-fraction-static 0.93 and ran out of memory with 0.94, which leaves
# 5.06 and 4.07 GB for them (layer-scaled accounting, Triton buffers) and so brackets 0.99 to
# 1.24 MB. SGLang's own heuristic for a default fraction takes 1.57 MB.
ACTIVATION_BYTES_PER_CHUNK_TOKEN = 1_150_000
SMS = 188  # RTX PRO 6000; the RTX 5090 has 170
MAX_ROW_TILE = 40  # rows of the verify kernel's largest tile
# MLA decode of SGLang's Triton backend: a power of two at or above the SM count (188 here).
TRITON_MAX_KV_SPLITS = 256


def row_table_bytes(
    *, max_requests: int, context: int, tree_size: int, page_size: int
) -> int:
    """req_to_token: int32, one row a request and one padding row, with room for two trees."""
    headroom = max(4 + tree_size, 2 * tree_size + page_size - 1)
    return (max_requests + 1) * (context + headroom) * 4


def kdtree_buffer_bytes(*, batch: int, context: int, tree_size: int, heads: int) -> int:
    """Combined slot list, lengths, tree mask and split partials of the kdtree_sm120 backend."""
    indices = batch * (context + tree_size) * 8 + (batch + 1) * 8
    mask = batch * tree_size * tree_size
    return (
        indices + mask + partials_bytes(batch=batch, rows_per_request=tree_size * heads)
    )


def partials_bytes(*, batch: int, rows_per_request: int) -> int:
    """Upper bound of the verify kernel's workspace.

    Every block of the grid, one an SM, leaves a row tile of partial results, and every
    request one more per row tile: float32 outputs with a maximum and a sum.
    """
    rows = SMS * MAX_ROW_TILE + batch * (rows_per_request + MAX_ROW_TILE - 1)
    return rows * (512 + 2) * 4


def triton_buffer_bytes(*, batch: int, context: int, tree_size: int, heads: int) -> int:
    """Graph state that SGLang's Triton backend holds for a captured tree verify."""
    rows = batch * tree_size
    scratch = rows * heads * TRITON_MAX_KV_SPLITS * (512 + 1) * 4
    indices = rows * context * 8
    mask = batch * tree_size * (context + tree_size)
    return scratch + indices + mask


def activation_bytes(*, chunk: int) -> int:
    return chunk * ACTIVATION_BYTES_PER_CHUNK_TOKEN


def graph_bytes(*, batch: int) -> int:
    return batch * GRAPH_BYTES_PER_REQUEST
