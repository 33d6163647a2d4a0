# SPDX-License-Identifier: Apache-2.0
"""Solve the pool equation for what observed pools say about a machine.

Two observations (f1, n1), (f2, n2) of tokens = (P f - R) / c fix two of P, R, c. The slope gives
P / c and the intercept R / c, so the third has to be assumed: c from the formula, P from the
card, or R from the weights. All three are reported; one that contradicts a known fact (less
resident than the weights, more free than the card has) is not used.
"""

from __future__ import annotations

import re

import msgspec

from sglang.kdtree.errors import KitError


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    fraction: float
    tokens: int


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    free_bytes: int
    resident_bytes: int
    cell_bytes: float
    assumed: str  # "cell", "free", "resident" or "none": what was not solved for
    contradiction: str  # empty if there is none


def parse_observation(text: str) -> Observation:
    match = re.fullmatch(r"(0?\.\d+|1(?:\.0*)?):(\d+)", text)
    if not match or not 0 < float(match[1]) <= 1 or int(match[2]) == 0:
        raise KitError(
            what="--observed",
            expected="FRACTION:TOKENS, for example 0.85:101134",
            got=repr(text),
            remedy="Take both from one server log: --mem-fraction-static and max_total_num_tokens.",
        )
    return Observation(fraction=float(match[1]), tokens=int(match[2]))


def slope_and_intercept(first: Observation, second: Observation) -> tuple[float, float]:
    """P / c and R / c."""
    if first.fraction == second.fraction:
        raise KitError(
            what="--observed",
            expected="two observations at different fractions",
            got=f"{first.fraction} twice",
            remedy="Observe the pool at another --mem-fraction-static.",
        )
    slope = (second.tokens - first.tokens) / (second.fraction - first.fraction)
    return slope, slope * first.fraction - first.tokens


def with_cell(
    first: Observation, second: Observation, *, cell_bytes: float, weight_bytes: int
) -> Calibration:
    slope, intercept = slope_and_intercept(first, second)
    resident = round(intercept * cell_bytes)
    contradiction = ""
    if resident < weight_bytes:
        contradiction = (
            f"the solved resident memory, {resident / 1e9:.1f} GB, is less than the weights alone, "
            f"{weight_bytes / 1e9:.1f} GB: a token costs more than {cell_bytes:,.0f} B on this machine"
        )
    return Calibration(
        free_bytes=round(slope * cell_bytes),
        resident_bytes=resident,
        cell_bytes=cell_bytes,
        assumed="cell",
        contradiction=contradiction,
    )


def with_free(
    first: Observation, second: Observation, *, free_bytes: int, weight_bytes: int
) -> Calibration:
    slope, intercept = slope_and_intercept(first, second)
    cell = free_bytes / slope
    resident = round(intercept * cell)
    contradiction = ""
    if resident < weight_bytes:
        contradiction = (
            f"the solved resident memory, {resident / 1e9:.1f} GB, is less than the weights alone, "
            f"{weight_bytes / 1e9:.1f} GB"
        )
    return Calibration(
        free_bytes=free_bytes,
        resident_bytes=resident,
        cell_bytes=cell,
        assumed="free",
        contradiction=contradiction,
    )


def with_resident(
    first: Observation, second: Observation, *, resident_bytes: int, card_bytes: int
) -> Calibration:
    slope, intercept = slope_and_intercept(first, second)
    cell = resident_bytes / intercept
    free = round(slope * cell)
    contradiction = ""
    if free > card_bytes:
        contradiction = f"the solved free memory, {free / 1e9:.1f} GB, is more than the card has, {card_bytes / 1e9:.1f} GB"
    return Calibration(
        free_bytes=free,
        resident_bytes=resident_bytes,
        cell_bytes=cell,
        assumed="resident",
        contradiction=contradiction,
    )


def with_one(
    observation: Observation, *, free_bytes: int, cell_bytes: float
) -> Calibration:
    """One observation fixes the resident memory."""
    resident = round(
        free_bytes * observation.fraction - observation.tokens * cell_bytes
    )
    return Calibration(
        free_bytes=free_bytes,
        resident_bytes=resident,
        cell_bytes=cell_bytes,
        assumed="none",
        contradiction="",
    )


def free_from_pools(
    observations: list[Observation], *, resident_bytes: int, cell_bytes: float
) -> int:
    """The one free-memory figure that puts the largest relative error of all pools at its least.

    The first and the last pool err by the same share in opposite directions.
    """
    low, high = (
        min(observations, key=lambda o: o.fraction),
        max(observations, key=lambda o: o.fraction),
    )
    weight_low, weight_high = (
        1 / (cell_bytes * low.tokens),
        1 / (cell_bytes * high.tokens),
    )
    return round(
        (2 + resident_bytes * (weight_low + weight_high))
        / (low.fraction * weight_low + high.fraction * weight_high)
    )
