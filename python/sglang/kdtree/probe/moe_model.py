# SPDX-License-Identifier: Apache-2.0
"""What a placement of experts on ranks costs at low batch, from routing counts.

At low batch the time of an expert is the time to read its weights, whatever its few tokens: a
rank's time in a layer is its number of activated experts. All ranks wait for the slowest.
"""

from __future__ import annotations

import msgspec
import numpy as np

from sglang.kdtree.errors import KitError


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """physical_to_logical[layer, slot]; slots are divided evenly among the ranks, in order."""

    name: str
    physical_to_logical: np.ndarray
    ranks: int


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    activated_mean: float  # experts a rank reads in a layer and step
    slowest_mean: float  # the same for the slowest rank
    idle_share: float  # share of (step, layer, rank) without any activated expert
    lost_share: (
        float  # of the time of the MoE layers, spent waiting for the slowest rank
    )
    time_per_step: (
        float  # sum over layers of the slowest rank, in expert reads, per original step
    )


def check_ranks(experts: int, ranks: int, redundant: int = 0) -> None:
    if ranks < 1 or (experts + redundant) % ranks:
        raise KitError(
            what="--ranks" if not redundant else "--redundant",
            expected=f"{experts} experts and the redundant ones divided evenly",
            got=f"{experts} + {redundant} on {ranks} ranks",
            remedy="Choose numbers that divide.",
        )


def contiguous(*, layers: int, experts: int, ranks: int) -> Placement:
    check_ranks(experts, ranks)
    return Placement(
        name="expert parallel, in order",
        physical_to_logical=np.broadcast_to(np.arange(experts), (layers, experts)),
        ranks=ranks,
    )


def eplb(
    counts: np.ndarray, *, ranks: int, redundant: int, algorithm: str = "deepseek"
) -> Placement:
    """The placement that SGLang's own load balancer would choose for these counts."""
    import torch

    from sglang.srt.eplb.eplb_algorithms import EplbAlgorithm, rebalance_experts

    experts = counts.shape[2]
    check_ranks(experts, ranks, redundant)
    slots = experts + redundant
    physical_to_logical, _, _ = rebalance_experts(
        tokens_per_expert=torch.from_numpy(np.ascontiguousarray(counts)),
        num_physical_experts=slots,
        num_local_physical_experts=slots // ranks,
        num_groups=1,
        num_nodes=1,
        algorithm=EplbAlgorithm[algorithm],
    )
    name = f"EPLB {algorithm}" + (f", {redundant} redundant" if redundant else "")
    return Placement(
        name=name, physical_to_logical=physical_to_logical.numpy(), ranks=ranks
    )


def activated_per_rank(counts: np.ndarray, placement: Placement) -> np.ndarray:
    """[steps, layers, ranks] experts that each rank has to read.

    The tokens of an expert with replicas go to them in turn, beginning with replica
    (step mod replicas): with fewer tokens than replicas only that many replicas are read.
    """
    steps, layers, experts = counts.shape
    slots = placement.physical_to_logical.shape[1]
    read = np.zeros((steps, layers, slots), dtype=bool)
    step = np.arange(steps)
    for layer in range(layers):
        mapping = placement.physical_to_logical[layer]
        replicas = np.bincount(mapping, minlength=experts)
        seen = np.zeros(experts, dtype=np.int64)
        for slot, expert in enumerate(mapping):
            turn = (seen[expert] - step) % replicas[expert]
            read[:, layer, slot] = counts[:, layer, expert] > turn
            seen[expert] += 1
    return read.reshape(steps, layers, placement.ranks, slots // placement.ranks).sum(
        axis=3
    )


def cost(name: str, activated: np.ndarray, *, steps_merged: int = 1) -> Cost:
    slowest = activated.max(axis=2)
    waiting = (slowest[:, :, None] - activated).sum()
    total = slowest.sum() * activated.shape[2]
    return Cost(
        name=name,
        activated_mean=float(activated.mean()),
        slowest_mean=float(slowest.mean()),
        idle_share=float((activated == 0).mean()),
        lost_share=float(waiting / total) if total else 0.0,
        time_per_step=float(slowest.sum(axis=1).mean() / steps_merged),
    )


def tensor_parallel_cost(counts: np.ndarray, *, ranks: int) -> Cost:
    """Every rank holds a slice of every expert: the same work everywhere, in fractions of an expert."""
    share = (counts > 0).sum(axis=2) / ranks
    return Cost(
        name="tensor parallel",
        activated_mean=float(share.mean()),
        slowest_mean=float(share.mean()),
        idle_share=float((share == 0).mean()),
        lost_share=0.0,
        time_per_step=float(share.sum(axis=1).mean()),
    )


def merge_steps(counts: np.ndarray, factor: int) -> np.ndarray:
    """A batch that is factor times as large, made of consecutive steps; a remainder is dropped."""
    steps = counts.shape[0] // factor
    return (
        counts[: steps * factor].reshape(steps, factor, *counts.shape[1:]).sum(axis=1)
    )


def scenarios(
    counts: np.ndarray,
    *,
    ranks: int,
    redundant: list[int],
    batches: list[int],
    algorithm: str,
) -> list[Cost]:
    layers, experts = counts.shape[1:]
    in_order = contiguous(layers=layers, experts=experts, ranks=ranks)
    found = [
        cost(in_order.name, activated_per_rank(counts, in_order)),
        tensor_parallel_cost(counts, ranks=ranks),
    ]
    for extra in [0, *redundant]:
        placement = eplb(counts, ranks=ranks, redundant=extra, algorithm=algorithm)
        found.append(cost(placement.name, activated_per_rank(counts, placement)))
    for factor in batches:
        if factor <= counts.shape[0]:
            merged = merge_steps(counts, factor)
            found.append(
                cost(
                    f"in order, batch x{factor}",
                    activated_per_rank(merged, in_order),
                    steps_merged=factor,
                )
            )
    return found


def time_lost_us(cost_: Cost, *, expert_us: float | None) -> float | None:
    """Microseconds a step that the average rank waits."""
    return (
        None
        if expert_us is None
        else cost_.time_per_step * cost_.lost_share * expert_us
    )
