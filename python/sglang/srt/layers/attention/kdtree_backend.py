# SPDX-License-Identifier: Apache-2.0
"""Attention backend kdtree_sm120: drafts of MLA models are verified by sgl_kernel_sm120
over one list of prefix and draft slots; everything else is the stock backend's."""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING, Optional

import torch
from sgl_kernel_sm120 import cuda_available_ops

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.kdtree_verify import (
    MAX_BATCH,
    MAX_DRAFT_TOKENS,
    QK_HEAD_DIM,
    V_HEAD_DIM,
    TreeVerifier,
    VerifyErrors,
    VerifyStep,
)
from sglang.srt.layers.attention.torch_reference_backend import (
    TorchReferenceAttnBackend,
    check_layer,
)
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    handle_attention_triton,
)
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.platforms.torch_cpu import require_torch_cpu
from sglang.srt.runtime_context import (
    attention_backends,
    get_exec,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.speculative.ddtree_info import verify_mask_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

# Verification steps between two reports of --kdtree-verify validate.
REPORT_INTERVAL = 256

EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


class KDTreeVerifyBackend(TorchReferenceAttnBackend):
    """kdtree_sm120 on a CPU: the kernel's CPU form over torch_reference.

    kdtree_triton_backend has the CUDA form.
    """

    def __init__(self, runner):
        super().__init__(runner)
        self.mode = get_exec().kernel.kdtree_verify
        self.verifier = TreeVerifier(
            req_to_token=self.req_to_token, page_size=get_schedule().page_size
        )
        self.step: Optional[VerifyStep] = None
        self.errors: Optional[VerifyErrors] = None
        if self.mode == "validate":
            self.first_layer = runner.token_to_kv_pool.start_layer
            self.errors = VerifyErrors(
                runner.token_to_kv_pool.layer_num, torch.device(runner.device)
            )
            self.steps_validated = 0
            atexit.register(self.log_errors)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if self.mode != "on" or not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)
        self.step = None
        if self.mode != "off" and forward_batch.forward_mode.is_target_verify():
            self.step = self.plan_step(forward_batch)

    def plan_step(self, forward_batch: ForwardBatch) -> VerifyStep:
        prefix_lens = forward_batch.seq_lens
        num_tokens = int(forward_batch.spec_info.draft_token_num)
        return self.verifier.plan_step(
            req_pool_indices=forward_batch.req_pool_indices,
            prefix_lens=prefix_lens,
            num_tokens=num_tokens,
            # Free on a CPU. A device form takes the host's bound.
            max_indices=int((prefix_lens + num_tokens).sum()),
            tree_mask=verify_mask_of(forward_batch.spec_info, prefix_lens.numel()),
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        if self.step is None:
            return super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache, **kwargs
            )
        check_layer(layer, kwargs)
        if save_kv_cache and k is not None:
            self.write_kv(layer, forward_batch, k, v)
        kv_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        ours = self.verifier.run(self.step, q, kv_cache, layer)
        if self.mode == "on":
            return ours
        reference = super().forward_extend(q, k, v, layer, forward_batch, False)
        self.count_errors(layer.layer_id - self.first_layer, ours, reference)
        return reference

    def count_errors(
        self, layer_index: int, ours: torch.Tensor, reference: torch.Tensor
    ) -> None:
        if layer_index == 0:
            if self.steps_validated and self.steps_validated % REPORT_INTERVAL == 0:
                self.log_errors()
            self.steps_validated += 1
        self.errors.update(layer_index, ours, reference)

    def log_errors(self) -> None:
        logger.info("%s, %d steps", self.errors.report(), self.steps_validated)


def create_kdtree_backend(runner) -> AttentionBackend:
    interpreted = runner.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if runner.device == "cpu":
        require_torch_cpu("--attention-backend kdtree_sm120")
    if runner.device == "cpu" and not interpreted:
        check_runner(runner)
        check_page_size(get_schedule().page_size)
        check_verify_goes_to("kdtree_sm120")
        return KDTreeVerifyBackend(runner)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    AttentionBackendRegistry.register("kdtree_sm120", handle_attention_triton)
    if runner.is_draft_worker:
        # A drafter's own prefill. It may be no MLA model at all.
        return TritonAttnBackend(runner)
    check_runner(runner)
    check_page_size(get_schedule().page_size)
    check_verify_goes_to("kdtree_sm120")
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
    spec = get_spec()
    if spec.speculative_algorithm is None:
        return
    if runner.req_to_token_pool.size > MAX_BATCH:
        raise ValueError(
            f"kdtree_sm120 verifies at most {MAX_BATCH} requests at once, and "
            f"--max-running-requests is {runner.req_to_token_pool.size}."
        )
    if (
        spec.speculative_algorithm in EAGLE_FAMILY
        and spec.speculative_draft_attention_backend is None
    ):
        raise ValueError(
            f"{spec.speculative_algorithm} drafts on an attention backend of its own "
            "kind, which kdtree_sm120 is not; add --speculative-draft-attention-backend "
            "triton."
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
    if runner.kv_cache_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(
            f"kdtree_sm120 reads KV in bfloat16 or fp8_e4m3, not in "
            f"{runner.kv_cache_dtype}; change --kv-cache-dtype."
        )


def check_runner(runner) -> None:
    config = runner.model_config
    if not runner.use_mla_backend:
        raise ValueError(
            "kdtree_sm120 serves MLA models (DeepSeek V3, Kimi K2 family), and "
            f"{config.hf_config.architectures[0]} is none; use --attention-backend "
            "torch_reference on a CPU, triton on a GPU."
        )
    # Set by upstream for the models whose indexer selects keys.
    if getattr(config, "index_head_dim", None) is not None:
        raise ValueError(
            "kdtree_sm120 attends to every key, and the sparse attention (DSA) of "
            f"{config.hf_config.architectures[0]} selects some; leave "
            "--attention-backend out, which takes upstream's dsa on a GPU."
        )
    dims = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    if dims != (QK_HEAD_DIM, V_HEAD_DIM):
        raise ValueError(
            f"kdtree_sm120 serves MLA heads of {QK_HEAD_DIM} (latent {V_HEAD_DIM}), and "
            f"this model has heads of {dims[0]} (latent {dims[1]}); use "
            "--attention-backend torch_reference on a CPU, triton on a GPU."
        )
    num_tokens = get_spec().speculative_num_draft_tokens
    if num_tokens is not None and num_tokens > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"kdtree_sm120 verifies at most {MAX_DRAFT_TOKENS} tokens a request; "
            f"--speculative-num-draft-tokens is {num_tokens}."
        )


def check_page_size(page_size: int) -> None:
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(
            f"kdtree_sm120 needs a page size that is a power of two, and --page-size "
            f"is {page_size}."
        )


def check_verify_goes_to(name: str) -> None:
    """Refuse a split of backends that leaves this one without any verification."""
    prefill, decode = attention_backends()
    spec = get_spec()
    if prefill == decode or spec.speculative_algorithm is None:
        return
    verify = decode if spec.speculative_attention_mode == "decode" else prefill
    if verify != name:
        raise ValueError(
            f"{name} would verify no draft: prefill runs on {prefill}, decode on "
            f"{decode}, and --speculative-attention-mode is "
            f"{spec.speculative_attention_mode}. Use --attention-backend {name} alone, "
            f"or --decode-attention-backend {name} with --speculative-attention-mode "
            "decode."
        )


# On a CPU, MLA layers read the latent pool in the absorbed form in every forward mode.
# create_kdtree_backend replaces this by Triton's rule where it builds that form.
AttentionBackendRegistry.register(
    "kdtree_sm120", lambda attn, forward_batch: AttnForwardMethod.MLA
)
