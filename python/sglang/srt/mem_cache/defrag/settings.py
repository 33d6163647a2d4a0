# SPDX-License-Identifier: Apache-2.0
"""The allocator that --kv-defrag asks for."""

from __future__ import annotations

import logging

from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import (
    ContiguousPagedAllocator,
    ContiguousTokenAllocator,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.runtime_context import get_memory

logger = logging.getLogger(__name__)


def select_allocator(
    allocator: BaseTokenToKVPoolAllocator,
) -> BaseTokenToKVPoolAllocator:
    """The allocator that --kv-defrag asks for, in place of the stock one."""
    tier = get_memory().kv_defrag
    if tier == "off" or isinstance(
        allocator, (ContiguousTokenAllocator, ContiguousPagedAllocator)
    ):
        return allocator
    common = dict(
        dtype=allocator.dtype,
        device=allocator.device,
        kvcache=allocator.get_kvcache(),
    )
    if type(allocator) is TokenToKVPoolAllocator:
        chosen = ContiguousTokenAllocator(allocator.size, **common)
    elif type(allocator) is PagedTokenToKVPoolAllocator:
        chosen = ContiguousPagedAllocator(
            allocator.size, page_size=allocator.page_size, **common
        )
    else:
        raise ValueError(
            f"--kv-defrag {tier} works with pools of one kind of slot; this model or "
            f"configuration uses {type(allocator).__name__}. Use --kv-defrag off."
        )
    logger.info(
        "KV defragmentation: %s active, %d slots, page size %d, %s.",
        tier,
        chosen.size,
        chosen.page_size,
        type(chosen).__name__,
    )
    return chosen
