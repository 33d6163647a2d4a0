# SPDX-License-Identifier: Apache-2.0
"""What branching buys: counters of each verify step as Prometheus metrics, in
``meta_info``, and for the adaptive budget.

The counts are computed on the device and ride on the step's result. The scheduler
copies that to the host with the accepted tokens, after the next step was launched, and
hands them back in ``consume``. No step waits for them.
"""

from __future__ import annotations

import weakref
from collections import Counter as Tally
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence

import msgspec
import torch
from sgl_kernel_sm120.tree import NUM_COUNTS

from sglang.srt.speculative.ddtree_budget import Option, StepRow

if TYPE_CHECKING:
    from sglang.srt.managers.auxiliary_output import CommittedTokens
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

META_INFO_KEY = "ddtree"

# Ranks of a refused token: among the candidates, beyond them, or none was refused.
BEYOND = "beyond"
LEAF = "leaf"


class Counts(msgspec.Struct, frozen=True):
    """A request's verify step. The first columns of ``tree_count``."""

    built: int  # nodes in use, the root included
    verified: int  # rows of the target's forward
    accepted: int  # tokens committed, the bonus token included
    chain: int  # that a chain of the best tokens would have committed, at least
    chain_is_open: bool  # it would have gone on where the tree had no node
    # Of the token that ended the walk, among the candidates of its position: K = none of
    # them, -1 = the draft ended.
    stop_rank: int


def option_codes(options: Sequence[Option], device: torch.device) -> torch.Tensor:
    """int32 [options] as tree_count takes them."""
    codes = [-o.width if o.is_chain else o.width for o in options]
    return torch.tensor(codes, dtype=torch.int32, device=device)


class StepCounts(msgspec.Struct, frozen=True):
    """A step's counts on their way to the host: a DeviceAuxiliaryOutput, and
    after ``copy_to_host`` its HostAuxiliaryOutput."""

    report: DDTreeReport
    option: Option
    counts: torch.Tensor  # int32 [b, 6 + options] of tree_count

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> StepCounts:
        return StepCounts(self.report, self.option, copy(self.counts))

    def consume(
        self,
        batch: ScheduleBatch,
        commits: Sequence[Optional[CommittedTokens]],
    ) -> None:
        rows, all_counts = [], self.counts[:, :NUM_COUNTS].tolist()
        # Drafts that each option of an adaptive budget promised.
        promised = self.counts[:, NUM_COUNTS:].view(torch.float32).tolist()
        for i, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is None:
                continue  # it had finished, or was retracted, before this step ended
            built, verified, accepted, chain, is_open, rank = all_counts[i]
            counts = Counts(built, verified, accepted, chain, bool(is_open), rank)
            self.report.add(req, counts, self.option)
            if promised[i]:
                rows.append(
                    StepRow(
                        rid=req.rid,
                        gains=tuple(promised[i]),
                        drafts=accepted - 1,
                        chain_drafts=chain - 1,
                        chain_is_open=bool(is_open),
                        is_last=req.finished(),
                    )
                )
        self.report.budget.learn(self.option, rows)


class Totals:
    """Of one request."""

    def __init__(self):
        self.steps = self.nodes_built = self.nodes_verified = 0
        self.tree_tokens = self.chain_tokens = self.chain_longer = 0
        self.stops: Tally[str] = Tally()

    def add(self, counts: Counts, stop_rank: str) -> None:
        self.steps += 1
        self.nodes_built += counts.built
        self.nodes_verified += counts.verified
        self.tree_tokens += counts.accepted
        self.chain_tokens += counts.chain
        self.chain_longer += counts.chain_is_open
        self.stops[f"{counts.accepted - 1}:{stop_rank}"] += 1

    def as_dict(self) -> Dict[str, Any]:
        return {**vars(self), "stops": dict(self.stops)}


class DDTreeReport:
    """Totals of this rank. ``labels`` None exports no metrics."""

    def __init__(self, budget, num_ranks: int, labels: Optional[Dict[str, str]]):
        self.budget, self.num_ranks = budget, num_ranks
        self.metrics = None if labels is None else DDTreeMetrics(labels)
        self.requests: weakref.WeakKeyDictionary[Req, Totals] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, req: Req, counts: Counts, option: Option) -> None:
        rank = counts.stop_rank
        stop_rank = (
            LEAF if rank < 0 else BEYOND if rank >= self.num_ranks else str(rank)
        )
        totals = self.requests.get(req)
        if totals is None:
            totals = self.requests[req] = Totals()
        totals.add(counts, stop_rank)
        if self.metrics is not None:
            self.metrics.add(counts, stop_rank, option)
        values = meta_info_values(req, len(req.output_ids_through_stop))
        if req.finished():
            values[-1] = totals.as_dict()

    def start(self, reqs: List[Req]) -> None:
        """Before a prefill: its one token has no verify step."""
        for req in reqs:
            meta_info_values(req, len(req.output_ids) + 1)


def meta_info_values(req: Req, length: int) -> List[Any]:
    """The request's entry of customized_info: a value for each output token,
    so that streams can cut it like the tokens. All are None but a finished one's last.
    """
    if req.customized_info is None:
        req.customized_info = {}
    values = req.customized_info.setdefault(META_INFO_KEY, [])
    values.extend([None] * (length - len(values)))
    return values


class DDTreeMetrics:
    """Prometheus counters and histograms of one rank."""

    def __init__(self, labels: Dict[str, str]):
        # The server sets PROMETHEUS_MULTIPROC_DIR before this import may happen.
        from prometheus_client import Counter, Histogram

        names = list(labels)
        self._labels = labels

        def counter(name: str, documentation: str, *more: str) -> Counter:
            return Counter(
                name=name, documentation=documentation, labelnames=[*names, *more]
            )

        self._steps = counter(
            "sglang:ddtree_steps_total",
            "Requests verified, by the number of rows and by whether a chain was.",
            "width",
            "shape",
        )
        self._built = counter(
            "sglang:ddtree_nodes_built_total",
            "Nodes of draft trees, the roots included.",
        )
        self._verified = counter(
            "sglang:ddtree_nodes_verified_total",
            "Rows that the target verified, those of unused nodes included.",
        )
        self._stops = counter(
            "sglang:ddtree_stops_total",
            "Walks that stopped, by depth and by the rank of the token that was "
            "refused among the drafter's candidates.",
            "depth",
            "rank",
        )
        self._chain_longer = counter(
            "sglang:ddtree_chain_longer_total",
            "Steps where a chain would have gone on beyond the tree.",
        )
        lengths = [*range(1, 17), 20, 24, 28, 32]
        self._tree_length = Histogram(
            name="sglang:ddtree_tree_accept_length",
            documentation="Tokens that a verify step committed, the bonus included.",
            labelnames=names,
            buckets=lengths,
        )
        self._chain_length = Histogram(
            name="sglang:ddtree_chain_accept_length",
            documentation="Tokens that a chain over the same scores would have "
            "committed, at least.",
            labelnames=names,
            buckets=lengths,
        )

    def add(self, counts: Counts, stop_rank: str, option: Option) -> None:
        labels = self._labels
        shape = "chain" if option.is_chain else "tree"
        self._steps.labels(**labels, width=str(option.width), shape=shape).inc()
        self._built.labels(**labels).inc(counts.built)
        self._verified.labels(**labels).inc(counts.verified)
        self._tree_length.labels(**labels).observe(counts.accepted)
        self._chain_length.labels(**labels).observe(counts.chain)
        depth = str(counts.accepted - 1)
        self._stops.labels(**labels, depth=depth, rank=stop_rank).inc()
        if counts.chain_is_open:
            self._chain_longer.labels(**labels).inc()


def report_labels() -> Optional[Dict[str, str]]:
    """Of the rank that the scheduler's metrics are of; the others count the same."""
    from sglang.srt.layers.attention.kdtree_report import metric_labels
    from sglang.srt.runtime_context import get_parallel

    return metric_labels() if get_parallel().tp_rank == 0 else None
