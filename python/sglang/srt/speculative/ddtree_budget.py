# SPDX-License-Identifier: Apache-2.0
"""How many nodes a step verifies: --speculative-ddtree-budget.

A number is the same tree at every step. ``auto`` chooses before each step, for the batch
as a whole, the width that commits the most tokens per millisecond, and for each request
how many nodes of that width are worth verifying. docs/ddtree.md says how. Everything here
is host arithmetic on numbers that all ranks of a group share, so all choose the same.
"""

from __future__ import annotations

import bisect
import math
from typing import Dict, List, Optional, Sequence, Tuple

import msgspec

# A tree has to promise this much more than the chain, or than another tree before.
HYSTERESIS = 1.01
# A tree's cost and the chain's were measured once, and err, by 2 % each: a tree counts
# for as much more as it differs from the chain, up to this share of the chain's cost.
COST_DOUBT = 0.04
# Weight of what was known before a step, for a request's curve and for the calibration.
CURVE_MEMORY = 0.8
CALIBRATION_MEMORY = 0.97
# Drafts per step that a calibration has seen before the first step.
CALIBRATION_PRIOR = 4.0
CALIBRATION_RANGE = (0.001, 1.5)
# While the chain is verified nothing is learnt of trees; what was learnt fades.
FADING = 0.01
# Costs are looked up at every so many tokens of context.
CONTEXT_STEP = 64
# A chain tells what each option promises once in so many steps: that takes it a launch.
CHAIN_STEPS_TO_LEARN = 4
# A node that is the most probable continuation of all is never masked.
MAX_LIMIT = math.log(0.5)


class Option(msgspec.Struct, frozen=True):
    """The ``width`` most probable nodes, the root included, or a chain of as many."""

    width: int
    is_chain: bool = False


class Decision(msgspec.Struct, frozen=True):
    option: Option
    min_log_prob: float = -math.inf  # nodes below it stay unused


class StepRow(msgspec.Struct, frozen=True):
    """What one request's step told."""

    rid: str
    gains: Tuple[float, ...]  # by option: drafts that the drafter's scores promised
    drafts: int  # accepted
    chain_drafts: int  # that the chain would have had accepted, at least
    chain_is_open: bool  # the chain may go on where the tree ends
    is_last: bool = False


def options_up_to(num_nodes: int, block_size: int) -> Tuple[Option, ...]:
    """The chain, then trees from half a block to num_nodes, each twice as wide."""
    widths, width = {num_nodes}, max(2, block_size // 2)
    while width < num_nodes:
        widths.add(width)
        width *= 2
    chain = Option(width=min(block_size, num_nodes), is_chain=True)
    return chain, *(Option(width=width) for width in sorted(widths))


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of a decode step, drafting included, at points of a grid."""

    batch_sizes: Tuple[int, ...]
    contexts: Tuple[int, ...]  # tokens of prefix
    # Verified tokens a request, as a tree. 0 = the chain; if missing, it costs what a
    # tree of its width does.
    widths: Tuple[int, ...]
    step_ms: Tuple[Tuple[Tuple[float, ...], ...], ...]  # [batch size][context][width]
    # What a node in use costs more than an unused one. [batch size][context]
    node_ms: Tuple[Tuple[float, ...], ...]

    def check(self, options: Sequence[Option]) -> None:
        """ValueError unless the table is complete and has what these cost."""
        for name in ("batch_sizes", "contexts", "widths"):
            axis = getattr(self, name)
            if not axis or list(axis) != sorted(set(axis)) or axis[0] < 0:
                raise ValueError(
                    f"DDTREE cost table: {name} must ascend from 0 or more, got {axis}."
                )
        widths = {o.width for o in options if not (o.is_chain and 0 in self.widths)}
        missing = sorted(widths - set(self.widths))
        if missing:
            raise ValueError(
                f"DDTREE cost table: it has widths {list(self.widths)}, and this server "
                f"also verifies {missing}."
            )
        plane = (len(self.batch_sizes), len(self.contexts))
        rows = [row for plane in self.step_ms for row in plane]
        shape = {len(self.step_ms)}, {len(p) for p in self.step_ms}, {*map(len, rows)}
        if shape != ({plane[0]}, {plane[1]}, {len(self.widths)}) or (
            len(self.node_ms) != plane[0] or {*map(len, self.node_ms)} != {plane[1]}
        ):
            raise ValueError(
                "DDTREE cost table: step_ms must be [batch size][context][width] and "
                "node_ms [batch size][context], of the sizes of the lists."
            )
        if not all(0 < ms < math.inf for row in rows for ms in row) or not all(
            0 <= ms < math.inf for row in self.node_ms for ms in row
        ):
            raise ValueError(
                "DDTREE cost table: times must be finite, step_ms above 0 and node_ms "
                "not below it."
            )

    def step(self, batch_size: int, context: int, option: Option) -> float:
        """Linear between points; beyond the grid the nearest edge."""
        is_known = option.is_chain and 0 in self.widths
        column = self.widths.index(0 if is_known else option.width)
        return self._between(
            batch_size, context, lambda b, c: self.step_ms[b][c][column]
        )

    def node(self, batch_size: int, context: int) -> float:
        return self._between(batch_size, context, lambda b, c: self.node_ms[b][c])

    def _between(self, batch_size, context, at) -> float:
        b0, b1, fb = bracket(self.batch_sizes, batch_size)
        c0, c1, fc = bracket(self.contexts, context)
        low = at(b0, c0) * (1 - fc) + at(b0, c1) * fc
        high = at(b1, c0) * (1 - fc) + at(b1, c1) * fc
        return low * (1 - fb) + high * fb


def bracket(axis: Sequence[int], value: float) -> Tuple[int, int, float]:
    """The points below and above, and how far from the first to the second."""
    above = bisect.bisect_left(axis, value)
    if above == 0 or above == len(axis):
        edge = min(above, len(axis) - 1)
        return edge, edge, 0.0
    below = above - 1
    return below, above, (value - axis[below]) / (axis[above] - axis[below])


def choose_option(tokens: Sequence[float], costs: Sequence[float], current: int) -> int:
    """The index of the option that commits the most per millisecond.

    tokens and costs are what each option promises for the whole batch; option 0 is the
    chain. A tree has to be HYSTERESIS better than the chain, and than the tree that is
    the current one. Differences in cost are doubted: COST_DOUBT.
    """
    rates = [t / c for t, c in zip(tokens, doubted(costs), strict=True)]
    rates[0] *= HYSTERESIS
    best = max(range(len(rates)), key=lambda i: (rates[i], -i))
    stays = current and rates[0] < rates[current] >= rates[best] / HYSTERESIS
    return current if stays else best


def doubted(costs: Sequence[float]) -> List[float]:
    """costs, the first one the chain's, as far as they are believed."""
    chain, most = costs[0], COST_DOUBT * costs[0]
    return [cost + min(abs(cost - chain), most) for cost in costs]


class Calibration:
    """Accepted over promised drafts, the last steps counting most."""

    def __init__(self):
        self.accepted = self.promised = CALIBRATION_PRIOR

    def add(self, accepted: float, promised: float) -> None:
        self.accepted = CALIBRATION_MEMORY * self.accepted + accepted
        self.promised = CALIBRATION_MEMORY * self.promised + promised

    def fade_to(self, other: float) -> None:
        self.accepted += FADING * (other * self.promised - self.accepted)

    @property
    def factor(self) -> float:
        low, high = CALIBRATION_RANGE
        return min(max(self.accepted / self.promised, low), high)


class FixedBudget:
    """The same tree at every step."""

    def __init__(self, width: int):
        self.options = (Option(width=width),)

    def choose(self, rids: Sequence[str], context: int) -> Decision:
        return Decision(self.options[0])

    def learns(self, option: Option) -> bool:
        return False

    def learn(self, option: Option, rows: Sequence[StepRow]) -> None:
        pass

    def forget(self, rid: str) -> None:
        pass


class AdaptiveBudget:
    """``choose`` before a step, ``learn`` when its counts have reached the host: under
    overlap scheduling that is after the next step was chosen."""

    def __init__(self, options: Sequence[Option], costs: CostTable):
        costs.check(options)
        self.options, self.costs = tuple(options), costs
        self.current = 0
        # Of the chain's drafts, and of those that trees promise more than the chain.
        self.chain, self.more = Calibration(), Calibration()
        self.chain_steps = 0  # one after another, the last ones
        self.costs_key, self.costs_there = None, ([], 0.0)
        self.curves: Dict[str, Tuple[float, ...]] = {}  # promised drafts by request
        self.mean_curve: Optional[Tuple[float, ...]] = None  # for requests without one

    def choose(self, rids: Sequence[str], context: int) -> Decision:
        """context: tokens of prefix of a request, the mean of the batch."""
        if self.mean_curve is None:
            return Decision(self.options[self.current])
        curves = [self.curves.get(rid, self.mean_curve) for rid in rids]
        promised = [sum(column) for column in zip(*curves)]
        chain, more = self.chain.factor, self.more.factor
        base = len(rids) + chain * promised[0]
        tokens = [
            base + (more if p > promised[0] else chain) * (p - promised[0])
            for p in promised
        ]
        costs, node_ms = self.costs_at(len(rids), context // CONTEXT_STEP)
        self.current = choose_option(tokens, costs, self.current)
        option = self.options[self.current]
        if option.is_chain or node_ms == 0:
            return Decision(option)
        # A node is worth its time if it commits what the step commits in that time.
        rate = tokens[self.current] / costs[self.current]
        limit = math.log(rate * node_ms / more)
        return Decision(option, min_log_prob=min(limit, MAX_LIMIT))

    def learns(self, option: Option) -> bool:
        """Whether the step that follows is to tell what each option promises."""
        self.chain_steps = self.chain_steps + 1 if option.is_chain else 0
        return not option.is_chain or self.chain_steps % CHAIN_STEPS_TO_LEARN == 1

    def costs_at(self, batch_size: int, place: int) -> Tuple[List[float], float]:
        """-> the cost of each option's step, and of a node in use. Most steps ask for
        what the last one asked for."""
        key = batch_size, place
        if key != self.costs_key:
            context = place * CONTEXT_STEP
            steps = [self.costs.step(batch_size, context, o) for o in self.options]
            node_ms = self.costs.node(batch_size, context)
            self.costs_key, self.costs_there = key, (steps, node_ms)
        return self.costs_there

    def learn(self, option: Option, rows: Sequence[StepRow]) -> None:
        if not rows:
            return
        used = self.options.index(option)
        for row in rows:
            if row.is_last:
                self.curves.pop(row.rid, None)
                continue
            known = self.curves.get(row.rid, row.gains)
            self.curves[row.rid] = blend(known, row.gains, CURVE_MEMORY)
        size = len(rows)
        mean = tuple(sum(column) / size for column in zip(*(r.gains for r in rows)))
        self.mean_curve = blend(self.mean_curve or mean, mean, CURVE_MEMORY)
        # Where the tree ends before the chain does, the chain gets what was promised.
        chain = [
            max(r.chain_drafts, r.gains[0]) if r.chain_is_open else r.chain_drafts
            for r in rows
        ]
        self.chain.add(sum(chain) / size, mean[0])
        if option.is_chain:
            self.more.fade_to(1.0)
        elif mean[used] > mean[0]:
            more = sum(r.drafts - c for r, c in zip(rows, chain)) / size
            self.more.add(more, mean[used] - mean[0])

    def forget(self, rid: str) -> None:
        self.curves.pop(rid, None)


def blend(old: Sequence[float], new: Sequence[float], memory: float) -> Tuple:
    return tuple(memory * o + (1 - memory) * n for o, n in zip(old, new, strict=True))


def parse_budget(text: Optional[str], num_nodes: int) -> Optional[int]:
    """The number of --speculative-ddtree-budget, None for auto; the default is num_nodes."""
    if text is None:
        return num_nodes
    if text == "auto":
        return None
    try:
        width = int(text)
    except ValueError:
        raise ValueError(
            f"DDTREE: --speculative-ddtree-budget is auto or a number, got {text!r}."
        ) from None
    if not 2 <= width <= num_nodes:
        raise ValueError(
            "DDTREE needs --speculative-ddtree-budget between 2 and "
            f"--speculative-num-draft-tokens, {num_nodes}; got {width}."
        )
    return width


def load_costs(path: str) -> CostTable:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=CostTable)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"DDTREE: no cost table in {path}: {error}") from error


def monotone(times: List[float]) -> Tuple[float, ...]:
    """By width, ascending. A narrower step is not slower than a wider one; where a
    measurement says so, something else ran beside it."""
    return tuple(min(times[i:]) for i in range(len(times)))
