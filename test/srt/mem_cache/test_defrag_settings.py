# SPDX-License-Identifier: Apache-2.0
"""--kv-defrag and --kv-defrag-copy-budget: what they take and what they refuse."""

import logging

import prometheus_client
import pytest
import torch
from e2e.servers import MODELS

from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.arg_groups.fields.kdtree.kv_defrag import parse_size
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.allocator.contiguous import (
    ContiguousPagedAllocator,
    ContiguousTokenAllocator,
)
from sglang.srt.mem_cache.defrag.metrics import DefragMetrics
from sglang.srt.mem_cache.defrag.settings import select_allocator
from sglang.srt.runtime_context import get_memory
from sglang.srt.server_args import ServerArgs, prepare_server_args


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


def test_an_engines_tier_is_one_of_three():
    """Its arguments go by no parser; another name would have been taken for tier1."""
    args = ServerArgs(model_path=str(MODELS / "target"), device="cpu", kv_defrag="Tier1")
    with pytest.raises(ValueError, match="kv_defrag is 'Tier1'; use off, tier0 or tier1"):
        args.resolve_once()


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


def resolve(**values):
    """What a launcher does before it starts a process. The model is looked for last."""
    ServerArgs(**dict(model_path="none", device="cpu") | values).resolve_once()


@pytest.mark.parametrize(
    "field, value, who",
    [
        ("enable_hierarchical_cache", True, "host"),
        ("enable_lmcache", True, "LMCache"),
        ("enable_flexkv", True, "FlexKV"),
        ("enable_unified_cache_external_linker", True, "linked store"),
        ("radix_cache_backend", "flexkv", "prefix cache"),
        ("enable_session_radix_cache", True, "sessions"),
        ("enable_streaming_session", True, "sessions"),
        ("disaggregation_mode", "prefill", "transfers"),
        ("disaggregation_mode", "decode", "transfers"),
        ("pp_size", 2, "stages"),
        ("dcp_size", 2, "ranks"),
        ("kv_canary", "log", "canary"),
    ],
)
def test_tier1_is_refused_with_the_arguments_where_slots_are_kept_elsewhere(field, value, who):
    flag = "--" + field.replace("_", "-")
    with pytest.raises(ValueError, match=rf"tier1 .*{flag} \(.*{who}.*\): .*\. Use --kv-defrag tier0.*drop"):
        resolve(kv_defrag="tier1", **{field: value})
    resolve(kv_defrag="tier0", **{field: value})


@pytest.mark.parametrize("tier", ["tier0", "tier1"])
@pytest.mark.parametrize("field", ["enable_unified_memory", "enable_hisparse", "enable_kv_cache_sharding"])
def test_both_tiers_are_refused_with_the_arguments_where_slots_are_not_of_one_pool(tier, field):
    flag = "--" + field.replace("_", "-")
    with pytest.raises(ValueError, match=rf"--kv-defrag {tier} .*{flag} \(.*\): .*\. Use --kv-defrag off"):
        resolve(kv_defrag=tier, **{field: True})
    resolve(**{field: True})


def test_every_refused_option_is_named():
    with pytest.raises(ValueError, match="--enable-lmcache .*, --pp-size .*, --kv-canary "):
        resolve(kv_defrag="tier1", enable_lmcache=True, pp_size=2, kv_canary="raise")


def test_what_resolution_turns_on_is_refused_before_weights_are_loaded(monkeypatch):
    target = dict(model_path=str(MODELS / "target"), kv_defrag="tier1")
    resolve(**target)

    def turn_on(server_args, previous):
        declare_resolution(server_args, "test", enable_hierarchical_cache=True)

    monkeypatch.setitem(resolution_hooks._HOOKS, "handle_cache_compatibility", [turn_on])
    with pytest.raises(ValueError, match="--enable-hierarchical-cache .*tier0"):
        resolve(**target)


def test_a_wrong_budget_stops_an_engine():
    """Which has no command line."""
    with pytest.raises(ValueError, match="'lots'"):
        resolve(kv_defrag="tier1", kv_defrag_copy_budget="lots")


@pytest.mark.parametrize("tier", ["tier0", "tier1"])
def test_pools_of_another_kind_are_refused(tier):
    class SlidingWindowAllocator(TokenToKVPoolAllocator):
        pass

    other = SlidingWindowAllocator(8, torch.bfloat16, "cpu", object(), need_sort=False)
    with get_memory().override(kv_defrag=tier):
        with pytest.raises(ValueError, match="SlidingWindowAllocator.*off"):
            select_allocator(other)


def test_the_flags_parse():
    args = prepare_server_args(["--model-path", "none", "--kv-defrag", "tier1", "--kv-defrag-copy-budget", "1G"])
    assert (args.kv_defrag, args.kv_defrag_copy_budget) == ("tier1", "1G")
