# SPDX-License-Identifier: Apache-2.0
"""Arguments of DDTREE: what it refuses at start-up, and what it fills in."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import torch
from sgl_kernel_sm120.tree import MAX_B as MAX_RUNNING_REQUESTS
from sgl_kernel_sm120.tree import MAX_DEPTH as MAX_DRAFT_DEPTH
from sgl_kernel_sm120.tree import MAX_NODES, MAX_TOPK

from sglang.srt.environ import envs
from sglang.srt.layers.attention.kdtree_registry import check_page_size
from sglang.srt.speculative.ddtree_budget import load_costs, options_up_to, parse_budget
from sglang.srt.speculative.dflash_utils import (
    DFlashDraftConfig,
    parse_dflash_draft_config,
)

logger = logging.getLogger(__name__)

DEFAULT_NODES = 16
DEFAULT_AUTO_NODES = 32  # the widest step of an adaptive budget
DEFAULT_MAX_RUNNING_REQUESTS = 48  # as for DFLASH

# Attention backends that read a tree mask in a verification.
TREE_MASK_BACKENDS = ("kdtree_sm120", "torch_reference", "triton")


class DraftShape(msgspec.Struct, frozen=True):
    """What of a drafter has to fit its target."""

    block_size: int
    vocab_size: int
    hidden_size: int


def resolve_ddtree_args(args: Any) -> None:
    """Reads of ``args`` see resolved values; writes are recorded as declarations."""
    refuse_unsupported(args)
    refuse_sizes(args)
    draft = check_draft_model(args)
    args.speculative_dflash_block_size = draft.block_size
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    num_nodes = args.speculative_num_draft_tokens
    if num_nodes is None:
        num_nodes = max(default_nodes(args.speculative_ddtree_budget), draft.block_size)
        args.speculative_num_draft_tokens = num_nodes
    if num_nodes < draft.block_size:
        raise ValueError(
            "DDTREE drafts into the slots of the tree: "
            f"--speculative-num-draft-tokens is {num_nodes}, "
            f"and the drafter's block needs {draft.block_size} at least. To verify fewer "
            "nodes use --speculative-ddtree-budget."
        )
    check_budget(args, num_nodes)
    check_draft_window(args, draft)
    if args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = draft_backend(args)
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS


def draft_backend(args: Any) -> str:
    """The drafter follows its target where that is kdtree_sm120, as DFLASH's does."""
    if args.device == "cpu":
        return "torch_reference"
    of_target = (
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    )
    return "kdtree_sm120" if "kdtree_sm120" in of_target else "triton"


def default_nodes(budget: Any) -> int:
    """Of --speculative-num-draft-tokens: no more than the budget verifies."""
    if budget == "auto":
        return DEFAULT_AUTO_NODES
    width = parse_budget(budget, MAX_NODES)
    return DEFAULT_NODES if budget is None else width


def check_budget(args: Any, num_nodes: int) -> None:
    width = parse_budget(args.speculative_ddtree_budget, num_nodes)
    if args.speculative_ddtree_costs is None:
        return
    if width is not None:
        raise ValueError(
            "DDTREE: --speculative-ddtree-costs needs --speculative-ddtree-budget auto."
        )
    options = options_up_to(num_nodes, args.speculative_dflash_block_size)
    load_costs(args.speculative_ddtree_costs).check(options)


def check_draft_window(args: Any, draft: DraftShape) -> None:
    window = args.speculative_draft_window_size
    if window is not None and window < draft.block_size:
        raise ValueError(
            "DDTREE: --speculative-draft-window-size is at least the drafter's block of "
            f"{draft.block_size} tokens, got {window}."
        )


def refuse_unsupported(args: Any) -> None:
    refusals = [
        (
            args.speculative_draft_model_path is None,
            "needs a DFlash drafter: set --speculative-draft-model-path",
        ),
        (args.enable_dp_attention, "does not support --enable-dp-attention"),
        (args.attn_cp_size > 1, "does not support --attn-cp-size above 1"),
        (args.dcp_size > 1, "does not support --dcp-size above 1"),
        (args.pp_size > 1, "does not support --pp-size above 1"),
        (
            args.disaggregation_mode != "null",
            "does not support --disaggregation-mode prefill or decode",
        ),
        (args.enable_pdmux, "does not support --enable-pdmux"),
        (
            bool(args.enable_lora or args.lora_paths),
            "does not support LoRA (--enable-lora, --lora-paths)",
        ),
        (
            args.enable_hierarchical_cache,
            "does not support --enable-hierarchical-cache",
        ),
        (args.enable_unified_memory, "does not support --enable-unified-memory"),
        (args.speculative_adaptive, "does not support --speculative-adaptive"),
        (
            args.enable_return_hidden_states
            or args.enable_return_aux_hidden_states
            or args.return_hidden_states_mode is not None,
            "does not return hidden states (--enable-return-hidden-states, "
            "--enable-return-aux-hidden-states, --return-hidden-states-mode)",
        ),
        (
            args.speculative_accept_threshold_single != 1.0
            or args.speculative_accept_threshold_acc != 1.0,
            "accepts exact samples only: leave --speculative-accept-threshold-single "
            "and --speculative-accept-threshold-acc at 1.0",
        ),
        (
            envs.SGLANG_SIMULATE_ACC_LEN.get() > 0,
            "does not support SGLANG_SIMULATE_ACC_LEN",
        ),
        (torch.version.hip is not None, "does not support ROCm"),
        (
            args.device != "cpu" and not str(args.device).startswith("cuda"),
            f"runs on cuda and cpu, not on {args.device}",
        ),
    ]
    for refused, reason in refusals:
        if refused:
            raise ValueError(f"DDTREE {reason}.")
    refuse_attention_backend(args)
    if args.device == "cpu":
        from sglang.srt.platforms.torch_cpu import require_torch_cpu

        require_torch_cpu("--speculative-algorithm DDTREE")


def refuse_attention_backend(args: Any) -> None:
    """An attention backend that drops the mask verifies the tree as a chain."""
    mode = args.speculative_attention_mode
    flag = f"{mode}_attention_backend"
    if getattr(args, flag) is None:
        flag = "attention_backend"
    backend = getattr(args, flag)
    if backend is not None and backend not in TREE_MASK_BACKENDS:
        raise ValueError(
            "DDTREE needs an attention backend that carries a tree mask; "
            f"--{flag.replace('_', '-')} is {backend}. It would verify, as "
            f"--speculative-attention-mode is {mode}: use one of "
            f"{', '.join(TREE_MASK_BACKENDS)}."
        )


def refuse_sizes(args: Any) -> None:
    nodes = args.speculative_num_draft_tokens
    if nodes is not None and nodes < 2:
        raise ValueError(
            f"DDTREE needs --speculative-num-draft-tokens of 2 at least (the root and a "
            f"budget of one node), got {nodes}."
        )
    if nodes is not None and nodes > MAX_NODES:
        raise ValueError(
            f"DDTREE verifies at most {MAX_NODES} nodes a request; "
            f"--speculative-num-draft-tokens is {nodes}."
        )
    topk = args.speculative_ddtree_topk
    if topk is not None and not 1 <= topk <= MAX_TOPK:
        raise ValueError(
            f"DDTREE needs --speculative-ddtree-topk between 1 and {MAX_TOPK}, got {topk}."
        )
    requests = args.max_running_requests
    if requests is not None and requests > MAX_RUNNING_REQUESTS:
        raise ValueError(
            f"DDTREE runs at most {MAX_RUNNING_REQUESTS} requests at once; "
            f"--max-running-requests is {requests}."
        )
    if args.page_size is not None:
        check_page_size("DDTREE", args.page_size)


def check_draft_model(args: Any) -> DraftShape:
    """Refuse a drafter that would fail, or accept nothing, with this target."""
    draft_config = load_config(
        args, args.speculative_draft_model_path, args.speculative_draft_model_revision
    )
    target_config = load_config(args, args.model_path, args.revision)
    dflash = parse_dflash_draft_config(draft_hf_config=draft_config)
    refuse_chain_heads(dflash)
    return fit_draft(
        dflash,
        draft_config.get_text_config(),
        target_config.get_text_config(),
        wanted_block_size=args.speculative_dflash_block_size,
    )


def refuse_chain_heads(dflash: DFlashDraftConfig) -> None:
    head = (
        "Domino"
        if dflash.is_domino
        else "selector"
        if dflash.selector_rank
        else dflash.projector_type
    )
    if head is not None:
        raise ValueError(
            f"DDTREE needs a plain DFlash drafter; this one has a {head} head, which "
            "drafts a chain. Use --speculative-algorithm DFLASH."
        )


def fit_draft(
    dflash: DFlashDraftConfig, draft: Any, target: Any, *, wanted_block_size: Any
) -> DraftShape:
    block_size = dflash.block_size
    if block_size is None:
        raise ValueError("DDTREE: the drafter's config names no block_size.")
    if wanted_block_size is not None and wanted_block_size != block_size:
        raise ValueError(
            f"DDTREE: the drafter was trained for blocks of {block_size} tokens, but "
            f"--speculative-dflash-block-size is {wanted_block_size}. Leave it out."
        )
    if not 2 <= block_size <= MAX_DRAFT_DEPTH + 1:
        raise ValueError(
            f"DDTREE serves drafters with blocks of 2 to {MAX_DRAFT_DEPTH + 1} tokens "
            f"(draft depth {MAX_DRAFT_DEPTH} at most); this one has {block_size}."
        )
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(draft, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(
                f"DDTREE: the drafter does not fit the target: its {name} is {ours}, "
                f"the target's is {theirs}."
            )
    num_layers = target.num_hidden_layers
    wrong = [i for i in dflash.target_layer_ids or () if not 0 <= i < num_layers - 1]
    if wrong or dflash.num_target_layers not in (None, num_layers):
        raise ValueError(
            f"DDTREE: the drafter does not fit the target: it reads layers "
            f"{dflash.target_layer_ids} of a model of "
            f"{dflash.num_target_layers or 'unknown'} layers, the target has "
            f"{num_layers} and the output of the last one cannot be read."
        )
    return DraftShape(
        block_size=block_size,
        vocab_size=draft.vocab_size,
        hidden_size=draft.hidden_size,
    )


def load_config(args: Any, path: str, revision: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    return get_config(
        path,
        trust_remote_code=args.trust_remote_code,
        revision=revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
