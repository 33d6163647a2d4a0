# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md, as (columns, rows) of text."""

from __future__ import annotations

from typing import Any

from one_rank.shapes import ARMS
from one_rank.table import ms


def header(data: dict) -> str:
    h = data["header"]
    names = [gpu.get("name", "?") for gpu in h["gpus"]]
    connected = all(gpu.get("peer_access") for gpu in h["gpus"])
    cards = " and ".join(names) + (", each reads the other's memory" if connected else "") if names else h["device"]
    versions = ", ".join(f"{name} {version}" for name, version in h["versions"].items() if version)
    driver = h["gpus"][0].get("driver_version", "unknown") if names else "none"
    return f"{cards}, driver {driver}; {h['date'][:10]}, commit {h['commit'][:12]}. Versions: {versions}."


def steps(data: dict) -> tuple[list[str], list[list[str]]]:
    """A line for each arm and context that both numbers of ranks have."""
    rows = [row for row in data["rows"] if "context" in row]
    found = {(r["arm"], r["s_q"], r["context"], r["ranks"], r.get("custom_all_reduce", False)): r for r in rows}
    lines = []
    for (arm, s_q, context, ranks, custom), two in found.items():
        one = found.get((arm, s_q, context, 1, False))
        if ranks == 1 or one is None:
            continue
        a, b = one["ms_per_step_p50"], two["ms_per_step_p50"]
        lines.append(
            [ARMS[arm].label, f"{context:,}", "upstream's" if custom else "NCCL", ms(a), ms(b), f"{b - a:+.2f}"]
            + collective_cells(two.get("collectives"))
        )
    columns = ["arm", "context", "collectives by", "one rank, ms", "two ranks, ms", "difference, ms"]
    return [*columns, "collectives a step", "their work, ms", "waiting, rank 0, ms", "waiting, rank 1, ms"], lines


def collective_cells(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    return [f"{found['count']:g}", *(f"{us / 1e3:.2f}" for us in (found["work_us"], *found["waiting_us"]))]


def equal(data: dict) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in data["rows"]:
        compared = {report["rank"]: report for report in row.get("reports", ()) if report["part"] == "target"}
        checked = "; ".join(f"{r['rows']:,} rows, {r['mismatches']} mismatches" for _, r in sorted(compared.items()))
        sampled = row.get("sampling")
        lines.append([
            str(row["ranks"]), row["mode"], str(len(row["parted"])) if "parted" in row else "-",
            f"{row['max_logprob_difference']:.3f}" if "max_logprob_difference" in row else "-", checked or "-",
            ", ".join(f"{p:.2g}" for p in sampled["chi_square"]) if sampled else "-",
            "; ".join(row["problems"]) or "none",
        ])  # fmt: skip
    columns = ["ranks", "verify", "answers that part at a near-tie", "largest difference of log-probabilities"]
    return [*columns, "compared by rank", "sampling, p of each token", "problems"], lines


def churn(data: dict) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in data["rows"]:
        requests = row.get("requests", {})
        moved = row.get("moved_bytes")
        lines.append([
            row["kv_defrag"], f"{row['steps']:,}" if "steps" in row else "-", f"{sum(requests.values()):,}",
            f"{requests.get('abort', 0) + requests.get('leave', 0):,}", str(row.get("retractions", "-")),
            ", ".join(f"{b / 1e6:.1f}" for b in moved.values()) if moved else "-", "; ".join(row["problems"]) or "none",
        ])  # fmt: skip
    columns = ["slots", "steps", "requests", "aborted or left", "retractions", "MB moved, by rank", "problems"]
    return columns, lines


def moe(data: dict) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in data["rows"]:
        waits = (row.get("waiting") or {}).get("experts_us")
        for i, layer in enumerate(row.get("layers", ())):
            shape = row["shape"]
            lines.append([
                f"{row['model']}, {shape['num_experts_per_tok']} of {shape['n_routed_experts']}", str(layer),
                *(f"{count:.2f}" for count in row["activated"][i]), f"{row['slowest'][i]:.2f}",
                f"{waits[i]:.1f}" if waits else "-",
            ])  # fmt: skip
        if waits:
            lines.append([f"{row['model']}, all layers", "", "", "", "", f"{row['waiting']['lost_us_per_step']:.0f}"])
    return ["model, experts of a token", "layer", "rank 0", "rank 1", "slower rank", "waited for it, us"], lines
