# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kv-defrag.md: python -m kv_churn.table churn.json"""

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


if __name__ == "__main__":
    result = json.loads(Path(sys.argv[1]).read_text())
    print(contiguity_table(result), cost_table(result), sep="\n\n")
