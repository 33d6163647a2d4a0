# SPDX-License-Identifier: Apache-2.0
"""The fixed inputs of a DDTREE decode step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Optional

import msgspec
import sgl_kernel_sm120
import torch

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
    plan: KVLocPlan  # the window of slots behind each prefix

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

    @property
    def root(self) -> torch.Tensor:
        """int64 [b]: the bonus token of the step before."""
        return self.carried.bonus_tokens.view(-1)


def node_rows(path: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[b, max_path]: rows of the packed [b * N, ...] tensors."""
    first = torch.arange(path.shape[0], device=path.device) * num_nodes
    return path + first[:, None]


def host_lens(
    batch: ScheduleBatch, carried: DFlashDraftInputV2, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[b] on the host, at least: the prefix lengths; the prefix lengths + num_nodes."""
    if batch.seq_lens_cpu is not None:
        return batch.seq_lens_cpu, batch.seq_lens_cpu + num_nodes
    # Where no backend wants lengths on the host, what is reserved bounds both.
    reserved = carried.nxt_kv_lens_cpu
    if reserved is None:
        reserved = torch.tensor([req.kv.kv_allocated_len for req in batch.reqs])
    return reserved, reserved


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
