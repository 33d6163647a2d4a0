# SPDX-License-Identifier: Apache-2.0
"""KV bytes per token and the size of the KV pool, as the pinned SGLang computes them in
KVCacheConfigurator._profile_available_bytes and DefaultPoolConfigurator.

tokens = floor((P * f - R) / c), then down to a whole page, where
  P  free GPU memory before the weights are loaded (measure_pre_model_load_memory: the least of all ranks),
  f  --mem-fraction-static,
  R  what is resident when the pool is sized (weights, library workspaces) and what is kept
     out of the KV budget (the cache of image embeddings of a multimodal model),
  c  KV bytes per token on one rank (target and drafter).
The remaining P * (1 - f) is the slack for everything allocated later.
"""

from __future__ import annotations

from sglang.kdtree.model_shape import DrafterShape, TargetShape

# SGLANG_VLM_CACHE_SIZE_MB of the pinned release. --mm-feature-transport cuda_ipc or cuda_vmm
# would keep 1 GiB more; on the hosts planned for here the transport is cpu unless it is asked for.
EMBEDDING_CACHE_BYTES = 100 << 20
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}


# How a server charges the drafter to the KV budget; the first is what the pinned release does.
ACCOUNTING = {
    "own-geometry": "loaded before the pool is sized (Scheduler.init_model_worker), charged by its own KV heads "
    "(dflash_draft_cell_size_per_token), as this fork does",
    "layer-scaled": "loaded after the pool is sized, charged as so many layers of the target "
    "(scale_kv_cell_size_per_token_for_dflash without the drafter's own figure), as older releases did",
}


def target_cell_bytes(shape: TargetShape, *, kv_dtype: str) -> int:
    """The latent row is whole on every rank: tensor parallelism does not divide it."""
    return (
        shape.num_layers
        * (shape.kv_lora_rank + shape.rope_dim)
        * ELEMENT_BYTES[kv_dtype]
    )


def drafter_cell_bytes(
    shape: DrafterShape | None,
    *,
    target: TargetShape,
    target_cell: int,
    attention_tp: int,
    kv_dtype: str,
    accounting: str,
) -> int:
    if shape is None:
        return 0
    if accounting == "layer-scaled":
        scaled = -(
            -target_cell * (target.num_layers + shape.num_layers) // target.num_layers
        )
        return scaled - target_cell
    heads = max(1, shape.kv_heads // attention_tp)
    return heads * 2 * shape.head_dim * shape.num_layers * ELEMENT_BYTES[kv_dtype]


def pool_tokens(
    *,
    free_bytes: int,
    fraction: float,
    resident_bytes: int,
    cell_bytes: float,
    page_size: int,
) -> int:
    budget = max(0, free_bytes * fraction - resident_bytes)
    return int(budget // cell_bytes) // page_size * page_size


def slack_bytes(*, free_bytes: int, fraction: float) -> int:
    return round(free_bytes * (1 - fraction))


def fraction_for_tokens(
    *, tokens: int, free_bytes: int, resident_bytes: int, cell_bytes: float
) -> float:
    return (resident_bytes + tokens * cell_bytes) / free_bytes
