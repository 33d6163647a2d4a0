# SPDX-License-Identifier: Apache-2.0
"""Where the GPU time of a step goes: the kernels of a torch profile, by kind."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path

# The first pattern that is found in a kernel's name decides.
KINDS: tuple[tuple[str, str], ...] = (
    ("lists and masks", r"kv_indices|req_to_token|scatter|gather|index|cumsum|scan|verify_plan|mask"),
    ("attention", r"mla_tree_verify|_fwd_kernel|_fwd_grouped|decode_attention|extend_attention|_stage[12]|flash|attn"),
    ("tree", r"ddtree|tree_accept|kv_move|topk|sort|radix"),
    ("experts", r"moe|expert|grouped_gemm|fused_moe|align_block"),
    ("matrix products", r"gemm|cutlass|cublas|nvjet|splitk|ampere_|sm90_xmma|sm80_xmma|matmul"),
    ("norms and rotary", r"norm|rotary|rope|silu|act_and_mul"),
)
OTHER = "other"


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lowered)), OTHER)


def kernel_times(traces: Iterable[Path], *, steps: int) -> dict[str, float]:
    """Microseconds a step by kind, and ``idle``: the time between the first and the last kernel that none filled."""
    spans: list[tuple[float, float, str]] = []
    for path in traces:
        opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
        with opened as file:
            events = json.load(file)["traceEvents"]
        spans += [(e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "kernel" and e.get("ph") == "X"]
    totals: dict[str, float] = {}
    for _, duration, name in spans:
        kind = kind_of(name)
        totals[kind] = totals.get(kind, 0.0) + duration
    if spans:
        busy = covered(spans)
        totals["idle"] = max(s + d for s, d, _ in spans) - min(s for s, _, _ in spans) - busy
    return {kind: round(total / steps, 2) for kind, total in sorted(totals.items())}


def covered(spans: list[tuple[float, float, str]]) -> float:
    """Length of the union; kernels of two streams overlap."""
    total, end = 0.0, float("-inf")
    for start, duration, _ in sorted(spans):
        total += max(0.0, start + duration - max(end, start))
        end = max(end, start + duration)
    return total
