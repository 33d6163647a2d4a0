# SPDX-License-Identifier: Apache-2.0
"""The small target (DeepSeek-V3 layout) and its DFlash drafter in plain torch.

Both follow the arithmetic of SGLang's modules of the same checkpoint formats, so that greedy tokens and
verify-step counts computed here can be compared with the server's. Shapes: ``b`` rows, ``s`` tokens,
``a`` anchors (block starts), ``h`` hidden size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|MASK|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD_ID, BOS_ID, EOS_ID, MASK_ID = 0, 1, 2, 3
FIRST_TEXT_ID = len(SPECIAL_TOKENS)
VOCAB_SIZE = 2048

HIDDEN = 256
NORM_EPS = 1e-6

NUM_LAYERS = 3
NUM_HEADS = 8
Q_LORA_RANK = 128
KV_LORA_RANK = 512
NOPE_DIM = 64
ROPE_DIM = 64
VALUE_DIM = 64
DENSE_LAYERS = 1  # the first layer has a dense MLP, the others experts
DENSE_WIDTH = 512
NUM_EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_WIDTH = 64
ROUTED_SCALE = 2.5

ROPE_THETA = 10000.0
YARN_FACTOR = 4.0
YARN_ORIGINAL_LENGTH = 1024
YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0
CONTEXT_LENGTH = int(YARN_FACTOR * YARN_ORIGINAL_LENGTH)

# The drafter reads the residual stream after these target layers. SGLang captures a layer's output at the
# entry of the next layer, so the last layer cannot be named.
FEATURE_LAYERS = (0, 1)
BLOCK_SIZE = 8
NUM_DRAFTS = BLOCK_SIZE - 1
DRAFTER_HEADS = 4
DRAFTER_KV_HEADS = 2
DRAFTER_HEAD_DIM = 64


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale, in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS)


def linear(fan_in: int, fan_out: int, gain: float = 1.0) -> nn.Linear:
    """A bias-free linear layer with normal weights of standard deviation ``gain / sqrt(fan_in)``."""
    layer = nn.Linear(fan_in, fan_out, bias=False)
    nn.init.normal_(layer.weight, std=gain * fan_in**-0.5)
    return layer


def residual_gain(num_layers: int) -> float:
    """Gain of projections that write to the residual stream."""
    return 0.5 / math.sqrt(2 * num_layers)


# ---------------------------------------------------------------------------------------------- rotary


def plain_frequencies(dim: int, theta: float = ROPE_THETA) -> Tensor:
    """Inverse wavelengths of plain rotary embedding, [dim / 2]."""
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies() -> Tensor:
    """YaRN: long wavelengths are divided by the factor, short ones kept, a ramp between, [ROPE_DIM / 2]."""

    def dimension_of(rotations: float) -> float:
        wavelength = YARN_ORIGINAL_LENGTH / (rotations * 2 * math.pi)
        return ROPE_DIM * math.log(wavelength) / (2 * math.log(ROPE_THETA))

    low = max(math.floor(dimension_of(YARN_BETA_FAST)), 0)
    high = min(math.ceil(dimension_of(YARN_BETA_SLOW)), ROPE_DIM - 1)
    ramp = ((torch.arange(ROPE_DIM // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    base = plain_frequencies(ROPE_DIM)
    return base * (1 - ramp) + base / YARN_FACTOR * ramp


# mscale = mscale_all_dim = 1: cos and sin stay as they are, the softmax scale takes the square.
ATTENTION_SCALE = (NOPE_DIM + ROPE_DIM) ** -0.5 * (0.1 * math.log(YARN_FACTOR) + 1.0) ** 2

CosSin = tuple[Tensor, Tensor]


def rotation(positions: Tensor, frequencies: Tensor) -> CosSin:
    """cos and sin of each position's angles, [..., 1, dim / 2] (the 1 broadcasts over heads)."""
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate_interleaved(x: Tensor, rot: CosSin) -> Tensor:
    """DeepSeek's layout: dimensions 2i and 2i + 1 form a pair. x [..., heads, dim]."""
    cos, sin = rot
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, rot: CosSin) -> Tensor:
    """The neox layout (the drafter's): dimensions i and i + dim / 2 form a pair. x [..., heads, dim]."""
    cos, sin = rot
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


# ---------------------------------------------------------------------------------------------- target


class KVCache:
    """Keys and values of one layer for ``rows`` sequences of at most ``length`` tokens."""

    def __init__(self, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(rows, NUM_HEADS, length, NOPE_DIM + ROPE_DIM, dtype=dtype, device=device)
        self.values = torch.empty(rows, NUM_HEADS, length, VALUE_DIM, dtype=dtype, device=device)

    def append(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [b, heads, s, dim] at ``start`` and return everything up to the end of it."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class LatentAttention(nn.Module):
    """Multi-head latent attention, evaluated with expanded keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = linear(HIDDEN, Q_LORA_RANK)
        self.q_a_layernorm = RMSNorm(Q_LORA_RANK)
        self.q_b_proj = linear(Q_LORA_RANK, NUM_HEADS * (NOPE_DIM + ROPE_DIM))
        self.kv_a_proj_with_mqa = linear(HIDDEN, KV_LORA_RANK + ROPE_DIM)
        self.kv_a_layernorm = RMSNorm(KV_LORA_RANK)
        self.kv_b_proj = linear(KV_LORA_RANK, NUM_HEADS * (NOPE_DIM + VALUE_DIM))
        self.o_proj = linear(NUM_HEADS * VALUE_DIM, HIDDEN, residual_gain(NUM_LAYERS))

    def forward(self, x: Tensor, rot: CosSin, cache: KVCache | None, start: int) -> Tensor:
        b, s, _ = x.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, s, NUM_HEADS, -1)
        query = torch.cat((query[..., :NOPE_DIM], rotate_interleaved(query[..., NOPE_DIM:], rot)), -1)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split((KV_LORA_RANK, ROPE_DIM), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, s, NUM_HEADS, -1)
        key_rope = rotate_interleaved(key_rope.unsqueeze(2), rot).expand(-1, -1, NUM_HEADS, -1)
        key = torch.cat((expanded[..., :NOPE_DIM], key_rope), -1).transpose(1, 2)
        value = expanded[..., NOPE_DIM:].transpose(1, 2)
        query = query.transpose(1, 2)
        if cache is not None:
            key, value = cache.append(start, key, value)
            key, value = key.to(query.dtype), value.to(query.dtype)
        if start and s > 1:
            raise ValueError("a cached forward takes the whole prompt at once, then one token at a time")
        if s == 1:
            weights = (query @ key.transpose(-1, -2)).float().mul(ATTENTION_SCALE).softmax(-1)
            mixed = weights.to(value.dtype) @ value
        else:
            if query.is_cuda:  # the flash kernel wants equal head sizes
                value = F.pad(value, (0, NOPE_DIM + ROPE_DIM - VALUE_DIM))
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=ATTENTION_SCALE)
            mixed = mixed[..., :VALUE_DIM]
        return self.o_proj(mixed.transpose(1, 2).reshape(b, s, NUM_HEADS * VALUE_DIM))


class GatedMLP(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, width: int, out_gain: float) -> None:
        super().__init__()
        self.gate_proj = linear(HIDDEN, width)
        self.up_proj = linear(HIDDEN, width)
        self.down_proj = linear(width, HIDDEN, out_gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertMLP(nn.Module):
    """Sigmoid router, selection by score plus bias, weights renormalised, one shared expert.

    All experts are evaluated and weighted (0 where not selected): cheap at this size, and exact.
    """

    def __init__(self, out_gain: float) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN) * HIDDEN**-0.5)
        self.register_buffer("correction_bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("load", torch.zeros(NUM_EXPERTS), persistent=False)
        self.gate_proj = linear(HIDDEN, NUM_EXPERTS * EXPERT_WIDTH)
        self.up_proj = linear(HIDDEN, NUM_EXPERTS * EXPERT_WIDTH)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, EXPERT_WIDTH, HIDDEN) * out_gain * EXPERT_WIDTH**-0.5)
        self.shared_experts = GatedMLP(EXPERT_WIDTH, out_gain)

    def scores(self, x: Tensor) -> Tensor:
        """Router scores before the bias, fp32 whatever the autocast state, [..., NUM_EXPERTS]."""
        with torch.autocast(x.device.type, enabled=False):
            return (x.float() @ self.router.float().t()).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        chosen = (scores + self.correction_bias).topk(EXPERTS_PER_TOKEN, -1).indices
        selected = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load.copy_(selected.detach().flatten(0, -2).mean(0))
        weights = scores * selected
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * ROUTED_SCALE
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        hidden = hidden.unflatten(-1, (NUM_EXPERTS, EXPERT_WIDTH)) * weights.unsqueeze(-1).to(hidden.dtype)
        routed = hidden.flatten(-2) @ self.down.flatten(0, 1).to(hidden.dtype)
        return routed + self.shared_experts(x)


class TargetLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, index: int) -> None:
        super().__init__()
        gain = residual_gain(NUM_LAYERS)
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attn = LatentAttention()
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = GatedMLP(DENSE_WIDTH, gain) if index < DENSE_LAYERS else ExpertMLP(gain)


class Target(nn.Module):
    """The target language model."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.25)
        self.layers = nn.ModuleList(TargetLayer(i) for i in range(NUM_LAYERS))
        self.norm = RMSNorm(HIDDEN)
        self.lm_head = linear(HIDDEN, VOCAB_SIZE, 0.5)
        self.register_buffer("frequencies", yarn_frequencies(), persistent=False)
        self.dropout = dropout

    def expert_layers(self) -> list[ExpertMLP]:
        """The expert MLPs, first layer first."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertMLP)]

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def forward(
        self, ids: Tensor, cache: list[KVCache] | None = None, start: int = 0, features_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """ids [b, s] -> normed output [b, s, h] and drafter features [b, s, h * len(FEATURE_LAYERS)].

        With ``features_only`` the layers above the last feature layer are skipped and the first result is
        the last feature layer's output.
        """
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        rot = rotation(positions, self.frequencies)
        x = self._drop(self.embed_tokens(ids))
        features = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[index]
            x = x + self._drop(layer.self_attn(layer.input_layernorm(x), rot, layer_cache, start))
            x = x + self._drop(layer.mlp(layer.post_attention_layernorm(x)))
            if index in FEATURE_LAYERS:
                features.append(x)
                if features_only and index == FEATURE_LAYERS[-1]:
                    return x, torch.cat(features, -1)
        return self.norm(x), torch.cat(features, -1)

    def logits(self, ids: Tensor) -> Tensor:
        """Next-token logits at every position, [b, s, vocabulary]."""
        return self.lm_head(self(ids)[0])

    def features(self, ids: Tensor) -> Tensor:
        """What the drafter sees of each position."""
        return self(ids, features_only=True)[1]


@torch.no_grad()
def generate(target: Target, prompts: Tensor, num_tokens: int, temperature: Tensor) -> Tensor:
    """Continue prompts [b, p] by ``num_tokens``; temperature [b], 0 = greedy. Returns [b, p + num_tokens]."""
    b, p = prompts.shape
    device = prompts.device
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
    cache = [KVCache(b, p + num_tokens, dtype, device) for _ in range(NUM_LAYERS)]
    tokens = torch.empty(b, p + num_tokens, dtype=torch.long, device=device)
    tokens[:, :p] = prompts
    step_input, start = prompts, 0
    any_sampled = bool((temperature > 0).any())
    for end in range(p, p + num_tokens):
        hidden, _ = target(step_input, cache, start)
        logits = target.lm_head(hidden[:, -1]).float()
        if any_sampled:  # Gumbel noise: argmax(logits / T + g) is a sample at temperature T
            gumbel = -torch.empty_like(logits).exponential_().log()
            logits = logits + temperature[:, None] * gumbel
        start += step_input.shape[1]
        step_input = logits.argmax(-1, keepdim=True)
        tokens[:, end] = step_input[:, 0]
    return tokens


# --------------------------------------------------------------------------------------------- drafter


class DrafterLayer(nn.Module):
    """Pre-norm attention of block positions over context and block, then an MLP."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        gain = residual_gain(num_layers)
        self.input_layernorm = RMSNorm(HIDDEN)
        self.q_proj = linear(HIDDEN, DRAFTER_HEADS * DRAFTER_HEAD_DIM)
        self.k_proj = linear(HIDDEN, DRAFTER_KV_HEADS * DRAFTER_HEAD_DIM)
        self.v_proj = linear(HIDDEN, DRAFTER_KV_HEADS * DRAFTER_HEAD_DIM)
        self.o_proj = linear(DRAFTER_HEADS * DRAFTER_HEAD_DIM, HIDDEN, gain)
        self.q_norm = RMSNorm(DRAFTER_HEAD_DIM)
        self.k_norm = RMSNorm(DRAFTER_HEAD_DIM)
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = GatedMLP(width, gain)

    def keys_values(self, x: Tensor, rot: CosSin) -> tuple[Tensor, Tensor]:
        """x [b, s, h] -> keys and values [b, s, kv heads, dim]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (DRAFTER_KV_HEADS, DRAFTER_HEAD_DIM)))
        return rotate_halves(key, rot), self.v_proj(x).unflatten(-1, (DRAFTER_KV_HEADS, DRAFTER_HEAD_DIM))

    def forward(self, x: Tensor, rot: CosSin, context: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        query = self.q_norm(self.q_proj(normed).unflatten(-1, (DRAFTER_HEADS, DRAFTER_HEAD_DIM)))
        group = DRAFTER_HEADS // DRAFTER_KV_HEADS
        key, value = (
            torch.cat((old, new.to(old.dtype)), 1).repeat_interleave(group, 2).transpose(1, 2)
            for old, new in zip(context, self.keys_values(normed, rot), strict=True)
        )
        query = rotate_halves(query, rot).transpose(1, 2).to(key.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash: fill a block of masked positions in one pass, given target features of the context.

    A block that starts at anchor P holds the token at P and ``NUM_DRAFTS`` masks. Its positions see the
    features of positions below P and each other, without causality. The output at P + k is the
    distribution of the token at P + k. Embedding and head are the target's.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.num_layers, self.width = num_layers, width
        self.fc = linear(HIDDEN * len(FEATURE_LAYERS), HIDDEN)
        self.hidden_norm = RMSNorm(HIDDEN)
        self.layers = nn.ModuleList(DrafterLayer(width, num_layers) for _ in range(num_layers))
        self.norm = RMSNorm(HIDDEN)
        self.register_buffer("frequencies", plain_frequencies(DRAFTER_HEAD_DIM), persistent=False)

    def forward(
        self,
        features: Tensor,
        anchor_tokens: Tensor,
        anchors: Tensor,
        embedding: Tensor,
        *,
        position_shift: int = 0,
        context_shift: int = 0,
    ) -> Tensor:
        """Hidden states of the masked positions, [b, a, NUM_DRAFTS, h].

        features [b, s, 2h]; anchors and anchor_tokens [b, a]; embedding [vocabulary, h]. The two shifts
        are 0 in any correct use: they let a test measure what an off-by-one costs.
        """
        b, s, _ = features.shape
        device = features.device
        context = self.hidden_norm(self.fc(features))
        context_rot = rotation(torch.arange(s, device=device), self.frequencies)
        offsets = torch.arange(BLOCK_SIZE, device=device)
        block_rot = rotation((anchors[..., None] + offsets).flatten(1) + position_shift, self.frequencies)
        ids = torch.full((*anchors.shape, BLOCK_SIZE), MASK_ID, device=device, dtype=torch.long)
        ids[..., 0] = anchor_tokens
        x = F.embedding(ids.flatten(1), embedding)
        sees_context = torch.arange(s, device=device) < anchors[..., None] + context_shift
        block = torch.arange(anchors.shape[1], device=device).repeat_interleave(BLOCK_SIZE)
        same_block = (block[:, None] == block).expand(b, -1, -1)
        visible = torch.cat((sees_context.repeat_interleave(BLOCK_SIZE, 1), same_block), -1).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, block_rot, layer.keys_values(context, context_rot), visible)
        return self.norm(x).unflatten(1, (anchors.shape[1], BLOCK_SIZE))[:, :, 1:]
