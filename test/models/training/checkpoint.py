# SPDX-License-Identifier: Apache-2.0
"""Write and read the two checkpoints in the formats that SGLang loads.

Target: ``DeepseekV3ForCausalLM``; drafter: ``DFlashDraftModel``. Weights are bfloat16 safetensors, the
router's correction bias stays float32. Loading gives float32 modules in eval mode.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from training import architecture as arch
from training.architecture import Drafter, Target

WEIGHTS = "model.safetensors"
_TOKEN_IDS = {"bos_token_id": arch.BOS_ID, "eos_token_id": arch.EOS_ID, "pad_token_id": arch.PAD_ID}


def target_config() -> dict:
    """``config.json`` of the target."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": arch.VOCAB_SIZE,
        "hidden_size": arch.HIDDEN,
        "num_hidden_layers": arch.NUM_LAYERS,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": arch.NUM_HEADS,
        "num_key_value_heads": arch.NUM_HEADS,
        "q_lora_rank": arch.Q_LORA_RANK,
        "kv_lora_rank": arch.KV_LORA_RANK,
        "qk_nope_head_dim": arch.NOPE_DIM,
        "qk_rope_head_dim": arch.ROPE_DIM,
        "qk_head_dim": arch.NOPE_DIM + arch.ROPE_DIM,
        "v_head_dim": arch.VALUE_DIM,
        "head_dim": arch.ROPE_DIM,
        "intermediate_size": arch.DENSE_WIDTH,
        "first_k_dense_replace": arch.DENSE_LAYERS,
        "moe_layer_freq": 1,
        "moe_intermediate_size": arch.EXPERT_WIDTH,
        "n_routed_experts": arch.NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": arch.EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": arch.ROUTED_SCALE,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "hidden_act": "silu",
        "rms_norm_eps": arch.NORM_EPS,
        "max_position_embeddings": arch.CONTEXT_LENGTH,
        "rope_theta": arch.ROPE_THETA,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": arch.YARN_FACTOR,
            "original_max_position_embeddings": arch.YARN_ORIGINAL_LENGTH,
            "beta_fast": arch.YARN_BETA_FAST,
            "beta_slow": arch.YARN_BETA_SLOW,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **_TOKEN_IDS,
    }


def drafter_config(drafter: Drafter) -> dict:
    """``config.json`` of the drafter."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": arch.VOCAB_SIZE,
        "hidden_size": arch.HIDDEN,
        "intermediate_size": drafter.width,
        "num_hidden_layers": drafter.num_layers,
        "num_target_layers": arch.NUM_LAYERS,
        "num_attention_heads": arch.DRAFTER_HEADS,
        "num_key_value_heads": arch.DRAFTER_KV_HEADS,
        "head_dim": arch.DRAFTER_HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": arch.NORM_EPS,
        "max_position_embeddings": arch.CONTEXT_LENGTH,
        "rope_theta": arch.ROPE_THETA,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "block_size": arch.BLOCK_SIZE,
        "dflash_config": {
            "mask_token": arch.SPECIAL_TOKENS[arch.MASK_ID],
            "mask_token_id": arch.MASK_ID,
            "target_layer_ids": list(arch.FEATURE_LAYERS),
        },
        **_TOKEN_IDS,
    }


def tokenizer_config() -> dict:
    """``tokenizer_config.json`` beside the target's ``tokenizer.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": arch.SPECIAL_TOKENS[arch.BOS_ID],
        "eos_token": arch.SPECIAL_TOKENS[arch.EOS_ID],
        "pad_token": arch.SPECIAL_TOKENS[arch.PAD_ID],
        "model_max_length": arch.CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }


def target_tensors(target: Target) -> dict[str, Tensor]:
    """The target's state under the names of a DeepSeek-V3 checkpoint."""
    tensors: dict[str, Tensor] = {}
    for name, value in target.state_dict().items():
        prefix, _, leaf = name.partition(".mlp.")
        if name == "lm_head.weight":
            tensors[name] = value
        elif leaf == "router":
            tensors[f"model.{prefix}.mlp.gate.weight"] = value
        elif leaf == "correction_bias":
            tensors[f"model.{prefix}.mlp.gate.e_score_correction_bias"] = value
        elif leaf == "down":
            for expert, weight in enumerate(value):
                tensors[f"model.{prefix}.mlp.experts.{expert}.down_proj.weight"] = weight.t()
        elif leaf in ("gate_proj.weight", "up_proj.weight") and value.shape[0] == arch.NUM_EXPERTS * arch.EXPERT_WIDTH:
            if prefix_is_dense(prefix):
                tensors[f"model.{name}"] = value
                continue
            for expert, weight in enumerate(value.split(arch.EXPERT_WIDTH)):
                tensors[f"model.{prefix}.mlp.experts.{expert}.{leaf}"] = weight
        else:
            tensors[f"model.{name}"] = value
    return tensors


def prefix_is_dense(prefix: str) -> bool:
    """Whether ``layers.<i>`` names a layer with a dense MLP."""
    return int(prefix.split(".")[1]) < arch.DENSE_LAYERS


def load_target_tensors(target: Target, tensors: dict[str, Tensor]) -> None:
    """Inverse of :func:`target_tensors`; every name must be used exactly once."""
    state: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, value in tensors.items():  # experts are visited in ascending order below
        inner = name.removeprefix("model.")
        if ".mlp.experts." not in inner:
            inner = inner.replace("mlp.gate.weight", "mlp.router")
            state[inner.replace("mlp.gate.e_score_correction_bias", "mlp.correction_bias")] = value.float()
    for index in range(arch.DENSE_LAYERS, arch.NUM_LAYERS):
        for expert in range(arch.NUM_EXPERTS):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                value = tensors[f"model.layers.{index}.mlp.experts.{expert}.{leaf}.weight"].float()
                stacks.setdefault(f"layers.{index}.mlp.{leaf}", []).append(value)
    for name, parts in stacks.items():
        if name.endswith("down_proj"):
            state[name.removesuffix("_proj")] = torch.stack([part.t() for part in parts])
        else:
            state[f"{name}.weight"] = torch.cat(parts)
    target.load_state_dict(state)


_DRAFTER_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's state under the names of a DFlash checkpoint."""
    tensors = {}
    for name, value in drafter.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] in _DRAFTER_ATTENTION:
            parts.insert(2, "self_attn")
        tensors[".".join(parts)] = value
    return tensors


def _write(directory: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    rounded = {
        name: (value if name.endswith("e_score_correction_bias") else value.bfloat16()).detach().cpu().contiguous()
        for name, value in tensors.items()
    }
    save_file(rounded, directory / WEIGHTS, metadata={"format": "pt"})


def save_target(target: Target, directory: Path, tokenizer: Path | None = None) -> None:
    """Write the target's checkpoint, with the tokenizer if its ``tokenizer.json`` is given."""
    _write(directory, target_config(), target_tensors(target))
    (directory / "generation_config.json").write_text(json.dumps(_TOKEN_IDS) + "\n")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=1) + "\n")


def save_drafter(drafter: Drafter, directory: Path) -> None:
    """Write the drafter's checkpoint."""
    _write(directory, drafter_config(drafter), drafter_tensors(drafter))


def load_target(directory: Path) -> Target:
    """Read a target checkpoint."""
    from safetensors.torch import load_file

    target = Target()
    load_target_tensors(target, load_file(directory / WEIGHTS))
    return target.eval()


def load_drafter(directory: Path) -> Drafter:
    """Read a drafter checkpoint; depth and width come from its configuration."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    drafter = Drafter(config["num_hidden_layers"], config["intermediate_size"])
    tensors = {name.replace("self_attn.", ""): value.float() for name, value in load_file(directory / WEIGHTS).items()}
    drafter.load_state_dict(tensors)
    return drafter.eval()
