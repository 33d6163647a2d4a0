# SPDX-License-Identifier: Apache-2.0
"""Attention backend kdtree_sm120: which form a runner gets, and what is refused.

Drafts of MLA models are verified by sgl_kernel_sm120 over one list of prefix and draft
slots; plain decoding and EAGLE's draft extend run on the same kernel, and everything
else is the stock backend's: Triton's (kdtree_triton_backend) or, on a CPU, the torch
reference (kdtree_torch_backend).
"""

from __future__ import annotations

import os

import torch
from sgl_kernel_sm120 import cuda_available_ops
from sgl_kernel_sm120.attention import MAX_B

from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.kdtree_registry import check_model, check_page_size
from sglang.srt.layers.attention.kdtree_serving import KDTreeServing
from sglang.srt.layers.attention.kdtree_verify import KV_DTYPES
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    handle_attention_triton,
)
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.platforms.torch_cpu import require_torch_cpu
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec


def create_kdtree_backend(runner) -> AttentionBackend:
    interpreted = runner.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if runner.device == "cpu":
        require_torch_cpu("--attention-backend kdtree_sm120")
    if runner.device == "cpu" and not interpreted:
        check_runner(runner)
        from sglang.srt.layers.attention.kdtree_torch_backend import KDTreeVerifyBackend

        return KDTreeVerifyBackend(runner)
    register_handler(handle_attention_triton)
    if runner.is_draft_worker:
        from sglang.srt.layers.attention.kdtree_triton_block import create_block_backend

        return create_block_backend(runner)  # kdtree_triton_draft has the rest
    check_runner(runner)
    check_over_triton(runner)
    from sglang.srt.layers.attention.kdtree_triton_backend import KDTreeTritonBackend

    return KDTreeTritonBackend(runner)


def check_over_triton(runner) -> None:
    """What the form over Triton refuses beyond check_runner."""
    if runner.device != "cpu":
        check_device(runner)
    if get_exec().deterministic.enable_deterministic_inference and (
        get_exec().kernel.kdtree_verify != "off"
    ):
        raise ValueError(
            "kdtree_sm120 splits the KV of a batch by its lengths, so it is not "
            "batch-invariant; use --kdtree-verify off or --attention-backend triton "
            "with --enable-deterministic-inference."
        )
    if get_parallel().attn_dcp_size > 1:
        raise ValueError(
            "kdtree_sm120 does not support --dcp-size above 1; use --attention-backend "
            "triton."
        )
    if get_spec().speculative_algorithm is None:
        return
    if runner.req_to_token_pool.size > MAX_B:
        raise ValueError(
            f"kdtree_sm120 verifies at most {MAX_B} requests at once, and "
            f"--max-running-requests is {runner.req_to_token_pool.size}."
        )
    if get_exec().overlap.enable_two_batch_overlap:
        raise ValueError(
            "kdtree_sm120 keeps the tree mask in a layout that "
            "--enable-two-batch-overlap cannot split between its two batches; leave "
            "that flag out, or use --attention-backend triton."
        )
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        raise ValueError(
            "kdtree_sm120 reads a worker's mask wherever it lies in this step, which "
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH would freeze; unset it."
        )


def check_device(runner) -> None:
    if not runner.device.startswith("cuda") or torch.version.hip is not None:
        raise ValueError(
            f"kdtree_sm120 runs on CUDA GPUs and, in torch, on a CPU, not on "
            f"{runner.device}; use --attention-backend triton."
        )
    if "mla_tree_verify" not in cuda_available_ops():
        raise ValueError(
            "kdtree_sm120: this installation of sgl-kernel-sm120 has no CUDA kernels; "
            "install its wheel (python -m sglang.kdtree doctor says what is there), or "
            "use --attention-backend triton."
        )
    if runner.dtype != torch.bfloat16:
        raise ValueError(
            f"kdtree_sm120 computes in bfloat16, and the model runs in {runner.dtype}; "
            "add --dtype bfloat16."
        )
    if runner.kv_cache_dtype not in KV_DTYPES:
        raise ValueError(
            f"kdtree_sm120 reads KV in bfloat16 or fp8_e4m3, not in "
            f"{runner.kv_cache_dtype}; change --kv-cache-dtype."
        )


def check_runner(runner) -> None:
    """Most of it was refused with the arguments, if this runner had any resolved."""
    check_model(runner.model_config, get_spec().speculative_num_draft_tokens)
    check_page_size("kdtree_sm120", get_schedule().page_size)


# What a layer takes for the name of its backend while q and k come in parts: the name
# in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.
IN_PARTS = "kdtree_sm120 in parts"


def register_handler(handler) -> None:
    """handler: chooses the form of an MLA layer, as the registry of handlers wants it."""

    def handle(attn, forward_batch) -> AttnForwardMethod:
        backend = get_attn_backend()
        if isinstance(backend, HybridAttnBackend):
            backend = backend._select_backend(forward_batch.forward_mode)
        if isinstance(backend, KDTreeServing) and backend.takes_parts(
            attn.attn_mqa, forward_batch
        ):
            attn.current_attention_backend = IN_PARTS
        return handler(attn, forward_batch)

    AttentionBackendRegistry.register("kdtree_sm120", handle)


# On a CPU, MLA layers read the latent pool in the absorbed form in every forward mode.
# create_kdtree_backend replaces this by Triton's rule where it builds that form.
register_handler(lambda attn, forward_batch: AttnForwardMethod.MLA)
