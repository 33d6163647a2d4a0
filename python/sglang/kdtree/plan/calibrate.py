# SPDX-License-Identifier: Apache-2.0
"""Solve the pool equation for what observed pools say about a machine.

Two observations (f1, n1), (f2, n2) of tokens = (P f - R) / c fix P / c and R / c; one of P, R, c
has to be assumed: c from the formula, P from the card, or R from the weights. All three readings
are reported; one that contradicts a known fact (less resident than the weights, more free than
the card has) is not used.
"""

from __future__ import annotations

import msgspec

from sglang.kdtree.arguments import count
from sglang.kdtree.errors import KitError


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    fraction: float
    tokens: int


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan derives or assumes, in bytes of one rank."""

    free: int
    resident: (
        int  # when the pool is sized: weights and what is kept out of the KV budget
    )
    weights: int
    cell: float  # a token
    card: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    free_bytes: int
    resident_bytes: int
    cell_bytes: float
    assumed: str  # "cell", "free", "resident" or "none": what was not solved for
    contradiction: str  # empty if there is none


def parse_observation(text: str) -> Observation:
    fraction, _, tokens = text.partition(":")
    try:
        found = Observation(fraction=float(fraction), tokens=count(tokens))
    except ValueError:
        found = None
    if not found or not 0 < found.fraction <= 1:
        raise KitError(
            what="--observed",
            expected="FRACTION:TOKENS, for example 0.85:101134",
            got=repr(text),
            remedy="Take both from one server log: --mem-fraction-static and max_total_num_tokens.",
        )
    return found


def calibrations(observations: list[Observation], *, known: Known) -> list[Calibration]:
    """Every way to read the observations, the preferred one first; [] without any."""
    if not observations:
        return []
    if len(observations) == 1:
        return [_from_one(observations[0], known=known)]
    if len(observations) > 2:
        raise KitError(
            what="--observed",
            expected="one or two observations",
            got=str(len(observations)),
            remedy="Give the two that lie furthest apart.",
        )
    return _from_two(*observations, known=known)


def _from_one(observation: Observation, *, known: Known) -> Calibration:
    """One observation fixes the resident memory."""
    return _checked(
        free=known.free,
        resident=known.free * observation.fraction - observation.tokens * known.cell,
        cell=known.cell,
        assumed="none",
        known=known,
    )


def _from_two(
    first: Observation, second: Observation, *, known: Known
) -> list[Calibration]:
    if first.fraction == second.fraction:
        raise KitError(
            what="--observed",
            expected="two observations at different fractions",
            got=f"{first.fraction} twice",
            remedy="Observe the pool at another --mem-fraction-static.",
        )
    slope = (second.tokens - first.tokens) / (second.fraction - first.fraction)
    intercept = slope * first.fraction - first.tokens
    if slope <= 0 or intercept <= 0:
        raise KitError(
            what="--observed",
            expected="a pool that grows with the fraction, faster than in proportion to it",
            got=f"{first.tokens} tokens at {first.fraction:g} and {second.tokens} at {second.fraction:g}",
            remedy="Take both from starts that differ in nothing but --mem-fraction-static.",
        )
    cells = {
        "cell": known.cell,
        "free": known.free / slope,
        "resident": known.resident / intercept,
    }
    return [
        _checked(
            free=slope * cell,
            resident=intercept * cell,
            cell=cell,
            assumed=assumed,
            known=known,
        )
        for assumed, cell in cells.items()
    ]


def _checked(
    *, free: float, resident: float, cell: float, assumed: str, known: Known
) -> Calibration:
    contradiction = ""
    if round(resident) < known.weights:
        contradiction = (
            f"the solved resident memory, {resident / 1e9:.1f} GB, is less than the weights alone, "
            f"{known.weights / 1e9:.1f} GB"
        )
    elif round(free) > known.card:
        contradiction = f"the solved free memory, {free / 1e9:.1f} GB, is more than the card has, {known.card / 1e9:.1f} GB"
    return Calibration(
        free_bytes=round(free),
        resident_bytes=round(resident),
        cell_bytes=cell,
        assumed=assumed,
        contradiction=contradiction,
    )


def free_from_pools(
    observations: list[tuple[Observation, float]], *, resident_bytes: int
) -> int:
    """The one free-memory figure that misses two pools by the same share in opposite directions.

    observations: each with the bytes of a token at that start.
    """
    (low, low_cell), (high, high_cell) = sorted(
        observations, key=lambda pair: pair[0].fraction
    )
    low_weight, high_weight = (
        1 / (low_cell * low.tokens),
        1 / (high_cell * high.tokens),
    )
    return round(
        (2 + resident_bytes * (low_weight + high_weight))
        / (low.fraction * low_weight + high.fraction * high_weight)
    )
