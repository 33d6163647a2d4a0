# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities for tree builders, in the ways that make one wrong: ties, holes, sums that rounding makes equal."""

import torch

KINDS = ("smooth", "ties", "tails", "holes", "collisions", "collapse", "disorder")
STEPS = (0.0, -1e-9, -3e-8, -6e-8, -1.0, -1.0000001, -16.0)  # different parents, equal rounded sums
ULP = 2.0**-23  # of fp32 at 1


def score_sheet(generator: torch.Generator, b: int, depths: int, k: int, kind: str) -> torch.Tensor:
    """fp32 [b, depths, k], best first; "holes" has NaN at any rank, "disorder" is in no order and goes above 0."""
    if kind == "collapse":
        sheets = [_collapsing(generator, depths, k) for _ in range(b)]
        return torch.stack(sheets)
    scores = -torch.rand(b, depths, k, generator=generator) * 3
    if kind == "disorder":
        scores += 0.5
        scores[torch.rand(b, depths, k, generator=generator) < 0.1] = torch.inf
        scores[torch.rand(b, depths, k, generator=generator) < 0.1] = torch.nan
        return scores
    if kind == "ties":
        scores = (scores * 2).round() / 2
    elif kind == "tails":
        scores[torch.rand(b, depths, k, generator=generator) < 0.4] = -torch.inf
    elif kind == "collisions":
        steps = torch.tensor(STEPS)
        scores = steps[torch.randint(0, len(steps), (b, depths, k), generator=generator)]
    scores = scores.sort(dim=-1, descending=True).values + 0.0  # no -0.0
    if kind == "holes":
        scores[torch.rand(b, depths, k, generator=generator) < 0.2] = torch.nan
    return scores


def _collapsing(generator: torch.Generator, depths: int, k: int) -> torch.Tensor:
    """[depths, k]: nearly equal weights in an order that is not that of the paths, then steps that round them equal.

    So a child of a worse parent may be wanted before children of better ones that weigh the same.
    """
    near = -1.0 - torch.randint(0, 5, (depths, 2), generator=generator) * ULP
    near[:, 1] = near.amin(dim=1) if torch.rand((), generator=generator) < 0.5 else -100.0
    rows = torch.cat([torch.zeros(depths, 1), near, torch.full((depths, max(k - 3, 0)), -100.0)], dim=1)[:, :k]
    early = int(torch.randint(2, 5, (), generator=generator))
    early = max(min(early, depths - 1), 0)
    is_steep = (torch.rand(depths - early, k, generator=generator) < 0.5) & bool(
        torch.rand((), generator=generator) < 0.5
    )
    rows[early:] = torch.where(is_steep, -32.0, -16.0)
    return rows.sort(dim=-1, descending=True).values


def in_order(scores: torch.Tensor) -> torch.Tensor:
    """The same with no value above 0 or above that of a better rank, and what makes no node last, as -inf."""
    scores = scores.clone()
    for row in scores.view(-1, scores.shape[-1]):
        real, least = [], 0.0
        for value in row.tolist():
            if value > -torch.inf:
                least = min(least, value)
                real.append(least)
        row[:] = torch.tensor(real + [-torch.inf] * (len(row) - len(real)))
    return scores
