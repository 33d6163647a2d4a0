# SPDX-License-Identifier: Apache-2.0
"""What DDTREE asks of the models, pools, backends and kernels that it is set up with."""

from __future__ import annotations

from typing import TYPE_CHECKING, List

import sgl_kernel_sm120
import torch

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.torch_kv_pool import TorchMHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker


def verify_backend_of(backend):
    """The leaf backend that runs TARGET_VERIFY, under wrappers."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    while isinstance(backend, HybridAttnBackend):
        backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
    return backend


def kv_buffers_of(pool) -> List[torch.Tensor]:
    """The pool's per-layer buffers, a row a slot."""
    # Other subclasses keep more for a slot (scales, index keys), which would stay behind.
    if type(pool) is MLATokenToKVPool:
        return list(pool.kv_buffer)
    if type(pool) in (MHATokenToKVPool, TorchMHATokenToKVPool) and not pool.use_hnd:
        return [*pool.k_buffer, *pool.v_buffer]
    raise ValueError(
        f"DDTREE cannot move accepted KV in a {type(pool).__name__}; it serves MLA and "
        "MHA pools with a row a slot."
    )


def refuse_verify_backend(backend) -> None:
    """An attention backend that drops the mask would verify the tree as a chain."""
    if not hasattr(backend, "tree_mask_mode") and not isinstance(
        backend, TritonAttnBackend
    ):
        raise ValueError(
            f"DDTREE: {type(backend).__name__} verifies drafts here and carries no tree "
            "mask; use --attention-backend kdtree_sm120, torch_reference or triton."
        )


def refuse_target(runner) -> None:
    if getattr(runner.model, "lm_head", None) is None:
        raise ValueError(
            "DDTREE drafts with the target's lm_head, and "
            f"{type(runner.model).__name__} has none."
        )
    if mambaish_config(runner.model_config) is not None:
        raise ValueError(
            "DDTREE does not support hybrid (linear attention or mamba) targets: a "
            "recurrent state cannot follow a tree."
        )


def refuse_drafter(worker: DDTreeWorker) -> None:
    if worker.selector is not None or worker.lilicorr is not None or worker._is_domino:
        raise ValueError(
            "DDTREE needs a plain DFlash drafter; this one has a head that drafts a "
            "chain. Use --speculative-algorithm DFLASH."
        )


def check_tree_ops(device: torch.device) -> None:
    """Fail at start-up, not at the first request, where an op has no kernel."""
    root = torch.zeros(1, dtype=torch.int64, device=device)
    candidate = torch.ones(1, 1, 1, dtype=torch.int64, device=device)
    tree = sgl_kernel_sm120.ddtree_build(root, candidate, candidate.float() - 2, 2)
    accepted = sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, tree.tokens, 2)
    sgl_kernel_sm120.tree_count(
        tree, candidate, candidate.float() - 2, accepted, 2, root[:0].int()
    )
    buffer = torch.zeros(1, 1, device=device)
    sgl_kernel_sm120.kv_move_all_layers([buffer], root, root)
