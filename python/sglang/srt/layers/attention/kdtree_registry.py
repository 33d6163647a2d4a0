# SPDX-License-Identifier: Apache-2.0
"""Names these attention backends, and says what kdtree_sm120 refuses before a model
is loaded. The classes load when a runner asks."""

import os
import tempfile

from sglang.srt.layers.attention.attention_registry import register_attention_backend


@register_attention_backend("kdtree_sm120")
def create_kdtree_backend(runner):
    from sglang.srt.layers.attention.kdtree_backend import create_kdtree_backend

    return create_kdtree_backend(runner)


@register_attention_backend("torch_reference")
def create_torch_reference_backend(runner):
    from sglang.srt.layers.attention.torch_reference_backend import (
        TorchReferenceAttnBackend,
    )

    return TorchReferenceAttnBackend(runner)


def offer_draft_backends(runner, backends, multi_step):
    from sglang.srt.layers.attention.kdtree_triton_draft import offer_draft_backends

    offer_draft_backends(runner, backends, multi_step=multi_step)


def check_page_size(user: str, page_size: int) -> None:
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(
            f"{user} needs a --page-size that is a power of two, got {page_size}."
        )


def check_model(config, num_draft_tokens) -> None:
    """config: the target's ModelConfig."""
    from sgl_kernel_sm120.attention import MAX_S_Q
    from sgl_kernel_sm120.reference import D_QK, D_V

    from sglang.srt.configs.model_config import AttentionArch

    model = config.hf_config.architectures[0]
    instead = "use --attention-backend torch_reference on a CPU, triton on a GPU."
    if config.attention_arch != AttentionArch.MLA:
        raise ValueError(
            "kdtree_sm120 serves MLA models (DeepSeek V3, Kimi K2 family), and "
            f"{model} is none; {instead}"
        )
    # Set for the models whose indexer selects keys.
    if getattr(config, "index_head_dim", None) is not None:
        raise ValueError(
            "kdtree_sm120 attends to every key, and the sparse attention (DSA) of "
            f"{model} selects some; leave --attention-backend out, which takes "
            "dsa on a GPU."
        )
    dims = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    if dims != (D_QK, D_V):
        raise ValueError(
            f"kdtree_sm120 serves MLA heads of {D_QK} (latent {D_V}), and this model "
            f"has heads of {dims[0]} (latent {dims[1]}); {instead}"
        )
    if num_draft_tokens is not None and num_draft_tokens > MAX_S_Q:
        raise ValueError(
            f"kdtree_sm120 verifies at most {MAX_S_Q} tokens a request; "
            f"--speculative-num-draft-tokens is {num_draft_tokens}."
        )


def check_dump_dir(folder: str, mode: str) -> None:
    wanted = f"--kdtree-dump-dir {folder} needs --kdtree-verify validate"
    if mode != "validate":
        raise ValueError(f"{wanted}; it is {mode}.")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{wanted} and a folder to write to: {error}.") from error


def check_split(prefill, decode, algorithm, mode) -> None:
    """Refuse a split of backends that leaves kdtree_sm120 nothing to serve."""
    serves = decode if algorithm is None or mode == "decode" else prefill
    if serves == "kdtree_sm120":
        return
    if algorithm is None:
        raise ValueError(
            "kdtree_sm120 would serve nothing: prefill is Triton's, and decode runs on "
            f"{decode}. Use --attention-backend kdtree_sm120, or "
            "--decode-attention-backend kdtree_sm120."
        )
    raise ValueError(
        f"kdtree_sm120 would verify no draft: prefill runs on {prefill}, decode on "
        f"{decode}, and --speculative-attention-mode is {mode}. Use "
        "--attention-backend kdtree_sm120 alone, or --decode-attention-backend "
        "kdtree_sm120 with --speculative-attention-mode decode."
    )
