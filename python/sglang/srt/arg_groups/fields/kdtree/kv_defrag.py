# SPDX-License-Identifier: Apache-2.0
"""Flags of KV defragmentation."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang.srt.arg_groups.arg_utils import A


class KDTreeMemory(msgspec.Struct):
    _NS_PATH = "memory"

    kv_defrag: A[
        Literal["off", "tier0", "tier1"],
        "How the KV slots of a request are kept together: off = upstream's order, "
        "tier0 = allocated in runs, ascending, tier1 = tier0, and slots of running "
        "requests are moved together under --kv-defrag-copy-budget.",
    ] = "off"
    kv_defrag_copy_budget: A[
        str,
        "--kv-defrag tier1 only. Bytes of KV that may be moved after each step, over "
        "all layers and pools of a rank, such as 64M or 1G.",
    ] = "64M"


FIELDS = KDTreeMemory
REGISTERS = []
