# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kv-defrag.md: python -m kv_churn.table churn.json [kv_layout.json]"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def contiguity_table(result: dict) -> str:
    lines = [
        "| mix | allocator | runs per 1,000 tokens | longest run | whole 64-token blocks "
        "| prompt tokens cached | slots moved per token | CPU us per step | CPU ms per request |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        lines.append(
            f"| {row['mix']} | {row['mode']} | {row['runs_per_1k_tokens']:.0f} "
            f"| {row['longest_run']:.0f} | {100 * row['contiguous_block_share']:.0f} % "
            f"| {100 * row['cached_share']:.1f} % "
            f"| {row['slots_moved_per_generated_token']:.2f} | {row['cpu_us_per_step']:.0f} "
            f"| {1000 * row['cpu_seconds'] / row['requests']:.2f} |"
        )
    return "\n".join(lines)


def cost_table(result: dict) -> str:
    lines = [
        "| free slots | of these freed before | upstream | need_sort | tier0 "
        "| need_sort / upstream | tier0 / upstream |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["alloc_free_pair"]:
        lines.append(
            f"| {row['free_slots']:,} | {row['released_before']:,} | {row['upstream_us']:.0f} us "
            f"| {row['need_sort_us']:.0f} us | {row['tier0_us']:.0f} us "
            f"| {row['need_sort_to_upstream']:.3f} | {row['tier0_to_upstream']:.3f} |"
        )
    return "\n".join(lines)


LAYOUTS = {"contiguous": "one run", "runs64": "runs of 64", "runs16": "runs of 16", "scattered": "each anywhere"}


def layout_groups(result: dict) -> list[dict[tuple[str, int], dict]]:
    """Of each pool and shape: (layout, promised page size) -> row."""
    groups: dict[tuple, dict] = {}
    for row in result["rows"]:
        if row["kind"] == "verify":
            key = (row["kv_dtype"], tuple(row["prefixes"]), row["pool"])
            groups.setdefault(key, {})[row["layout"], row["page_size"]] = row
    return list(groups.values())


def layout_table(result: dict) -> str:
    lines = [
        f"| KV, requests x tokens, pool | {' | '.join(LAYOUTS.values())} | each anywhere / one run "
        "| one run, whole pages of 64 | rounds of one layout differ by up to |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in layout_groups(result):
        row = rows["contiguous", 1]
        size = row["pool_bytes"] / 1e9
        times = [rows[layout, 1]["us_p50"] for layout in LAYOUTS]
        rounds = [rows[layout, 1]["us_p50_of_rounds"] for layout in LAYOUTS]
        apart = max(max(r) / min(r) - 1 for r in rounds)
        lines.append(
            f"| {row['kv_dtype']}, {row['bs']} x {row['prefix']:,}, {size:{'.0f' if size > 10 else '.1f'}} GB "
            f"| {' | '.join(f'{us:.1f}' for us in times)} | {times[-1] / times[0]:.3f} "
            f"| {rows['contiguous', 64]['us_p50']:.1f} | {100 * apart:.1f} % |"
        )
    return "\n".join(lines)


def move_table(result: dict) -> str:
    lines = [
        "| KV, requests x tokens | slots moved | the copy alone | read and written | a step of 61 calls "
        "| with the copy beside it | longer by |",
        "|---|---|---|---|---|---|---|",
    ]
    moves = [row for row in result["rows"] if row["kind"] == "move"]
    shapes = [rows["contiguous", 1] for rows in layout_groups(result) if rows["contiguous", 1]["pool"] == "large"]
    for shape, alone, beside in zip(shapes, moves[::2], moves[1::2], strict=True):
        before, after = beside["step_us_without"], beside["step_us_with"]
        lines.append(
            f"| {shape['kv_dtype']}, {shape['bs']} x {shape['prefix']:,} "
            f"| {alone['slots']:,} | {alone['us_p50']:.0f} us "
            f"| {alone['gbps']:,.0f} GB/s | {before:,.0f} us | {after:,.0f} us | {after - before:.0f} us |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    churn, *layout = (json.loads(Path(path).read_text()) for path in sys.argv[1:])
    tables = [contiguity_table(churn), cost_table(churn)]
    for result in layout:
        tables += [layout_table(result), move_table(result)]
    print(*tables, sep="\n\n")
