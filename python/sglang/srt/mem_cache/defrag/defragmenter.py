# SPDX-License-Identifier: Apache-2.0
"""Which defragmenter a scheduler gets, and what it is built from."""

from __future__ import annotations

import logging
from typing import Optional, Union

import torch

from sglang.srt.arg_groups.fields.kdtree.kv_defrag import parse_size
from sglang.srt.environ import envs
from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.mover import SlotMover
from sglang.srt.mem_cache.defrag.step_checks import ContentWatch, StepChecks
from sglang.srt.mem_cache.defrag.tier0 import Tier0Defragmenter
from sglang.srt.mem_cache.defrag.tier1 import Tier1Defragmenter
from sglang.srt.mem_cache.defrag.tree_values import values_alias_the_tree
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

logger = logging.getLogger(__name__)


class NoDefragmenter:
    """--kv-defrag off: nothing is done at the safe points."""

    def after_batch(self) -> None:
        """The result of a batch has been processed."""

    def on_idle(self) -> None:
        """There is no request left."""


Defragmenter = Union[NoDefragmenter, Tier0Defragmenter]


def _draft_pools(draft_worker, target_pool) -> list:
    """The draft pools that the target's slot numbers index."""
    if draft_worker is None:
        return []
    pools = [runner.token_to_kv_pool for runner in draft_worker._draft_model_runners()]
    return [pool for pool in pools if pool is not target_pool]


def _requests_with_rows(scheduler) -> list:
    """Requests that may hold a row when a result has been processed: of the batch it
    belongs to, of the batch that is prepared or on the device, and of those running."""
    batches = (
        scheduler.running_batch,
        scheduler.last_batch,
        scheduler.cur_batch_for_debug,
    )
    reqs = [req for batch in batches if batch is not None for req in batch.reqs]
    if scheduler.chunked_req is not None:
        reqs.append(scheduler.chunked_req)
    return list({id(req): req for req in reqs}.values())


def _step_checks(scheduler) -> Optional[StepChecks]:
    if not envs.SGLANG_CHECK_KV_PAGE_INVARIANTS.get():
        return None
    group = scheduler.attn_tp_cpu_group
    if torch.distributed.get_world_size(group) == 1:
        group = None
    logger.info(
        "KV slots are counted after every step%s.",
        "" if group is None else " and compared between the ranks",
    )
    return StepChecks(
        allocator=scheduler.token_to_kv_pool_allocator,
        req_to_token_pool=scheduler.req_to_token_pool,
        tree_cache=scheduler.tree_cache,
        owners=lambda: _requests_with_rows(scheduler),
        group=group,
    )


def defragmenter_of(scheduler) -> Defragmenter:
    """The scheduler's defragmenter, built when it first idles, which is before its first request."""
    attributes = vars(scheduler)
    if "kv_defragmenter" not in attributes:
        attributes["kv_defragmenter"] = build_defragmenter(scheduler)
    return attributes["kv_defragmenter"]


def build_defragmenter(scheduler) -> Defragmenter:
    """The defragmenter of a scheduler whose pools and caches exist."""
    tier = get_memory().kv_defrag
    if tier == "off":
        return NoDefragmenter()
    collector = scheduler.metrics_collector
    allocator = scheduler.token_to_kv_pool_allocator
    tier0 = dict(
        checks=_step_checks(scheduler),
        allocator=allocator,
        req_to_token_pool=scheduler.req_to_token_pool,
        metrics=DefragMetrics(None if collector is None else dict(collector.labels)),
        running_requests=lambda: scheduler.running_batch.reqs,
    )
    if tier == "tier0":
        return Tier0Defragmenter(**tier0)
    if scheduler.model_config.is_encoder_decoder:
        raise ValueError(
            "--kv-defrag tier1 does not work with encoder-decoder models, whose rows "
            "hold the encoder's slots first. Use --kv-defrag tier0."
        )
    tree_cache = scheduler.tree_cache
    target_pool = allocator.get_kvcache()
    mover = SlotMover([target_pool, *_draft_pools(scheduler.draft_worker, target_pool)])
    small = [pool for pool in mover.pools if pool.size < allocator.size]
    if small:
        raise ValueError(
            "--kv-defrag tier1 needs draft pools with the target's slots; "
            f"{type(small[0]).__name__} has {small[0].size} of {allocator.size}. "
            "Use --kv-defrag tier0."
        )
    mover.check()
    watch = None
    if tier0["checks"] is not None:
        logger.info("The KV of running requests is compared after every step.")
        watch = ContentWatch(mover.pools)
    move_tree_slots = isinstance(tree_cache, UnifiedRadixCache) and (
        tree_cache.disable or values_alias_the_tree(tree_cache)
    )
    defragmenter = Tier1Defragmenter(
        tree_cache=tree_cache,
        mover=mover,
        budget_bytes=parse_size(get_memory().kv_defrag_copy_budget),
        chunked_request=lambda: scheduler.chunked_req,
        owners=lambda: _requests_with_rows(scheduler),
        on_device=lambda: len(scheduler.result_queue) > 0,
        overlap=scheduler.enable_overlap,
        move_tree_slots=move_tree_slots,
        watch=watch,
        **tier0,
    )
    logger.info(
        "KV defragmentation: tier1 moves up to %d slots a step (%d bytes each, over "
        "%d pools); slots of the prefix cache are %s.",
        defragmenter.budget_units * allocator.page_size,
        mover.bytes_per_slot,
        len(mover.pools),
        "moved too" if move_tree_slots else "left where they are",
    )
    return defragmenter
