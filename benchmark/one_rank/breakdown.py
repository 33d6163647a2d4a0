# SPDX-License-Identifier: Apache-2.0
"""Where the GPU time of a step goes: the kernels of a torch profile, by kind."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The first pattern that is found in a kernel's name decides.
KINDS: tuple[tuple[str, str], ...] = (
    ("collectives", r"nccl|all_?reduce|all_?gather|reduce_?scatter|one_?shot|two_?shot|multimem"),
    ("lists and masks", r"kv_indices|req_to_token|scatter|gather|index|cumsum|scan|verify_plan|mask"),
    # Upstream's kernel of several rows a request; in the steps of arms on kdtree_sm120 the drafter's alone.
    ("extend attention", r"^_fwd_kernel|extend_attention"),
    ("attention", r"mla_tree_verify|_fwd_grouped|decode_attention|_stage[12]|flash|attn"),
    ("tree", r"ddtree|tree_accept|kv_move|topk|sort|radix"),
    ("experts", r"moe|expert|grouped_gemm|fused_moe|align_block"),
    ("matrix products", r"gemm|cutlass|cublas|nvjet|splitk|ampere_|sm90_xmma|sm80_xmma|matmul"),
    ("norms and rotary", r"norm|rotary|rope|silu|act_and_mul"),
)
OTHER = "other"


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lowered)), OTHER)


def kernels_of(path: Path) -> list[tuple[float, float, str]]:
    """(start, duration, name) of each kernel of a trace; microseconds, in order."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        events = json.load(file)["traceEvents"]
    return sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "kernel" and e.get("ph") == "X")


def kernel_times(traces: Iterable[Path], *, steps: int) -> dict[str, float]:
    """Microseconds a step by kind, and ``idle``: the time between the first and the last kernel that none filled."""
    spans = [span for path in traces for span in kernels_of(path)]
    totals: dict[str, float] = {}
    for _, duration, name in spans:
        kind = kind_of(name)
        totals[kind] = totals.get(kind, 0.0) + duration
    if spans:
        busy = covered(spans)
        totals["idle"] = max(s + d for s, d, _ in spans) - min(s for s, _, _ in spans) - busy
    return {kind: round(total / steps, 2) for kind, total in sorted(totals.items())}


def collective_times(traces: list[Path], *, steps: int) -> dict[str, Any]:
    """What the collectives of a step take, from one trace a rank.

    A collective's kernel runs on a rank from its arrival until all have arrived and the data is there, so its shortest
    time over the ranks is the work, and what is above that on a rank is that rank's waiting for the others. Ranks run
    the same collectives in the same order; a profile begins in the middle of a step and ends behind one, so they are
    matched from the end. -> count a step; busy_us a step by rank; work_us a step; waiting_us a step by rank;
    kinds: name of the kernel -> [count, work_us] a step; order: the names of a step's collectives, and waiting_each_us:
    the mean over steps of what the first to arrive at each waited, both None where not all steps were seen whole.
    ValueError where the ranks did not run the same.
    """
    ranks = [[span for span in kernels_of(path) if kind_of(span[2]) == "collectives"] for path in traces]
    count = min(map(len, ranks))
    if not count:
        raise ValueError("a rank ran no collective")
    # What is left out is a part of one step.
    if max(map(len, ranks)) - count > count / steps:
        raise ValueError(f"the ranks ran {', '.join(str(len(spans)) for spans in ranks)} collectives")
    ranks = [spans[-count:] for spans in ranks]
    kinds: dict[str, list[float]] = {}
    work = [0.0] * count
    for i, spans in enumerate(zip(*ranks, strict=True)):
        if len({name for _, _, name in spans}) != 1:
            raise ValueError(f"collective {i} is {' and '.join(name for _, _, name in spans)}")
        work[i] = min(duration for _, duration, _ in spans)
        kind = kinds.setdefault(spans[0][2], [0, 0.0])
        kind[0] += 1
        kind[1] += work[i]
    busy = [sum(duration for _, duration, _ in spans) for spans in ranks]
    order = each = None
    a_step, rest = divmod(count, steps)
    names = [name for _, _, name in ranks[0]]
    if not rest and names == names[:a_step] * steps:
        waits = [
            max(duration for _, duration, _ in spans) - work[i] for i, spans in enumerate(zip(*ranks, strict=True))
        ]
        order, each = names[:a_step], [round(sum(waits[place::a_step]) / steps, 2) for place in range(a_step)]
    return {
        "count": round(count / steps, 2),
        "busy_us": [round(total / steps, 2) for total in busy],
        "work_us": round(sum(work) / steps, 2),
        "waiting_us": [round((total - sum(work)) / steps, 2) for total in busy],
        "kinds": {name: [round(n / steps, 2), round(us / steps, 2)] for name, (n, us) in sorted(kinds.items())},
        "order": order,
        "waiting_each_us": each,
    }


def covered(spans: list[tuple[float, float, str]]) -> float:
    """Length of the union; kernels of two streams overlap."""
    total, end = 0.0, float("-inf")
    for start, duration, _ in sorted(spans):
        total += max(0.0, start + duration - max(end, start))
        end = max(end, start + duration)
    return total
