# SPDX-License-Identifier: Apache-2.0
"""What a decode step's alloc and free cost, by the size of the free list."""

from __future__ import annotations

import statistics
import time

import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import ContiguousTokenAllocator

ALLOCATORS = {
    "upstream": lambda n: TokenToKVPoolAllocator(n, torch.int64, "cpu", None, need_sort=False),
    "need_sort": lambda n: TokenToKVPoolAllocator(n, torch.int64, "cpu", None, need_sort=True),
    "tier0": lambda n: ContiguousTokenAllocator(n, torch.int64, "cpu", None),
}


class _Row:
    def __init__(self, index: int):
        self.kv = self
        self.req_pool_idx = index


def pair_us(allocator, *, bs: int, released: int, rounds: int = 300) -> float:
    """Median of one alloc and one free of ``bs`` slots, after ``released`` slots have
    come back in pieces of ``bs``. The call that announces the step is in it."""
    held = allocator.alloc(released + 16 * bs)
    for piece in held[:released].split(bs * 16):
        allocator.free(piece)
    late = list(held[released:].split(bs))
    rows = [_Row(i) for i in range(bs)]
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        allocator.check_decode_capacity(num_tokens=bs, tree_cache=None, requests=rows)
        slots = allocator.alloc(bs)
        allocator.free(late.pop(0))
        took.append(time.perf_counter() - began)
        late.append(slots)
    return statistics.median(took) * 1e6


def measure_all(sizes=(10_000, 100_000, 1_000_000), bs: int = 48) -> list[dict]:
    rows = []
    for size in sizes:
        for released in (0, size // 2):
            row = {"free_slots": size, "bs": bs, "released_before": released}
            for name, build in ALLOCATORS.items():
                row[f"{name}_us"] = round(min(pair_us(build(size), bs=bs, released=released) for _ in range(3)), 1)
            row["tier0_to_upstream"] = round(row["tier0_us"] / row["upstream_us"], 4)
            row["need_sort_to_upstream"] = round(row["need_sort_us"] / row["upstream_us"], 4)
            rows.append(row)
    return rows
