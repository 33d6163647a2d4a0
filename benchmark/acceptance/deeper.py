# SPDX-License-Identifier: Apache-2.0
"""The small model with more layers, whose outputs are zero: every answer and draft stays what it is, and a step takes
the GPU longer than the host, as in a model that is worth serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

OUTPUTS = ("o_proj.weight", "down_proj.weight")


def make_deeper(models: Path, layers: int, folder: Path) -> None:
    """Write target and drafter of models into folder, the target with as many layers."""
    import torch
    from safetensors.torch import load_file, save_file

    for name in ("target", "drafter"):
        shutil.copytree(models / name, folder / name)
    config = folder / "target" / "config.json"
    told = json.loads(config.read_text())
    trained = told["num_hidden_layers"]
    if layers < trained:
        raise ValueError(f"layers: expected at least the {trained} trained ones; got {layers}")
    config.write_text(json.dumps(told | {"num_hidden_layers": layers}))
    weights = folder / "target" / "model.safetensors"
    tensors = load_file(weights)
    last = f"model.layers.{trained - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        weight = torch.zeros_like(tensors[name]) if name.endswith(OUTPUTS) else tensors[name]
        for layer in range(trained, layers):
            tensors[f"model.layers.{layer}.{name.removeprefix(last)}"] = weight.clone()
    save_file(tensors, weights)
    # The drafter's config says how many layers its target has.
    config = folder / "drafter" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_target_layers": layers}))
