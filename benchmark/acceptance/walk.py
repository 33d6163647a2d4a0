# SPDX-License-Identifier: Apache-2.0
"""Walk one answer with the chain, with trees, with chain-seeded trees, and with the adaptive budget.

A verification is exact, so the answer is known before the walk; only the number of steps depends on the drafts. All
ways see the same scores of the drafter: test/models/training/offline_walk.py says how a step begins.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import torch

from sglang.srt.speculative.ddtree_budget import AdaptiveBudget, CostTable, Option, StepRow, options_up_to

from . import ROW_COSTS, WIDTHS

MAX_PATHS = max(WIDTHS) - 1
RANKS = 64


@dataclass
class Tally:
    """Sums over steps."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    cost: dict[float, float] = field(default_factory=lambda: dict.fromkeys(ROW_COSTS, 0.0))

    def add(self, tokens: int, rows: int) -> None:
        self.tokens += tokens
        self.steps += 1
        self.rows += rows
        for row_cost in ROW_COSTS:
            self.cost[row_cost] += 1 + row_cost * (rows - 1)


class Step:
    """The drafter's scores at one root, and how far each way follows the answer.

    log_probs fp32 [D, V]; wanted: the answer's next tokens, at most D.
    """

    def __init__(self, log_probs: torch.Tensor, wanted: list[int]):
        top = log_probs.topk(min(RANKS, log_probs.shape[-1]), dim=-1)
        self.scores, ids = top.values.tolist(), top.indices.tolist()
        self.depths = len(self.scores)
        self.ranks: list[int] = []  # of the answer's tokens, until one is no candidate
        for depth, token in enumerate(wanted):
            if token not in ids[depth]:
                break
            self.ranks.append(ids[depth].index(token))
        self.paths = best_paths(self.scores, MAX_PATHS)

    def accepted(self, paths: set) -> int:
        length = 0
        while length < len(self.ranks) and tuple(self.ranks[: length + 1]) in paths:
            length += 1
        return length

    def chain(self) -> int:
        return self.accepted({(0,) * d for d in range(1, self.depths + 1)})

    def tree(self, width: int) -> int:
        return self.accepted({path for path, _ in self.paths[: width - 1]})

    def accepted_of(self, option: Option) -> int:
        return self.chain() if option.is_chain else self.tree(option.width)

    def seeded(self, width: int) -> int:
        """The whole chain first, the most probable other paths with what is left."""
        chosen = {(0,) * d for d in range(1, min(self.depths, width - 1) + 1)}
        for path, _ in self.paths:
            if len(chosen) >= width - 1:
                break
            chosen.add(path)
        return self.accepted(chosen)

    def promised(self, option: Option) -> float:
        if option.is_chain:
            spine, total = 0.0, 0.0
            for depth in range(min(self.depths, option.width - 1)):
                spine += self.scores[depth][0]
                total += math.exp(spine)
            return total
        return sum(math.exp(weight) for _, weight in self.paths[: option.width - 1])


def best_paths(scores: list[list[float]], count: int) -> list[tuple[tuple[int, ...], float]]:
    """The most probable rank paths with their weights, best first. scores[d]: of depth d + 1, best first."""
    found, heap = [], [(-scores[0][0], 1, (0,))]
    while heap and len(found) < count:
        cost, depth, path = heapq.heappop(heap)
        found.append((path, -cost))
        here, rank = scores[depth - 1], path[-1]
        if rank + 1 < len(here):
            heapq.heappush(heap, (cost + here[rank] - here[rank + 1], depth, (*path[:-1], rank + 1)))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], depth + 1, (*path, 0)))
    return found


def costs_of(row_cost: float, options: tuple[Option, ...]) -> CostTable:
    widths = tuple(sorted({option.width for option in options}))
    step = tuple(1 + row_cost * (width - 1) for width in widths)
    return CostTable(batch_sizes=(1,), contexts=(0,), widths=widths, step_ms=((step,),), node_ms=((0.0,),))


class Study:
    """Answers, walked in every way. One adaptive budget for each cost of a row, which learns from answer to answer."""

    def __init__(self, block_size: int):
        self.options = options_up_to(max(WIDTHS), block_size)
        self.budgets = {c: AdaptiveBudget(self.options, costs_of(c, self.options)) for c in ROW_COSTS}
        self.answers = 0

    def ways(self) -> list[str]:
        fixed = ["chain", *(f"tree {w}" for w in WIDTHS), *(f"seeded {w}" for w in WIDTHS)]
        return fixed + [f"adaptive {c:g}" for c in ROW_COSTS]

    def add(self, tokens: list[int], log_probs: torch.Tensor, block_size: int, tallies: dict[str, Tally]) -> None:
        """log_probs [a, D, V]: of the block that starts at each token of the answer but the last."""
        steps: dict[int, Step] = {}
        self.answers += 1

        def step_at(start: int) -> Step:
            if start not in steps:
                steps[start] = Step(log_probs[start], tokens[start + 1 : start + block_size])
            return steps[start]

        def walk(tally: Tally, take) -> None:
            start = 0
            while start < len(tokens) - 1:
                drafts, rows = take(step_at(start))
                length = min(drafts + 1, len(tokens) - 1 - start)
                tally.add(length, rows)
                start += length

        walk(tallies["chain"], lambda step: (step.chain(), block_size))
        for width in WIDTHS:
            walk(tallies[f"tree {width}"], lambda step, w=width: (step.tree(w), w))
            walk(tallies[f"seeded {width}"], lambda step, w=width: (step.seeded(w), w))
        for row_cost, budget in self.budgets.items():
            walk(tallies[f"adaptive {row_cost:g}"], lambda step, b=budget: self.take(b, step))

    def take(self, budget: AdaptiveBudget, step: Step) -> tuple[int, int]:
        rid = str(self.answers)
        option = budget.choose([rid], 0).option
        drafts = step.accepted_of(option)
        chain, length = step.chain(), drafts + 1
        row = StepRow(
            rid=rid,
            gains=tuple(step.promised(o) for o in self.options),
            drafts=drafts,
            chain_drafts=min(chain, length),
            chain_is_open=chain >= length and length < step.depths,
        )
        budget.learn(option, [row])
        return drafts, option.width
