# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights on one rank, part by part."""

from __future__ import annotations

import msgspec

from sglang.kdtree.model_shape import DrafterShape, TargetShape

BF16_BITS = 16


class WeightPart(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    params: int  # of the whole model
    bits: float
    ranks: int  # over how many ranks the part is divided

    @property
    def total_bytes(self) -> int:
        return round(self.params * self.bits / 8)

    @property
    def rank_bytes(self) -> int:
        return -(-self.total_bytes // self.ranks)


def target_parts(
    shape: TargetShape, *, tp: int, attention_tp: int, redundant_experts: int = 0
) -> list[WeightPart]:
    """Parts of the target as SGLang holds them after loading.

    The two low-rank down-projections and the router are whole on every rank. SGLang keeps
    kv_b_proj and, beside it, its two halves in the absorbed layout ("absorbed" below).
    """
    quantisation = shape.quantisation

    def bits(part: str) -> float:
        return quantisation.bits if part in quantisation.quantised else BF16_BITS

    layers, hidden, heads = shape.num_layers, shape.hidden, shape.heads
    kv_b = shape.kv_lora_rank * heads * (shape.nope_dim + shape.v_dim)
    q_width = heads * (shape.nope_dim + shape.rope_dim)
    q_up = (shape.q_lora_rank or hidden) * q_width
    down = hidden * ((shape.q_lora_rank or 0) + shape.kv_lora_rank + shape.rope_dim)
    attention_up = q_up + kv_b + heads * shape.v_dim * hidden
    expert = 3 * hidden * shape.moe_intermediate
    dense_layers = layers - shape.num_moe_layers
    embeddings = shape.vocab * hidden * (1 if shape.tied_embeddings else 2)
    norms = (
        layers * (2 * hidden + (shape.q_lora_rank or 0) + shape.kv_lora_rank) + hidden
    )
    parts = [
        (
            "routed experts",
            shape.num_moe_layers * (shape.routed_experts + redundant_experts) * expert,
            bits("experts"),
            tp,
        ),
        (
            "shared experts",
            shape.num_moe_layers * shape.shared_experts * expert,
            bits("shared_experts"),
            tp,
        ),
        (
            "dense MLP",
            dense_layers * 3 * hidden * shape.intermediate,
            bits("dense_mlp"),
            tp,
        ),
        ("attention, by heads", layers * attention_up, bits("attention"), attention_tp),
        ("attention, replicated", layers * down, bits("attention"), 1),
        ("kv_b_proj, absorbed copy", layers * kv_b, BF16_BITS, attention_tp),
        ("router", shape.num_moe_layers * shape.routed_experts * hidden, BF16_BITS, 1),
        ("embedding and head", embeddings, BF16_BITS, tp),
        ("norms", norms, BF16_BITS, 1),
        ("vision tower", shape.vision_params, BF16_BITS, tp),
    ]
    return [
        WeightPart(name=name, params=params, bits=part_bits, ranks=ranks)
        for name, params, part_bits, ranks in parts
        if params
    ]


def drafter_parts(shape: DrafterShape, *, tp: int) -> list[WeightPart]:
    """A DFlash drafter: embedding and head are the target's; the feature projection is whole on every rank."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.hidden * shape.intermediate
    return [
        WeightPart(
            name="drafter layers",
            params=shape.num_layers * (attention + mlp),
            bits=BF16_BITS,
            ranks=tp,
        ),
        WeightPart(
            name="drafter feature projection",
            params=shape.target_features * shape.hidden * shape.hidden,
            bits=BF16_BITS,
            ranks=1,
        ),
    ]


def checkpoint_bytes(parts: list[WeightPart]) -> int:
    """Size of the checkpoint on disk: every part once, without the absorbed copy."""
    return sum(part.total_bytes for part in parts if "absorbed" not in part.name)


def rank_bytes(parts: list[WeightPart]) -> int:
    return sum(part.rank_bytes for part in parts)
