# SPDX-License-Identifier: Apache-2.0
"""The fixed inputs of a DDTREE decode step."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Optional

import msgspec
import sgl_kernel_sm120
import torch
from sgl_kernel_sm120 import DraftTree

from sglang.srt.speculative.ddtree_budget import Decision
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

logger = logging.getLogger(__name__)


class TreeStep(msgspec.Struct, frozen=True):
    """One decode step's fixed inputs."""

    batch: ScheduleBatch
    carried: DFlashDraftInputV2
    decision: Decision
    block_size: int  # L
    prefix_lens: torch.Tensor  # [b] committed tokens
    max_lens_cpu: torch.Tensor  # [b] on the host: at least prefix_lens + window
    max_lens_sum: int
    plan: KVLocPlan  # the window of slots behind each prefix
    positions: torch.Tensor  # int64 [b, window] of its tokens, were they a chain
    block_ids: torch.Tensor  # int64 [b, L] the root and masks; the next step's, too
    learns: bool  # an adaptive budget, from this step

    @property
    def batch_size(self) -> int:
        return self.prefix_lens.numel()

    @property
    def num_nodes(self) -> int:
        """N: tokens of a request that the target verifies."""
        return self.decision.option.width

    @property
    def window(self) -> int:
        """Slots of a request: those of the nodes, and of the draft block."""
        return max(self.num_nodes, self.block_size)

    @property
    def max_path(self) -> int:
        """Nodes on a path, the root included."""
        return min(self.num_nodes, self.block_size)

    def of_path(self, of_window: torch.Tensor) -> torch.Tensor:
        """[b, max_path]: the first columns of [b, window] or [b * window]."""
        return of_window.view(-1, self.window)[:, : self.max_path].contiguous()

    def node_positions(self, tree: DraftTree) -> torch.Tensor:
        """int64 [b * N]"""
        if self.decision.option.is_chain:
            return self.positions[:, : self.num_nodes].reshape(-1)
        return (self.prefix_lens[:, None] + tree.depth).reshape(-1)

    @property
    def root(self) -> torch.Tensor:
        """int64 [b]: the bonus token of the step before."""
        return self.carried.bonus_tokens.view(-1)


def node_rows(path: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[b, max_path]: rows of the packed [b * N, ...] tensors."""
    return path + first_rows(path.shape[0], num_nodes, path.device)


# What is the same in every step of a shape: made once, so that no step launches it.


@lru_cache(maxsize=512)
def first_rows(batch_size: int, num_nodes: int, device: torch.device) -> torch.Tensor:
    """int64 [b, 1]: the row of each request's root."""
    return (torch.arange(batch_size, device=device) * num_nodes)[:, None]


@lru_cache(maxsize=512)
def block_of_masks(
    batch_size: int, block_size: int, mask: int, device: torch.device
) -> torch.Tensor:
    """int64 [b, L]. The first column is the caller's, in the order of the stream."""
    with torch.inference_mode(False):  # or it could be written in that mode alone
        shape = (batch_size, block_size)
        return torch.full(shape, mask, dtype=torch.int64, device=device)


@lru_cache(maxsize=512)
def chain_links(batch_size: int, width: int, device: torch.device) -> DraftTree:
    """A DraftTree of chains of width nodes, without the tokens, and with the weight of
    the root's path alone."""
    node = torch.arange(width, dtype=torch.int32, device=device)
    visible = torch.ones(width, width, dtype=torch.bool, device=device).tril()

    def of_all(row: torch.Tensor) -> torch.Tensor:
        return row.expand(batch_size, *row.shape).contiguous()

    return DraftTree(
        tokens=None,
        parents=of_all(node - 1),
        depth=of_all(node),
        first_child=of_all(torch.where(node + 1 < width, node + 1, -1)),
        next_sibling=of_all(torch.full_like(node, -1)),
        visible=of_all(visible),
        used=torch.full_like(node[:1], width).repeat(batch_size),
        path_log_probs=torch.zeros(batch_size, 1, device=device),
    )


def chain_tree(root: torch.Tensor, ids: torch.Tensor, width: int) -> DraftTree:
    """The best candidates of ids int64 [b, D, K] behind root int64 [b]."""
    return chain_links(len(root), width, root.device)._replace(
        tokens=torch.cat([root[:, None], ids[:, : width - 1, 0]], dim=1)
    )


def host_lens(
    batch: ScheduleBatch, carried: DFlashDraftInputV2, num_nodes: int
) -> tuple[torch.Tensor, int]:
    """[b] on the host, at least the prefix lengths + num_nodes; and their sum."""
    if batch.seq_lens_cpu is not None:
        lens = batch.seq_lens_cpu + num_nodes
    # Where no backend wants lengths on the host, what is reserved is a bound.
    elif carried.nxt_kv_lens_cpu is not None:
        return carried.nxt_kv_lens_cpu, int(carried.nxt_kv_lens_sum)
    else:
        lens = torch.tensor([req.kv.kv_allocated_len for req in batch.reqs])
    return lens, int(lens.sum())


def usable_ranks(wanted: Optional[int], num_nodes: int, vocab_size: int) -> int:
    """Ranks of a draft position that can become nodes, as far as the kernel goes."""
    useful = min(num_nodes - 1, vocab_size)
    ranks = min(wanted or useful, useful, sgl_kernel_sm120.tree.MAX_TOPK)
    if wanted is None and ranks < useful:
        logger.info(
            "DDTREE: a tree of %d nodes could use %d ranks of a draft position; it gets "
            "%d, the kernel's limit.",
            num_nodes,
            useful,
            ranks,
        )
    return ranks
