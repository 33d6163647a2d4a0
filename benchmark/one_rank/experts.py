# SPDX-License-Identifier: Apache-2.0
"""The tiles of upstream's fused MoE kernel, the same for every number of tokens.

Untuned, upstream takes small tiles for at most as many tokens as there are experts. With the 384 experts that 8 stand
for here these are all steps of the benchmark; with 8 they would be plain decoding alone, and a tree would pay for large
tiles. So every arm gets the small ones, through a file where upstream looks for tuned ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_MOE_CONFIG_DIR"
TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}


def write_tiles(folder: Path, model: dict[str, Any], device_name: str, triton_version: str) -> Path:
    """model: of one rank. -> ``folder``, for VARIABLE"""
    experts, width = model["n_routed_experts"], model["moe_intermediate_size"]
    place = folder / "configs" / f"triton_{triton_version.replace('.', '_')}"
    place.mkdir(parents=True)
    name = f"E={experts},N={width},device_name={device_name.replace(' ', '_')}.json"
    (place / name).write_text(json.dumps({"1": TILES}))  # the nearest number of tokens is taken
    return folder
