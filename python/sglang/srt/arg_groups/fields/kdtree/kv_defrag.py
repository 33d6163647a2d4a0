# SPDX-License-Identifier: Apache-2.0
"""Flags of KV defragmentation."""

from __future__ import annotations

import argparse
import re
from typing import Literal

import msgspec

from sglang.srt.arg_groups.arg_utils import A, Arg

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
        Arg(
            help="--kv-defrag tier1 only. Bytes of KV that may be moved after each "
            "step, over all layers and pools of a rank, such as 64M or 1G.",
            type_parser=_size_text,
        ),
    ] = "64M"


FIELDS = KDTreeMemory
REGISTERS = []
