# SPDX-License-Identifier: Apache-2.0
"""Rewriting the slots that the prefix cache holds, in place.

``get_component_device_value`` returns a tensor that shares memory with the node,
in the Python and in the Rust tree core. That is how they are built and not a
promise, so it is tried once, on a throw-away tree, before it is relied upon. The
setter must not be used instead: for these values the Python core asserts and the
Rust core panics and stays unusable.
"""

from __future__ import annotations

import logging
from array import array

import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)


def path_values(
    cache: UnifiedRadixCache, last_node: int, *, lo: int, hi: int
) -> list[torch.Tensor]:
    """The node values on the path to ``last_node`` that cover positions [lo, hi)."""
    core = cache.tree_core
    values = []
    for node in core.collect_path_info([last_node])[0]:
        if node.path_start < hi and node.path_end > lo:
            value = core.get_component_device_value(node.node_id, ComponentType.FULL)
            if value is None:
                raise RuntimeError(f"node {node.node_id} on a locked path has no slots")
            values.append(value)
    return values


def values_alias_the_tree(cache: UnifiedRadixCache) -> bool:
    """Whether writing to a node's value is seen by the tree and by both branches of
    a split, and whether eviction then frees the new slots."""
    try:
        return _try_rewrite(_throw_away_cache(cache))
    except Exception:
        logger.exception("The self-test of the prefix tree failed.")
        return False


def _throw_away_cache(cache: UnifiedRadixCache) -> UnifiedRadixCache:
    page = cache.page_size
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, 8 * page, "cpu", False),
            token_to_kv_pool_allocator=TokenToKVPoolAllocator(
                8 * page, torch.int64, "cpu", None, need_sort=False
            ),
            page_size=page,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=cache._tree_core_backend,
        )
    )


def _try_rewrite(cache: UnifiedRadixCache) -> bool:
    """Two keys of three pages that share the first: insert, rewrite, read, evict."""
    page = cache.page_size
    allocator = cache.token_to_kv_pool_allocator
    slots = allocator.alloc(5 * page).clone()
    tail = array("q", range(page, 3 * page))
    shared = array("q", range(page))
    first = RadixKey(shared + tail)
    second = RadixKey(shared + array("q", [-token for token in tail]))
    cache.insert(InsertParams(key=first, value=slots[: 3 * page]))
    cache.insert(
        InsertParams(key=second, value=torch.cat([slots[:page], slots[3 * page :]]))
    )

    def slots_of(key: RadixKey) -> torch.Tensor:
        node = cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        return cache.path_device_indices(node)

    before = slots_of(second)
    # Moving slot s means here: s and its mirror image change places.
    remap = torch.arange(8 * page, -1, -1)
    remap = torch.cat([remap[-1:], remap[:-1]])
    node = cache.match_prefix(MatchPrefixParams(key=first)).last_device_node
    for value in path_values(cache, node, lo=0, hi=3 * page):
        value.copy_(remap[value])
    expected = torch.cat([remap[before[:page]], before[page:]])
    seen = torch.equal(slots_of(first), remap[slots[: 3 * page]]) and torch.equal(
        slots_of(second), expected
    )
    freed: list[torch.Tensor] = []
    allocator.free = freed.append
    cache.evict(EvictParams(num_tokens=5 * page))
    owned = torch.cat([remap[slots[: 3 * page]], slots[3 * page :]])
    evicted = torch.cat(freed) if freed else torch.empty(0, dtype=torch.int64)
    return seen and torch.equal(torch.sort(evicted).values, torch.sort(owned).values)
