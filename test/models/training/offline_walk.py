# SPDX-License-Identifier: Apache-2.0
"""Count verify steps in torch, without a server: chain and best-first tree, from one forward of each model.

A verify step begins at the last committed token (the root), whose features the drafter does not have yet.
The drafter proposes NUM_DRAFTS tokens by their marginals. A chain takes the top token of each; a tree of N
nodes is the root and the N - 1 most probable rank paths. The step commits the drafts that equal the
target's own continuation and one token more. Since verification is exact, the continuation is known before
the walk: only the number of steps depends on the drafter.

Every decision also yields its margin, the change of a logit or log-probability that would flip it. Counts
whose smallest margin is far above float32 rounding are the same on every machine.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.architecture import EXPERTS_PER_TOKEN, MASK_ID, NUM_DRAFTS, Drafter, Target, generate

CHAIN = 0  # number of tree nodes that stands for the chain


@dataclass
class Continuation:
    """A prompt, what the target answers, and how narrowly."""

    prompt: list[int]
    tokens: list[int]
    margin: float = float("inf")  # smallest gap between the best two logits
    router_margin: float = float("inf")  # smallest gap between the last chosen and the first refused expert

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.tokens


@dataclass
class Walk:
    """Tokens committed by each verify step, where it began in the answer, and the smallest margin."""

    lengths: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    margin: float = float("inf")

    @property
    def steps(self) -> int:
        """Number of verify steps."""
        return len(self.lengths)


class _RouterGaps:
    """Records the smallest selection gap of all routers while it is entered."""

    def __init__(self, target: Target) -> None:
        self.target, self.gap = target, float("inf")

    def __enter__(self) -> _RouterGaps:
        def record(layer, inputs, _output):
            ranked = (layer.scores(inputs[0]) + layer.correction_bias).sort(-1, descending=True).values
            gaps = ranked[..., EXPERTS_PER_TOKEN - 1] - ranked[..., EXPERTS_PER_TOKEN]
            self.gap = min(self.gap, float(gaps.min()))

        self.handles = [layer.register_forward_hook(record) for layer in self.target.expert_layers()]
        return self

    def __exit__(self, *_exc) -> None:
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def greedy_continuation(target: Target, prompt: list[int], num_tokens: int) -> Continuation:
    """Decode greedily, then measure the margins in one forward over the whole sequence."""
    ids = generate(target, torch.tensor([prompt]), num_tokens, torch.zeros(1))
    result = Continuation(prompt, ids[0, len(prompt) :].tolist())
    with _RouterGaps(target) as gaps:
        logits = target.logits(ids[:, :-1])[0, len(prompt) - 1 :]
    best = logits.topk(2, -1)
    if best.indices[:, 0].tolist() == result.tokens:
        result.margin = float((best.values[:, 0] - best.values[:, 1]).min())
    else:  # a tie within rounding: the two ways to compute the same logits disagree
        result.margin = 0.0
    result.router_margin = gaps.gap
    return result


@torch.no_grad()
def sampled_continuation(target: Target, prompt: list[int], num_tokens: int) -> Continuation:
    """Sample at temperature 1 from torch's global generator."""
    ids = generate(target, torch.tensor([prompt]), num_tokens, torch.ones(1))
    return Continuation(prompt, ids[0, len(prompt) :].tolist())


@dataclass(frozen=True)
class Contract:
    """What the drafter is given. The defaults are right; any other value is an error whose cost can be measured."""

    position_shift: int = 0  # rotary positions of the block
    context_shift: int = 0  # +1: the root's own features are visible, -1: the last context token is hidden
    swap_features: bool = False
    zero_features: bool = False
    mask_id: int = MASK_ID
    output_shift: int = 0  # +1: outputs are read one position late


@torch.no_grad()
def draft_log_probs(
    target: Target, drafter: Drafter, ids: list[int], anchors: list[int], contract: Contract = Contract()
) -> Tensor:
    """Log-probabilities of the drafts of blocks that start at ``anchors``, fp32 [a, NUM_DRAFTS, vocabulary]."""
    rows = torch.tensor([ids])
    features = target.features(rows)
    if contract.swap_features:
        features = torch.cat(features.chunk(2, -1)[::-1], -1)
    if contract.zero_features:
        features = torch.zeros_like(features)
    embedding = target.embed_tokens.weight
    if contract.mask_id != MASK_ID:
        embedding = embedding.clone()
        embedding[MASK_ID] = embedding[contract.mask_id]
    starts = torch.tensor([anchors])
    hidden = drafter(
        features,
        rows.gather(1, starts),
        starts,
        embedding,
        position_shift=contract.position_shift,
        context_shift=contract.context_shift,
    )
    log_probs = target.lm_head(hidden)[0].float().log_softmax(-1)
    return log_probs.roll(-contract.output_shift, 1)


RankPath = tuple[int, ...]


def best_first_paths(log_probs: list[list[float]], count: int) -> list[tuple[float, RankPath]]:
    """The ``count`` most probable rank paths with their weights, best first.

    log_probs[d] holds the marginals of depth d + 1, best first. Of equal weights the shorter path comes
    first, then the lexicographically smaller one.
    """
    found: list[tuple[float, RankPath]] = []
    heap = [(-log_probs[0][0], 1, (0,))]
    while heap and len(found) < count:
        cost, depth, path = heapq.heappop(heap)
        found.append((-cost, path))
        here = log_probs[depth - 1]
        rank = path[-1]
        if rank + 1 < len(here):
            heapq.heappush(heap, (cost + here[rank] - here[rank + 1], depth, (*path[:-1], rank + 1)))
        if depth < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth][0], depth + 1, (*path, 0)))
    return found


class StepCounter:
    """Verify steps of one answer for the chain and for any tree size."""

    def __init__(self, target: Target, drafter: Drafter, answer: Continuation, contract: Contract = Contract()) -> None:
        self.tokens = answer.tokens
        first = len(answer.prompt)
        # Any generated token but the last can become a root.
        anchors = list(range(first, first + len(self.tokens) - 1))
        self.log_probs = draft_log_probs(target, drafter, answer.ids, anchors, contract)

    def _accept_chain(self, start: int, wanted: list[int]) -> tuple[int, float]:
        marginals = self.log_probs[start]
        accepted, margin = 0, float("inf")
        for depth, token in enumerate(wanted):
            best = marginals[depth].topk(2)
            if int(best.indices[0]) != token:
                return accepted, min(margin, float(best.values[0] - marginals[depth, token]))
            margin = min(margin, float(best.values[0] - best.values[1]))
            accepted += 1
        return accepted, margin

    def _accept_tree(self, start: int, wanted: list[int], nodes: int) -> tuple[int, float]:
        marginals = self.log_probs[start]
        ranked = marginals.topk(nodes, -1)  # N - 1 ranks suffice; one more for the first path left out
        paths = best_first_paths(ranked.values.tolist(), nodes)
        included, left_out = paths[: nodes - 1], paths[nodes - 1 :]
        ids = ranked.indices.tolist()
        weights = {tuple(ids[d][r] for d, r in enumerate(path)): weight for weight, path in included}
        accepted, margin = 0, float("inf")
        while accepted < len(wanted) and tuple(wanted[: accepted + 1]) in weights:
            accepted += 1
        if accepted and left_out:
            margin = weights[tuple(wanted[:accepted])] - left_out[0][0]
        if accepted < len(wanted):
            refused = sum(float(marginals[d, token]) for d, token in enumerate(wanted[: accepted + 1]))
            margin = min(margin, included[-1][0] - refused)
        return accepted, margin

    def walk(self, nodes: int = CHAIN) -> Walk:
        """Walk the whole answer with trees of ``nodes`` nodes, root included, or with the chain."""
        result, start = Walk(), 0
        while start < len(self.tokens) - 1:
            wanted = self.tokens[start + 1 : start + 1 + NUM_DRAFTS]
            if nodes == CHAIN:
                accepted, margin = self._accept_chain(start, wanted)
            else:
                accepted, margin = self._accept_tree(start, wanted, nodes)
            result.starts.append(start)
            length = min(accepted + 1, len(self.tokens) - 1 - start)  # no bonus token after the last one
            result.lengths.append(length)
            result.margin = min(result.margin, margin)
            start += length
        return result


def loop_start(tokens: list[int], longest_period: int = 48) -> int:
    """Where the answer begins to repeat itself until its end, or its length if it does not.

    At least two whole periods must be there. A small model decoded greedily ends in such loops, where any
    drafter that can copy accepts everything.
    """
    best = len(tokens)
    for period in range(1, longest_period + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= 2 * period:
            best = min(best, start)
    return best
