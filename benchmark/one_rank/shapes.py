# SPDX-License-Identifier: Apache-2.0
"""What is measured: the models, as configurations without weights, and the arms."""

from __future__ import annotations

import dataclasses
from typing import Any

from backend_e2e import several_ranks

CONTEXTS = (1_400, 4_096, 11_264, 16_384, 32_768, 65_536, 131_072, 185_000)
TREE_SIZES = (9, 17, 33)
ACCEPT_LENGTHS = (1, 4, 7)
RANKS = 8  # of tensor parallelism; the model below is one of them

# Kimi K2.6 divided by RANKS where tensor parallelism divides it. The routed experts are not: a rank's share of 384 int4
# experts is replaced by as many small bf16 ones as a token uses, all of them always active.
KIMI_RANK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64 // RANKS,
    "num_key_value_heads": 64 // RANKS, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False, "intermediate_size": 18432 // RANKS,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 2048 // RANKS, "n_routed_experts": 8,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.827, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "vocab_size": 163840 // RANKS, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 262144, "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
# A DFLASH drafter of the usual size for such a target; no checkpoint of one is assumed. DDTREE drafts into the slots of
# its tree, so the block is no wider than the smallest tree.
DRAFTER_RANK: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 7168,
    "intermediate_size": 18432 // RANKS, "num_hidden_layers": 6, "num_target_layers": 61,
    "num_attention_heads": 64 // RANKS, "num_key_value_heads": 8 // RANKS, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "rope_theta": 50000.0, "attention_bias": False,
    "tie_word_embeddings": False, "block_size": 8, "vocab_size": 163840 // RANKS,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip

# What tensor parallelism divides; the rest of a configuration is the same on every rank. KV heads of MLA are one latent
# that each rank has.
DIVIDED = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size",
)  # fmt: skip

# For a CPU: it shows that the benchmark runs, and nothing about speed.
SMALL_CHANGES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 512, "qk_nope_head_dim": 64, "v_head_dim": 64,
}  # fmt: skip
SMALL_DRAFTER_CHANGES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_target_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "block_size": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]},
}  # fmt: skip
SMALL_CONTEXTS = (64, 200)

# Tokens of the prefix that a DFLASH drafter sees, as a product would set it: upstream's attention of a drafter would
# hide the verification over a whole long context. The same for upstream's arms and ours.
DRAFT_WINDOW = 4096
SMALL_DRAFT_WINDOW = 48


@dataclasses.dataclass(frozen=True)
class Scale:
    """The full rank, or the one for a CPU."""

    name: str
    model: dict[str, Any]
    drafter: dict[str, Any]
    contexts: tuple[int, ...]
    draft_window: int
    arguments: dict[str, Any]  # of the Engine

    @property
    def block_size(self) -> int:
        return self.drafter["block_size"]

    def times(self, ranks: int) -> Scale:
        """The models of which so many ranks of tensor parallelism have the shapes of this one each: what is divided
        among ranks is as many times as large, what every rank has whole stays. The routed experts are divided by
        width."""
        if ranks == 1:
            return self
        model, drafter = (
            config | {name: config[name] * ranks for name in DIVIDED if name in config}
            for config in (self.model, self.drafter)
        )
        return dataclasses.replace(self, model=model, drafter=drafter)


FULL = Scale(
    "full", KIMI_RANK, DRAFTER_RANK, CONTEXTS, DRAFT_WINDOW,
    {"context_length": 200_000, "chunked_prefill_size": 8192, "mem_fraction_static": 0.9, "dtype": "bfloat16"},
)  # fmt: skip
SMALL = Scale(
    "small", KIMI_RANK | SMALL_CHANGES, DRAFTER_RANK | SMALL_DRAFTER_CHANGES, SMALL_CONTEXTS, SMALL_DRAFT_WINDOW,
    {"context_length": 1024, "device": "cpu", "dtype": "float32"},
)  # fmt: skip
SCALES = {scale.name: scale for scale in (FULL, SMALL)}


@dataclasses.dataclass(frozen=True)
class Arm:
    label: str
    backend: str
    algorithm: str | None = None  # DDTREE and EAGLE verify trees of TREE_SIZES
    graphs: bool = True

    @property
    def has_sizes(self) -> bool:
        return self.algorithm in ("DDTREE", "EAGLE")

    @property
    def has_window(self) -> bool:
        """Whether it drafts with a DFLASH drafter, all of whose drafting --draft-window bounds."""
        return self.algorithm in ("DFLASH", "DDTREE")


ARMS = {
    "plain_triton": Arm("plain decode, Triton", "triton"),
    "plain_kdtree": Arm("plain decode, kdtree_sm120", "kdtree_sm120"),
    "dflash_triton": Arm("DFLASH chain, Triton", "triton", "DFLASH"),
    "dflash_kdtree": Arm("DFLASH chain, kdtree_sm120", "kdtree_sm120", "DFLASH"),
    "tree_triton": Arm("DDTREE, Triton", "triton", "DDTREE"),
    "tree_kdtree_eager": Arm("DDTREE, kdtree_sm120, no graphs", "kdtree_sm120", "DDTREE", graphs=False),
    "tree_kdtree": Arm("DDTREE, kdtree_sm120", "kdtree_sm120", "DDTREE"),
    "eagle_triton": Arm("EAGLE tree, Triton", "triton", "EAGLE"),
    "eagle_kdtree": Arm("EAGLE tree, kdtree_sm120", "kdtree_sm120", "EAGLE"),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm at one tree size: one Engine."""

    arm: str
    s_q: int
    ranks: int = 1  # of tensor parallelism, each with the shapes of the scale
    custom_all_reduce: bool = False  # upstream's own instead of NCCL's

    @property
    def name(self) -> str:
        name = f"{self.arm}-{self.s_q}"
        if self.ranks > 1:
            name += f"-tp{self.ranks}{'-custom' if self.custom_all_reduce else ''}"
        return name


def runs_of(arms: list[str], sizes: list[int], scale: Scale, stock_sizes: list[int] | None = None) -> list[Run]:
    """sizes: of trees; stock_sizes: of those in other arms than tree_kdtree, if others."""
    runs = []
    for name in arms:
        arm = ARMS[name]
        of_trees = stock_sizes if stock_sizes and name != "tree_kdtree" else sizes
        widths = of_trees if arm.has_sizes else [scale.block_size if arm.algorithm else 1]
        runs += [Run(name, width) for width in widths]
    return runs


def unavailable(run: Run, scale: Scale) -> str | None:
    if scale is SMALL and ARMS[run.arm].algorithm == "EAGLE":
        return "EAGLE has no CPU form"
    if scale is SMALL and ARMS[run.arm].graphs is False:
        return "a CPU has no CUDA graphs, so this is the arm with graphs again"
    return None


def engine_arguments(
    run: Run, scale: Scale, *, kv_dtype: str, page_size: int, total_tokens: int, draft_window: int = 0
) -> dict[str, Any]:
    """Without the paths of the models. draft_window: 0 = the whole context."""
    arm = ARMS[run.arm]
    # A CPU has no Triton: its reference takes the part.
    backend = "torch_reference" if scale.name == "small" and arm.backend == "triton" else arm.backend
    arguments = {
        "load_format": "dummy", "skip_tokenizer_init": True, "attention_backend": backend,
        "sampling_backend": "pytorch", "grammar_backend": "none", "max_running_requests": 2, "random_seed": 1,
        "max_total_tokens": total_tokens, "page_size": page_size, "watchdog_timeout": 600, "log_level": "info",
        **scale.arguments,
    }  # fmt: skip
    if run.ranks > 1:
        arguments |= several_ranks(
            run.ranks, scale.arguments.get("device", "cuda"), custom_all_reduce=run.custom_all_reduce
        )
    if kv_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    if scale.name == "full":
        arguments |= {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 1}
        if not arm.graphs:
            arguments["disable_cuda_graph"] = True
    if arm.algorithm:
        arguments |= {"speculative_algorithm": arm.algorithm, "speculative_num_draft_tokens": run.s_q}
    if arm.algorithm == "EAGLE":
        arguments |= {"speculative_num_steps": 4, "speculative_eagle_topk": 4}
    if arm.has_window and draft_window:
        arguments["speculative_draft_window_size"] = draft_window
    if arm.has_window and scale.name == "full":
        arguments["speculative_draft_attention_backend"] = arm.backend
    return arguments
