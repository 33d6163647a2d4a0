# SPDX-License-Identifier: Apache-2.0
"""What --kv-defrag asks for, what it refuses, and the allocator that follows."""

from __future__ import annotations

import logging

from sglang.srt.arg_groups.fields.kdtree.kv_defrag import parse_size
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import (
    ContiguousPagedAllocator,
    ContiguousTokenAllocator,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.runtime_context import (
    get_disagg,
    get_memory,
    get_observability,
    get_parallel,
    get_serving,
)

logger = logging.getLogger(__name__)


def _tier1_obstacles() -> list[str]:
    """Options under which something outside the pool keeps slot numbers."""
    memory, disagg, parallel = get_memory(), get_disagg(), get_parallel()
    options = {
        "--enable-hierarchical-cache": memory.enable_hierarchical_cache,
        "--enable-lmcache": memory.enable_lmcache,
        "--enable-flexkv": memory.enable_flexkv,
        "--enable-unified-cache-external-linker": (
            memory.enable_unified_cache_external_linker
        ),
        "--enable-unified-memory": memory.enable_unified_memory,
        "--enable-hisparse": memory.enable_hisparse,
        "--enable-session-radix-cache": memory.enable_session_radix_cache,
        "--enable-streaming-session": get_serving().enable_streaming_session,
        "--disaggregation-mode": disagg.disaggregation_mode != "null",
        "--disaggregation-decode-retraction-backup": (
            disagg.disaggregation_decode_retraction_backup == "host_pool"
        ),
        "--pp-size": parallel.pp_size > 1,
        "--dcp-size": parallel.dcp_enabled,
        "--kv-canary": get_observability().kv_canary != "none",
    }
    return [option for option, is_set in options.items() if is_set]


def check_tier1() -> None:
    """Raise where live slots cannot be moved."""
    obstacles = _tier1_obstacles()
    if obstacles:
        raise ValueError(
            f"--kv-defrag tier1 does not work with {', '.join(obstacles)}: they keep "
            "the numbers of KV slots where a move does not reach. Use --kv-defrag "
            "tier0, which only allocates, or drop them."
        )
    parse_size(get_memory().kv_defrag_copy_budget)


def select_allocator(
    allocator: BaseTokenToKVPoolAllocator,
) -> BaseTokenToKVPoolAllocator:
    """The allocator that --kv-defrag asks for, in place of the one upstream built."""
    tier = get_memory().kv_defrag
    if tier == "off" or isinstance(
        allocator, (ContiguousTokenAllocator, ContiguousPagedAllocator)
    ):
        return allocator
    if tier == "tier1":
        check_tier1()
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
