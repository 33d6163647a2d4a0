# SPDX-License-Identifier: Apache-2.0
"""The shape facts of an MLA target and of its drafter, read from their config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from sglang.kdtree.errors import KitError
from sglang.kdtree.result import read_json

# MoonViT-3D of Kimi K2.5 and K2.6 with its projector; config.json does not give a
# parameter count, the model report says 0.4 billion.
KIMI_VISION_PARAMS = 425_000_000


class Quantisation(msgspec.Struct, frozen=True, kw_only=True):
    """Bits per weight, scales included, and which parts of the model they cover."""

    name: str
    bits: float
    quantised: frozenset[str]


class TargetShape(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    num_layers: int
    hidden: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    vocab: int
    intermediate: int
    moe_intermediate: int
    routed_experts: int
    experts_per_token: int
    shared_experts: int
    num_moe_layers: int
    tied_embeddings: bool
    vision_params: int
    max_positions: int
    quantisation: Quantisation


class DrafterShape(msgspec.Struct, frozen=True, kw_only=True):
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    target_features: int
    block_size: int | None


PARTS = ("experts", "shared_experts", "dense_mlp", "attention")
BF16 = Quantisation(name="bf16", bits=16.0, quantised=frozenset())
NAMED_QUANTISATION = {
    "bf16": BF16,
    # One bf16 scale for each group of 32.
    "int4-g32": Quantisation(
        name="int4-g32", bits=4.5, quantised=frozenset({"experts"})
    ),
    # One float32 scale for each 128 x 128 block.
    "fp8-block": Quantisation(
        name="fp8-block", bits=8 + 32 / (128 * 128), quantised=frozenset(PARTS)
    ),
    # One float8 scale for each group of 16.
    "nvfp4": Quantisation(
        name="nvfp4",
        bits=4.5,
        quantised=frozenset({"experts", "shared_experts", "dense_mlp"}),
    ),
}


def config_path(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def load_target(path: Path) -> TargetShape:
    source = config_path(path)
    return target_shape(read_json(source, argument="--model"), source=str(source))


def load_drafter(path: Path) -> DrafterShape:
    source = config_path(path)
    return drafter_shape(read_json(source, argument="--draft"), source=str(source))


class _Keys:
    """Typed access to a config.json; a missing or odd value names key and file."""

    def __init__(self, config: Any, *, source: str):
        if not isinstance(config, dict):
            raise KitError(
                what=source,
                expected="a JSON object",
                got=type(config).__name__,
                remedy="Give the model's config.json or the folder that holds it.",
            )
        self.config = config
        self.source = source

    def positive(self, name: str) -> int:
        if name not in self.config:
            raise KitError(
                what=f"{self.source}: key {name!r}",
                expected="a positive integer",
                got="no such key",
                remedy="Only MLA models of the DeepSeek V2/V3 and Kimi K2 family (and DFlash drafters with --draft) can be planned.",
            )
        value = self.config[name]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise KitError(
                what=f"{self.source}: key {name!r}",
                expected="a positive integer",
                got=repr(value),
                remedy="Correct the file, or give another model.",
            )
        return value

    def optional(self, name: str, default: int | None) -> int | None:
        return default if self.config.get(name) in (None, 0) else self.positive(name)


def target_shape(config: Any, *, source: str) -> TargetShape:
    outer = _Keys(config, source=source).config
    has_vision = "vision_config" in outer
    keys = _Keys(outer.get("text_config", outer), source=source)
    num_layers = keys.positive("num_hidden_layers")
    experts = keys.optional("n_routed_experts", 0)
    return TargetShape(
        model_type=str(outer.get("model_type", "unknown")),
        num_layers=num_layers,
        hidden=keys.positive("hidden_size"),
        heads=keys.positive("num_attention_heads"),
        q_lora_rank=keys.optional("q_lora_rank", None),
        kv_lora_rank=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=keys.positive("qk_rope_head_dim"),
        v_dim=keys.positive("v_head_dim"),
        vocab=keys.positive("vocab_size"),
        intermediate=keys.positive("intermediate_size"),
        moe_intermediate=keys.positive("moe_intermediate_size") if experts else 0,
        routed_experts=experts,
        experts_per_token=keys.positive("num_experts_per_tok") if experts else 0,
        shared_experts=keys.optional("n_shared_experts", 0),
        num_moe_layers=_num_moe_layers(keys, num_layers) if experts else 0,
        tied_embeddings=bool(keys.config.get("tie_word_embeddings", False)),
        vision_params=KIMI_VISION_PARAMS if has_vision else 0,
        max_positions=keys.positive("max_position_embeddings"),
        quantisation=_quantisation(outer, keys.config, source=source),
    )


def _num_moe_layers(keys: _Keys, num_layers: int) -> int:
    first = keys.optional("first_k_dense_replace", 0)
    frequency = keys.optional("moe_layer_freq", 1)
    return sum(1 for layer in range(first, num_layers) if layer % frequency == 0)


def _quantisation(outer: dict, text: dict, *, source: str) -> Quantisation:
    config = outer.get("quantization_config") or text.get("quantization_config")
    if not config:
        return BF16
    method = str(config.get("quant_method", config.get("quant_algo", ""))).lower()
    if method == "fp8":
        rows, columns = config.get("weight_block_size") or (128, 128)
        return Quantisation(
            name="fp8-block", bits=8 + 32 / (rows * columns), quantised=frozenset(PARTS)
        )
    if method == "compressed-tensors":
        return _compressed_tensors(config, source=source)
    if method in ("modelopt", "modelopt_fp4", "nvfp4"):
        return NAMED_QUANTISATION["nvfp4"]
    raise KitError(
        what=f"{source}: quantization_config.quant_method",
        expected="fp8, compressed-tensors or modelopt",
        got=repr(method),
        remedy=f"State it with --weights, one of {', '.join(NAMED_QUANTISATION)}.",
    )


def _compressed_tensors(config: dict, *, source: str) -> Quantisation:
    groups = list((config.get("config_groups") or {}).values())
    if not groups or not groups[0].get("weights"):
        raise KitError(
            what=f"{source}: quantization_config.config_groups",
            expected="one group with a weights entry",
            got=repr(config.get("config_groups")),
            remedy=f"State it with --weights, one of {', '.join(NAMED_QUANTISATION)}.",
        )
    weights = groups[0]["weights"]
    bits, group_size = int(weights["num_bits"]), weights.get("group_size")
    scale_bits = 8 if weights.get("type") == "float" and bits == 4 else 16
    ignored = [str(pattern) for pattern in config.get("ignore", [])]
    return Quantisation(
        name=f"{weights.get('type', 'int')}{bits}"
        + (f"-g{group_size}" if group_size else ""),
        bits=bits + (scale_bits / group_size if group_size else 0),
        quantised=frozenset(
            part
            for part, name in _SAMPLE_NAME.items()
            if not _is_ignored(name, ignored)
        ),
    )


_SAMPLE_NAME = {
    "experts": "model.layers.1.mlp.experts.0.gate_proj",
    "shared_experts": "model.layers.1.mlp.shared_experts.gate_proj",
    "dense_mlp": "model.layers.0.mlp.gate_proj",
    "attention": "model.layers.1.self_attn.o_proj",
}


def _is_ignored(name: str, patterns: list[str]) -> bool:
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name) or re.match(pattern[3:], f"language_{name}"):
                return True
        elif name == pattern or name.startswith(pattern + "."):
            return True
    return False


def drafter_shape(config: Any, *, source: str) -> DrafterShape:
    keys = _Keys(config, source=source)
    dflash = keys.config.get("dflash_config") or {}
    layers = dflash.get("target_layer_ids") or keys.config.get("target_layer_ids")
    if not isinstance(layers, list) or not layers:
        raise KitError(
            what=f"{source}: dflash_config.target_layer_ids",
            expected="a non-empty list of target layers",
            got=repr(layers),
            remedy="Only DFlash drafters can be planned with --draft; leave it out otherwise.",
        )
    heads = keys.positive("num_attention_heads")
    hidden = keys.positive("hidden_size")
    return DrafterShape(
        num_layers=keys.positive("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.optional("num_key_value_heads", heads),
        head_dim=keys.optional("head_dim", hidden // heads),
        intermediate=keys.positive("intermediate_size"),
        target_features=len(layers),
        block_size=dflash.get("block_size") or keys.config.get("block_size"),
    )
