# SPDX-License-Identifier: Apache-2.0
"""One test per edit of upstream: each turns red when the edit is left out."""

from unittest.mock import MagicMock

import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import ContiguousTokenAllocator
from sglang.srt.runtime_context import get_memory


def test_the_configurator_asks_for_the_allocator():
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    given = TokenToKVPoolAllocator(8, torch.bfloat16, "cpu", object(), need_sort=False)
    with get_memory().override(kv_defrag="tier0"):
        built = KVCacheConfigurator._build_token_to_kv_pool_allocator(
            MagicMock(is_hybrid_swa=False),
            sizes=None,
            token_to_kv_pool=None,
            is_dsv4_model=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=given,
        )
    assert isinstance(built, ContiguousTokenAllocator)


def test_a_scheduler_has_one_defragmenter():
    from sglang.srt.mem_cache.defrag.defragmenter import NoDefragmenter, defragmenter_of

    scheduler = MagicMock()
    assert isinstance(defragmenter_of(scheduler), NoDefragmenter)
    assert defragmenter_of(scheduler) is scheduler.kv_defragmenter


def test_a_processed_batch_is_a_safe_point():
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = MagicMock()
    scheduler.kv_defragmenter = MagicMock()
    Scheduler.process_batch_result(scheduler, MagicMock(), MagicMock())
    scheduler.kv_defragmenter.after_batch.assert_called_once_with()


def test_idle_is_a_safe_point():
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = MagicMock()
    scheduler.kv_defragmenter = MagicMock()
    scheduler.invariant_checker._check_all_pools.return_value = (False, [])
    scheduler.token_to_kv_pool_allocator.verify_byte_accounting.return_value = []
    Scheduler.on_idle(scheduler)
    scheduler.kv_defragmenter.on_idle.assert_called_once_with()
