# SPDX-License-Identifier: Apache-2.0
"""Tables of the acceptance study, in Markdown."""

from __future__ import annotations

import statistics

from . import ROW_COSTS, WIDTHS
from .arm import ARMS


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


# What is behind a temperature and a kind in the engine's tables.
LABELS = {"dflash": "chain (DFLASH)", "chain": "chain (DDTREE)", "auto": "auto"}


def engine_rows(data: dict, batch: int) -> dict[str, dict[tuple[str, str], dict]]:
    """arm -> (temperature, kind) -> row, in the order of ARMS: the file has them as their Engines started"""
    found: dict[str, dict[tuple[str, str], dict]] = {}
    for row in sorted(data["rows"], key=lambda row: ARMS.index(row["arm"])):
        if row["batch"] == batch:
            found.setdefault(row["arm"], {})[row["temperature"], row["kind"]] = row
    return found


def engine_columns(rows: dict[str, dict[tuple[str, str], dict]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(column for cells in rows.values() for column in cells))


def engine_header(data: dict) -> str:
    h = data["header"]
    gpu = h["gpu"] or {}
    rounds = max(row["rounds"] for row in data["rows"])
    layers = f", a target of {h['layers']} layers" if h.get("layers") else ""
    return (
        f"{gpu.get('name', h['device'])}; {h['date'][:10]}, commit {h['commit'][:12]}; torch {h['versions']['torch']}; "
        f"{h['tokens']} tokens an answer, up to {rounds} rounds{layers}."
    )


def engine_acceptance(data: dict) -> str:
    """Tokens of a step / rows verified for a token, one request at a time."""
    rows = engine_rows(data, batch=1)
    columns, lines = engine_columns(rows), []
    for arm, cells in rows.items():
        found = (cells.get(column) for column in columns)
        line = [f"{c['accept_length']:.2f} / {c['rows_per_token']:.1f}" if c else "-" for c in found]
        lines.append([LABELS.get(arm, arm), *line])
    return markdown(["tokens a step / rows a token", *(f"{kind}, T = {t}" for t, kind in columns)], lines)


def engine_speeds(data: dict) -> str:
    """Tokens a second, and against upstream's chain: the median of the rounds, of speeds and of ratios each."""
    by_batch = {batch: engine_rows(data, batch) for batch in sorted({row["batch"] for row in data["rows"]})}
    columns = [(b, column) for b, rows in by_batch.items() for column in engine_columns(rows) if column[0] == "0"]
    lines = [
        [LABELS.get(arm, arm), *(speed_cell(by_batch[b].get(arm, {}).get(column)) for b, column in columns)]
        for arm in dict.fromkeys(arm for rows in by_batch.values() for arm in rows)
    ]
    return markdown(["tokens/s, x chain (DFLASH)", *(f"{kind}, {b} at once" for b, (_, kind) in columns)], lines)


def speed_cell(row: dict | None) -> str:
    if row is None:
        return "-"
    ratio = row.get("over_dflash")
    return f"{statistics.median(row['tok_s']):,.0f}" + (f", {ratio[1]:.2f}x" if ratio else "")


def engine_against_chain(data: dict) -> str:
    """The adaptive budget over upstream's chain: the lowest, the median and the highest ratio of the rounds, at each
    temperature where both run; and over the chain that DDTREE verifies."""
    lines = []
    for row in data["rows"]:
        if row["arm"] != "auto":
            continue
        cells = [
            " / ".join(f"{ratio:.3f}" for ratio in row[key]) if key in row else "-"
            for key in ("over_dflash", "over_chain")
        ]
        lines.append([f"{row['kind']}, T = {row['temperature']}, {row['batch']} at once", str(row["rounds"]), *cells])
    return markdown(["auto", "rounds", "over chain (DFLASH): lowest / median / highest", "over chain (DDTREE)"], lines)


def engine_paired(data: dict) -> str:
    """Each arm over upstream's chain, of a paired run."""
    chains = {(row["temperature"], row["kind"], row["batch"]): row for row in data["rows"] if row["arm"] == "dflash"}
    lines = []
    for row in data["rows"]:
        chain = chains.get((row["temperature"], row["kind"], row["batch"]))
        if chain is None or chain is row:
            continue
        low, high = row["over_dflash_interval"]
        interval = f" ({low:.3f} to {high:.3f})" if row["rounds"] > 1 else ""
        lines.append([
            f"{row['kind']}, T = {row['temperature']}, {row['batch']} at once",
            LABELS.get(row["arm"], row["arm"]),
            *(f"{chain[key]:.2f} -> {row[key]:.2f}" for key in ("accept_length", "least_step_ms")),
            f"{row['over_dflash'][1]:.3f}{interval}",
            f"{row['over_dflash_least']:.3f}",
            *([f"{row['over_dflash_same_text']:.3f}"] if "over_dflash_same_text" in row else []),
        ])  # fmt: skip
    columns = ["over chain (DFLASH)", "", "tokens a step", "least ms a step", "median of rounds (95 %)", "of the least"]
    return markdown([*columns, "on the same text"][: len(lines[0])] if lines else columns, lines)


def engine_ways(data: dict) -> str:
    """The answers of Engines, walked in every way."""
    return acceptance_lengths({"walks": data["ways"]})


def engine_adaptive(data: dict) -> str:
    """The same walk's adaptive budget against the chain, by what a row costs."""
    return acceptance_adaptive({"walks": data["ways"]})


def commit_length_header(data: dict) -> str:
    h = data["header"]
    servers = [run["server"] for run in data["runs"].values()]
    same = {key: " and ".join(dict.fromkeys(str(server[key]) for server in servers)) for key in servers[0]}
    verdicts = ", ".join(f"`{run['verdict']['name']}` of {name}" for name, run in data["runs"].items())
    return (
        f"{h['gpu']}; commit {h['commit'][:12]}; torch {h['torch']}; {same['speculative_algorithm']} of "
        f"{same['num_draft_tokens']} nodes on {same['attention_backend']}, {same['model']}, a context of "
        f"{same['max_model_len']} tokens. Verdicts: {verdicts}."
    )


def commit_length(data: dict) -> str:
    """Tokens a step over context, and those of a chain, one column for each run and kind of text."""
    cells = {
        (name, point["text"], point["context"]): f"{point['commit_length']:.2f} / {point['chain_length']:.2f}"
        for name, run in data["runs"].items()
        for point in run["points"]
    }
    columns = list(dict.fromkeys((name, text) for name, text, _ in cells))
    rows = [
        [f"{context:,}", *(cells.get((*column, context), "-") for column in columns)]
        for context in sorted({context for _, _, context in cells})
    ]
    return markdown(["context", *(f"{text}, {name}" for name, text in columns)], rows)
