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
    brings_code: bool  # config.json names Python files of the checkpoint
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


def load_target(
    path: Path, *, argument: str = "--model", quantisation: Quantisation | None = None
) -> TargetShape:
    """quantisation: instead of the one that config.json names, which may be unknown here."""
    source = config_path(path)
    config = read_json(source, argument=argument)
    return target_shape(config, source=str(source), quantisation=quantisation)


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
        if type(value) is not int or not 0 < value < 2**31:
            raise KitError(
                what=f"{self.source}: key {name!r}",
                expected="a positive integer below 2**31",
                got=repr(value),
                remedy="Correct the file, or give another model.",
            )
        return value

    def optional(self, name: str, default: int | None) -> int | None:
        return default if self.config.get(name) in (None, 0) else self.positive(name)


def target_shape(
    config: Any, *, source: str, quantisation: Quantisation | None = None
) -> TargetShape:
    outer = _Keys(config, source=source).config
    has_vision = "vision_config" in outer
    keys = _Keys(outer.get("text_config", outer), source=source)
    if keys.optional("index_head_dim", None):
        raise KitError(
            what=f"{source}: key 'index_head_dim'",
            expected="a model without sparse attention",
            got=repr(keys.config["index_head_dim"]),
            remedy="kdtree_sm120 does not serve it, and the cache of its indexer is not counted here.",
        )
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
        brings_code="auto_map" in outer,
        quantisation=quantisation or _quantisation(outer, keys.config, source=source),
    )


def _num_moe_layers(keys: _Keys, num_layers: int) -> int:
    first = keys.optional("first_k_dense_replace", 0)
    frequency = keys.optional("moe_layer_freq", 1)
    # Layers from first on whose number the frequency divides.
    return max(0, -(-num_layers // frequency) - -(-first // frequency))


def _quantisation(outer: dict, text: dict, *, source: str) -> Quantisation:
    config = outer.get("quantization_config") or text.get("quantization_config")
    if not config:
        return BF16
    method = _entry(config, "quant_method") or _entry(config, "quant_algo")
    if method == "fp8":
        block = config.get("weight_block_size") or [128, 128]
        if _is_block(block):
            scale_bits = 32 / (block[0] * block[1])
            return Quantisation(
                name="fp8-block", bits=8 + scale_bits, quantised=frozenset(PARTS)
            )
        raise _unknown(source, "weight_block_size", "two positive integers", block)
    if method == "compressed-tensors":
        return _compressed_tensors(config, source=source)
    if method in ("modelopt", "modelopt_fp4", "nvfp4"):
        return NAMED_QUANTISATION["nvfp4"]
    raise _unknown(
        source, "quant_method", "fp8, compressed-tensors or modelopt", method or config
    )


def _entry(config: Any, name: str) -> str:
    value = config.get(name) if isinstance(config, dict) else None
    return value.lower() if isinstance(value, str) else ""


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )


def _unknown(source: str, key: str, expected: str, got: Any) -> KitError:
    return KitError(
        what=f"{source}: quantization_config.{key}",
        expected=expected,
        got=repr(got),
        remedy=f"State it with --weights, one of {', '.join(NAMED_QUANTISATION)}.",
    )


def _compressed_tensors(config: dict, *, source: str) -> Quantisation:
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict) or not isinstance(weights.get("num_bits"), int):
        expected = "a group with weights.num_bits"
        raise _unknown(source, "config_groups", expected, groups)
    bits, group_size = weights["num_bits"], weights.get("group_size") or 0
    if not isinstance(group_size, int):
        raise _unknown(source, "group_size", "an integer", group_size)
    kind = weights.get("type", "int")
    scale_bits = 8 if kind == "float" and bits == 4 else 16
    ignored = config.get("ignore") or []
    if not isinstance(ignored, list):
        raise _unknown(source, "ignore", "a list of patterns", ignored)
    ignored = [str(pattern) for pattern in ignored]
    return Quantisation(
        name=f"{kind}{bits}" + (f"-g{group_size}" if group_size > 0 else ""),
        bits=bits + (scale_bits / group_size if group_size > 0 else 0),
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


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:  # a pattern of another dialect covers nothing that we know of
        return False


def _is_ignored(name: str, patterns: list[str]) -> bool:
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(_matches(pattern[3:], n) for n in (name, f"language_{name}")):
                return True
        elif name == pattern or name.startswith(pattern + "."):
            return True
    return False


def drafter_shape(config: Any, *, source: str) -> DrafterShape:
    keys = _Keys(config, source=source)
    dflash = keys.config.get("dflash_config")
    dflash = dflash if isinstance(dflash, dict) else {}
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
        block_size=_Keys(dflash, source=source).optional("block_size", None)
        or keys.optional("block_size", None),
    )
