# SPDX-License-Identifier: Apache-2.0
"""The result as a terminal table: rich when it is installed, aligned text otherwise."""

from __future__ import annotations

import math

from .results import shape_of

COLUMNS = ("shape", "arm", "us p20", "p50", "p80", "GB/s", "% copy", "TFLOP/s", "% MMA", "error", "vs ours")


def by_shape(rows: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for r in rows:
        groups.setdefault(str(shape_of(r)), []).append(r)
    return groups


def _percent(value: float, ceiling: float | None) -> str:
    return f"{100 * value / ceiling:.1f}" if ceiling else "-"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def cells(data: dict) -> list[tuple[str, ...]]:
    ceilings = data["header"]["ceilings"]
    copy, mma = ceilings.get("copy_gbps"), ceilings.get("mma_tflops")
    out = []
    for shape, rows in by_shape(data["rows"]).items():
        ours = next((r["us_p50"] for r in rows if r["arm"] == "ours"), None)
        for i, r in enumerate(rows):
            ratio = f"{r['us_p50'] / ours:.2f}x" if ours else "-"
            out.append(
                (
                    shape if i == 0 else "",
                    r["arm"],
                    _us(r["us_p20"]),
                    _us(r["us_p50"]),
                    _us(r["us_p80"]),
                    f"{r['gbps']:,.0f}",
                    _percent(r["gbps"], copy),
                    f"{r['tflops']:.1f}",
                    _percent(r["tflops"], mma),
                    f"{r['error']:.1e}",
                    ratio,
                )
            )
    return out


def geomeans(rows: list[dict]) -> dict[str, tuple[float, int]]:
    """arm -> (geometric mean of its time over ours, shapes that both ran)."""
    ratios: dict[str, list[float]] = {}
    for group in by_shape(rows).values():
        ours = next((r["us_p50"] for r in group if r["arm"] == "ours"), None)
        for r in group:
            if ours and r["arm"] != "ours":
                ratios.setdefault(r["arm"], []).append(r["us_p50"] / ours)
    return {arm: (math.exp(sum(map(math.log, v)) / len(v)), len(v)) for arm, v in ratios.items()}


def heading(data: dict) -> str:
    h = data["header"]
    c = h["ceilings"]
    gpu = h["gpu"]["name"] if h["gpu"] else h["device"]
    parts = [gpu, f"commit {h['commit'][:12]}", f"torch {h['versions']['torch']}"]
    if c.get("copy_gbps"):
        parts.append(f"copy {c['copy_gbps']:,.0f} GB/s")
    if c.get("mma_tflops"):
        parts.append(f"mma.sync {c['mma_tflops']:,.0f} TFLOP/s")
    return ", ".join(parts)


def show(data: dict) -> None:
    rows = cells(data)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(r[i]) for r in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
        print(heading(data))
        for r in [COLUMNS, *rows]:
            padded = [r[i].ljust(w) if i < 2 else r[i].rjust(w) for i, w in enumerate(widths)]
            print("  ".join(padded).rstrip())
    else:
        table = Table(title=heading(data), title_justify="left")
        for i, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
        for i, r in enumerate(rows):
            table.add_row(
                *r, end_section=i + 1 < len(rows) and rows[i + 1][0] != "", style="bold" if r[1] == "ours" else None
            )
        Console(width=170).print(table)
    for arm, (ratio, count) in geomeans(data["rows"]).items():
        print(f"geomean {arm} / ours: {ratio:.2f}x over {count} shapes")


def show_missing(data: dict) -> None:
    for m in data["not_available"]:
        print(f"not available: {m['arm']}: {m['reason']} ({len(m['shapes'])} shape{'s' * (len(m['shapes']) > 1)})")
