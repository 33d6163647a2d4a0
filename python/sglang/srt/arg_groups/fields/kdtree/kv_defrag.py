# SPDX-License-Identifier: Apache-2.0
"""Flags of KV defragmentation."""

from __future__ import annotations

import argparse
import re
from typing import Literal

import msgspec

from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_FACTOR = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str | int) -> int:
    """Bytes of ``64M``, ``1.5GiB``, ``65536``. Units are powers of 1024."""
    match = _SIZE.fullmatch(str(text))
    size = int(float(match[1]) * _FACTOR[match[2].upper()]) if match else 0
    if size < 1:
        raise ValueError(
            f"--kv-defrag-copy-budget {text!r} is not a size of at least one byte. "
            "Write a number of bytes with K, M, G or T, such as 64M."
        )
    return size


def _size_text(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


# Field -> its value where nothing but the pool keeps slot numbers, and who keeps them
# otherwise. In the second table nobody does, but slots are not those of one plain pool.
_KEEPERS = {
    "enable_hierarchical_cache": (False, "copies between host and device under way"),
    "enable_lmcache": (False, "LMCache's connector"),
    "enable_flexkv": (False, "FlexKV's manager"),
    "enable_unified_cache_external_linker": (False, "loads from the linked store"),
    "radix_cache_backend": (None, "the prefix cache of that name"),
    "enable_session_radix_cache": (False, "the sessions"),
    "enable_streaming_session": (False, "the rows of sessions between requests"),
    "disaggregation_mode": ("null", "transfers between prefill and decode"),
    "pp_size": (1, "batches on their way through the stages"),
    "dcp_size": (1, "ranks that hold a part of each page"),
    "kv_canary": ("none", "the canary"),
}
_OTHER_POOLS = {
    "enable_unified_memory": (False, "virtual slots"),
    "enable_hisparse": (False, "two pools, on the host and on the device"),
    "enable_kv_cache_sharding": (False, "slots shared out between ranks"),
}


@register_resolution_hook("handle_hardware_runtime_validation")
@register_resolution_hook("handle_other_validations")
def refuse_what_a_tier_cannot(server_args, previous) -> None:
    """At the first step, before a model is looked for, and once more when all is resolved."""
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    cfg = resolving_view(server_args)
    if cfg.kv_defrag == "off":
        return
    if cfg.kv_defrag not in ("tier0", "tier1"):  # an Engine's arguments are not parsed
        raise ValueError(f"kv_defrag is {cfg.kv_defrag!r}; use off, tier0 or tier1.")

    def found(table: dict) -> str:
        return ", ".join(
            f"--{field.replace('_', '-')} ({who})"
            for field, (plain, who) in table.items()
            if getattr(cfg, field) != plain
        )

    if pools := found(_OTHER_POOLS):
        raise ValueError(
            f"--kv-defrag {cfg.kv_defrag} does not work with {pools}: it needs one plain "
            "pool of slots. Use --kv-defrag off, or drop the other option."
        )
    if cfg.kv_defrag == "tier1":
        parse_size(cfg.kv_defrag_copy_budget)
        if keepers := found(_KEEPERS):
            raise ValueError(
                f"--kv-defrag tier1 does not work with {keepers}: slot numbers are kept "
                "where a move does not reach. Use --kv-defrag tier0, which only "
                "allocates, or drop the other option."
            )


class KDTreeMemory(msgspec.Struct):
    _NS_PATH = "memory"

    kv_defrag: A[
        Literal["off", "tier0", "tier1"],
        "How the KV slots of a request are kept together: off = the stock order, "
        "tier0 = allocated in runs, ascending, tier1 = tier0, and slots of running "
        "requests are moved together under --kv-defrag-copy-budget.",
    ] = "off"
    kv_defrag_copy_budget: A[
        str,
        Arg(
            help="--kv-defrag tier1 only. Bytes of KV that may be moved after each "
            "step, over all layers and pools of a rank, such as 64M or 1G.",
            type_parser=_size_text,
        ),
    ] = "64M"


FIELDS = KDTreeMemory
REGISTERS = []
