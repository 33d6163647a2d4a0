# SPDX-License-Identifier: Apache-2.0
"""--kv-defrag and --kv-defrag-copy-budget: what they take and what they refuse."""

import logging

import prometheus_client
import pytest
import torch

from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.contiguous import (
    ContiguousPagedAllocator,
    ContiguousTokenAllocator,
)
from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.settings import parse_size, select_allocator
from sglang.srt.runtime_context import (
    get_disagg,
    get_memory,
    get_observability,
    get_parallel,
    get_serving,
)
from sglang.srt.server_args import prepare_server_args


@pytest.mark.parametrize(
    "text, size",
    [
        ("65536", 65536),
        (65536, 65536),
        ("64K", 65536),
        ("64M", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2 gb", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_human_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "0", "64Q", "1e9", "64 M x", "0.1"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="--kv-defrag-copy-budget.*64M"):
        parse_size(text)


def test_a_bad_budget_ends_the_command_line(capsys):
    """Before any weights are loaded, and in every tier."""
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", "none", "--kv-defrag-copy-budget", "64Q"])
    assert "'64Q' is not a size" in capsys.readouterr().err


def test_counters_are_there_before_the_first_move():
    registry = prometheus_client.REGISTRY
    labels = {"tp_rank": "test_counters"}
    DefragMetrics(labels)
    for name in ("sglang:kv_defrag_runs_total", "sglang:kv_defrag_bytes_moved_total"):
        assert registry.get_sample_value(name, labels) == 0


def upstream(page_size=1):
    common = (torch.bfloat16, "cpu", object())
    if page_size == 1:
        return TokenToKVPoolAllocator(64, *common, need_sort=False)
    return PagedTokenToKVPoolAllocator(64, page_size, *common, need_sort=False)


def test_off_leaves_upstreams_allocator():
    allocator = upstream()
    assert select_allocator(allocator) is allocator


@pytest.mark.parametrize("tier", ["tier0", "tier1"])
@pytest.mark.parametrize("page_size, kind", [(1, ContiguousTokenAllocator), (16, ContiguousPagedAllocator)])
def test_each_rank_says_which_tier_is_active(tier, page_size, kind, caplog):
    caplog.set_level(logging.INFO)
    given = upstream(page_size)
    with get_memory().override(kv_defrag=tier):
        chosen = select_allocator(given)
        # The draft worker is given the target's allocator.
        assert select_allocator(chosen) is chosen
    assert type(chosen) is kind
    assert chosen.get_kvcache() is given.get_kvcache()
    assert (chosen.size, chosen.page_size, chosen.dtype) == (64, page_size, given.dtype)
    assert f"KV defragmentation: {tier} active, 64 slots" in caplog.text


@pytest.mark.parametrize(
    "bag, field, value, option",
    [
        (get_memory, "enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        (get_memory, "enable_lmcache", True, "--enable-lmcache"),
        (get_memory, "enable_flexkv", True, "--enable-flexkv"),
        (get_memory, "enable_unified_memory", True, "--enable-unified-memory"),
        (get_memory, "enable_hisparse", True, "--enable-hisparse"),
        (get_memory, "enable_session_radix_cache", True, "--enable-session-radix-cache"),
        (
            get_memory,
            "enable_unified_cache_external_linker",
            True,
            "--enable-unified-cache-external-linker",
        ),
        (get_serving, "enable_streaming_session", True, "--enable-streaming-session"),
        (get_disagg, "disaggregation_mode", "prefill", "--disaggregation-mode"),
        (get_disagg, "disaggregation_mode", "decode", "--disaggregation-mode"),
        (
            get_disagg,
            "disaggregation_decode_retraction_backup",
            "host_pool",
            "--disaggregation-decode-retraction-backup",
        ),
        (get_observability, "kv_canary", "log", "--kv-canary"),
    ],
)
def test_tier1_refuses_what_keeps_slot_numbers(bag, field, value, option):
    with get_memory().override(kv_defrag="tier1"), bag().override(**{field: value}):
        with pytest.raises(ValueError, match=f"{option}.*tier0"):
            select_allocator(upstream())
    with get_memory().override(kv_defrag="tier0"), bag().override(**{field: value}):
        assert type(select_allocator(upstream())) is ContiguousTokenAllocator


@pytest.mark.parametrize(
    "ranks, option",
    [
        (dict(pp_size=2, pp_rank=0, tp_rank=0, tp_size=1), "--pp-size"),
        (dict(dcp_size=2, dcp_enabled=True), "--dcp-size"),
    ],
)
def test_tier1_refuses_ranks_that_share_out_tokens_or_layers(ranks, option):
    with get_memory().override(kv_defrag="tier1"), get_parallel().override(**ranks):
        with pytest.raises(ValueError, match=f"{option}.*tier0"):
            select_allocator(upstream())


def test_a_wrong_budget_stops_the_server():
    with get_memory().override(kv_defrag="tier1", kv_defrag_copy_budget="lots"):
        with pytest.raises(ValueError, match="'lots'"):
            select_allocator(upstream())


@pytest.mark.parametrize("tier", ["tier0", "tier1"])
def test_pools_of_another_kind_are_refused(tier):
    class SlidingWindowAllocator(TokenToKVPoolAllocator):
        pass

    other = SlidingWindowAllocator(8, torch.bfloat16, "cpu", object(), need_sort=False)
    with get_memory().override(kv_defrag=tier):
        with pytest.raises(ValueError, match="SlidingWindowAllocator.*off"):
            select_allocator(other)


def test_the_flags_parse():
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(["--model-path", "none", "--kv-defrag", "tier1", "--kv-defrag-copy-budget", "1G"])
    assert (args.kv_defrag, args.kv_defrag_copy_budget) == ("tier1", "1G")
