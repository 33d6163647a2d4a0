# SPDX-License-Identifier: Apache-2.0
"""What a decode step's alloc and free cost, by the size of the free list.

The allocators take turns, block of steps by block of steps, so that what else runs on
the machine slows all of them alike: the ratios hold on a busy machine, the microseconds
do not. A block is as long as tier 0 lays out slots ahead, so that its share of that is
in each measurement.
"""

from __future__ import annotations

import gc
import statistics
import time

import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import STRIPE_STEPS, ContiguousTokenAllocator

ALLOCATORS = {
    "upstream": lambda n: TokenToKVPoolAllocator(n, torch.int64, "cpu", None, need_sort=False),
    "need_sort": lambda n: TokenToKVPoolAllocator(n, torch.int64, "cpu", None, need_sort=True),
    "tier0": lambda n: ContiguousTokenAllocator(n, torch.int64, "cpu", None),
}


class _Decoding:
    """An allocator in the state of a server that decodes ``bs`` requests: ``released``
    slots have come back in pieces of a block, and frees arrive a block late."""

    def __init__(self, allocator, *, bs: int, released: int):
        self.allocator, self.bs = allocator, bs
        held = allocator.alloc(released + STRIPE_STEPS * bs)
        for piece in held[:released].split(STRIPE_STEPS * bs):
            allocator.free(piece)
        self.late = list(held[released:].split(bs))
        self.reqs = [object() for _ in range(bs)]  # All that an allocator looks at is which they are.

    def pair_seconds(self) -> float:
        """One alloc and one free, the mean of a block. The call that announces a step
        to the allocator is in it."""
        allocator, bs, reqs, taken = self.allocator, self.bs, self.reqs, []
        began = time.perf_counter()
        for slots in self.late:
            allocator.check_decode_capacity(num_tokens=bs, tree_cache=None, requests=reqs)
            taken.append(allocator.alloc(bs))
            allocator.free(slots)
        took = time.perf_counter() - began
        self.late = taken
        return took / len(taken)


def medians_us(*, size: int, bs: int, released: int, blocks: int) -> dict[str, float]:
    decoding = {name: _Decoding(build(size), bs=bs, released=released) for name, build in ALLOCATORS.items()}
    took: dict[str, list[float]] = {name: [] for name in decoding}
    gc.collect()
    gc.disable()
    try:
        for _ in range(blocks):
            for name, state in decoding.items():
                took[name].append(state.pair_seconds())
    finally:
        gc.enable()
    return {name: 1e6 * statistics.median(values) for name, values in took.items()}


def measure_all(sizes=(10_000, 100_000, 1_000_000), bs: int = 48, blocks: int = 40, repeats: int = 5) -> list[dict]:
    """One row a size and history: medians in us, and the ratio to upstream as the
    median of ``repeats`` runs with the smallest and the largest."""
    rows = []
    for size in sizes:
        for released in (0, size // 2):
            runs = [medians_us(size=size, bs=bs, released=released, blocks=blocks) for _ in range(repeats)]
            row = {"free_slots": size, "bs": bs, "released_before": released}
            for name in ALLOCATORS:
                row[f"{name}_us"] = round(statistics.median(run[name] for run in runs), 2)
            for name in ("tier0", "need_sort"):
                ratios = sorted(run[name] / run["upstream"] for run in runs)
                row[f"{name}_to_upstream"] = round(statistics.median(ratios), 4)
                row[f"{name}_to_upstream_range"] = [round(ratios[0], 4), round(ratios[-1], 4)]
            rows.append(row)
    return rows
