# SPDX-License-Identifier: Apache-2.0
"""Copying slots, in every pool that the same slot numbers index."""

from __future__ import annotations

import importlib.util
from typing import Callable, Sequence

import torch

from sglang.srt.mem_cache.memory_pool import KVCache, MLATokenToKVPool

MoveFn = Callable[[torch.Tensor, torch.Tensor], None]


def bytes_per_slot(pools: Sequence[KVCache]) -> int:
    """Bytes that moving one slot reads, over all layers of all pools."""
    total = 0
    for pool in pools:
        size = pool.get_kv_size_bytes()
        size = sum(size) if isinstance(size, tuple) else size
        total += int(size) // (pool.size + pool.page_size)
    return max(total, 1)


def _has_fused_move(device: torch.device) -> bool:
    if importlib.util.find_spec("sgl_kernel_sm120") is None:
        return False
    if device.type != "cuda":
        return True
    from sgl_kernel_sm120 import cuda_available_ops

    return "kv_move_all_layers" in cuda_available_ops()


def build_move(pool: KVCache) -> MoveFn:
    """One launch for all layers where the pool is plain MLA, else the pool's own move."""
    if type(pool) is MLATokenToKVPool and _has_fused_move(torch.device(pool.device)):
        from sgl_kernel_sm120 import kv_move_all_layers

        return lambda tgt, src: kv_move_all_layers(pool.kv_buffer, tgt, src)
    return pool.move_kv_cache


class SlotMover:
    """Moves slots of the target pool and of the draft pools together."""

    def __init__(self, pools: Sequence[KVCache]):
        self.pools = list(pools)
        self.bytes_per_slot = bytes_per_slot(self.pools)
        self._moves = [build_move(pool) for pool in self.pools]

    def __call__(self, tgt: torch.Tensor, src: torch.Tensor) -> None:
        for move in self._moves:
            move(tgt, src)

    def check(self) -> None:
        """Move the slot of padded rows onto itself: a pool that cannot move says so
        now, at start-up, and not under load."""
        for pool, move in zip(self.pools, self._moves):
            slot = torch.zeros(1, dtype=torch.int64, device=pool.device)
            try:
                move(slot, slot)
            except Exception as error:
                raise ValueError(
                    f"--kv-defrag tier1 cannot move slots of {type(pool).__name__} "
                    f"({error}); use --kv-defrag tier0."
                ) from error
