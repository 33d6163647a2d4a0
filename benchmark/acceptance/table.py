# SPDX-License-Identifier: Apache-2.0
"""Tables of the acceptance study, in Markdown."""

from __future__ import annotations

from . import ROW_COSTS, WIDTHS


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(columns) - 1)
    return "\n".join("| " + " | ".join(r) + " |" for r in [columns, align, *rows])


def columns_of(data: dict) -> list[tuple[str, str]]:
    return [(temperature, kind) for temperature, kinds in data["walks"].items() for kind in kinds]


def acceptance_lengths(data: dict) -> str:
    """Tokens of a step / rows verified for a token, one column for each kind of text and temperature."""
    columns = columns_of(data)
    ways = ["chain", *(f"tree {w}" for w in WIDTHS), *(f"seeded {w}" for w in WIDTHS)]
    rows = []
    for way in ways:
        cells = [data["walks"][t][kind][way] for t, kind in columns]
        rows.append([way, *(f"{c['accept_length']:.2f} / {c['rows_per_token']:.1f}" for c in cells)])
    return markdown(["tokens a step / rows a token", *(f"{kind}, T = {t}" for t, kind in columns)], rows)


def acceptance_adaptive(data: dict) -> str:
    """Speed over the chain's: of the adaptive budget / of the best fixed tree, by the cost of a row."""
    columns = columns_of(data)
    rows = []
    for row_cost in ROW_COSTS:
        cells = []
        for t, kind in columns:
            speeds = {name: way["speed"][f"{row_cost:g}"] for name, way in data["walks"][t][kind].items()}
            best = max(speeds[f"tree {w}"] for w in WIDTHS)
            cells.append(f"{speeds[f'adaptive {row_cost:g}'] / speeds['chain']:.2f} / {best / speeds['chain']:.2f}")
        rows.append([f"{row_cost:.1%}", *cells])
    return markdown(["a row costs", *(f"{kind}, T = {t}" for t, kind in columns)], rows)
