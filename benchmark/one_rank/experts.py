# SPDX-License-Identifier: Apache-2.0
"""The tiles of upstream's fused MoE kernel, the same files for every arm.

Upstream takes tiles from a file for the number of experts, their width and the GPU, an entry a number of tokens, and
without one by a rule that depends on how many experts there are: with the 384 that 8 stand for here every step of the
benchmark would have the small tiles, with 8 plain decoding alone. So every arm gets files where upstream looks for
them: those that tune_experts.py wrote for this card, or, for a card without, the small tiles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VARIABLE = "SGLANG_MOE_CONFIG_DIR"
TUNED = Path(__file__).resolve().parent / "tuned"
PRODUCTS = ("up", "down")
SMALL = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}


def place(folder: Path, model: dict[str, Any], device_name: str, triton_version: str, product: str) -> Path:
    """Where upstream looks under ``folder``. model: of one rank."""
    experts, width = model["n_routed_experts"], model["moe_intermediate_size"]
    name = f"E={experts},N={width},device_name={device_name.replace(' ', '_')}{'_down' * (product == 'down')}.json"
    return folder / "configs" / f"triton_{triton_version.replace('.', '_')}" / name


def write(path: Path, tiles: dict[str, dict[str, int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(tokens)}: {json.dumps(tiles[tokens])}" for tokens in sorted(tiles, key=int)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def tiles_of(model: dict[str, Any], device_name: str, triton_version: str) -> dict[str, dict[str, dict[str, int]]]:
    """-> "up" and "down", the two products -> tokens -> tiles; upstream takes the nearest number of tokens."""
    found = {}
    for product in PRODUCTS:
        path = place(TUNED, model, device_name, triton_version, product)
        found[product] = json.loads(path.read_text()) if path.is_file() else {"1": SMALL}
    return found


def write_tiles(folder: Path, model: dict[str, Any], device_name: str, triton_version: str) -> Path:
    """-> ``folder``, for VARIABLE"""
    for product, tiles in tiles_of(model, device_name, triton_version).items():
        write(place(folder, model, device_name, triton_version, product), tiles)
    return folder
