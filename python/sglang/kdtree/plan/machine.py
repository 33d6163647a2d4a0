# SPDX-License-Identifier: Apache-2.0
"""What a GPU has to offer before the weights are loaded."""

from __future__ import annotations

import re

import msgspec

from sglang.kdtree.errors import KitError

MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int  # as nvidia-smi reports it


KNOWN_GPUS = {
    "rtx-pro-6000": Gpu(name="RTX PRO 6000 Blackwell", total_bytes=97_887 * MIB),
    "rtx-5090": Gpu(name="RTX 5090", total_bytes=32_607 * MIB),
    "h200": Gpu(name="H200", total_bytes=143_771 * MIB),
}
# Taken before SGLang's baseline is read: driver context, library workspaces and, with more than
# one GPU, the buffers of the collectives. Assumed. The figure for several GPUs misses two pools
# seen on 8 x RTX PRO 6000 (Kimi K2.6, TP 8: 101,134 tokens at 0.85, 195,011 at 0.93) by the same
# share in opposite directions, see calibrate.free_from_pools and docs/deploy-kimi-k2.6.md.
RESERVED_ONE_GPU = 1_024 * MIB
RESERVED_MANY_GPUS = 3_645 * MIB


def reserved_bytes(*, gpus: int) -> int:
    return RESERVED_ONE_GPU if gpus == 1 else RESERVED_MANY_GPUS


_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": MIB,
    "GIB": 1 << 30,
}


def parse_bytes(text: str, *, argument: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise KitError(
            what=argument,
            expected="a size such as 96GB, 95.6GiB or 97887MiB",
            got=repr(text),
            remedy="Give a number and a unit (KB, MB, GB, KiB, MiB, GiB).",
        )
    return round(float(match[1]) * _UNITS[match[2].upper()])


def parse_gpu(text: str) -> Gpu:
    key = text.strip().lower().replace(" ", "-")
    if key in KNOWN_GPUS:
        return KNOWN_GPUS[key]
    try:
        return Gpu(name=text, total_bytes=parse_bytes(text, argument="--gpu"))
    except KitError as error:
        raise KitError(
            what="--gpu",
            expected=f"one of {', '.join(KNOWN_GPUS)} or the memory of one GPU such as 97887MiB",
            got=repr(text),
            remedy="nvidia-smi --query-gpu=memory.total --format=csv prints it.",
        ) from error
