# SPDX-License-Identifier: Apache-2.0
"""Where the GPU time of a step goes: the kernels of a torch profile, by kind."""

from __future__ import annotations

import collections
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# The first pattern that is found in a kernel's name decides.
KINDS: tuple[tuple[str, str], ...] = (
    ("collectives", r"nccl|all_?reduce|all_?gather|reduce_?scatter|one_?shot|two_?shot|multimem"),
    # Ahead of what is attention by its name: FlashInfer's norms are none.
    ("norms and rotary", r"norm|rotary|rope|silu|act_and_mul"),
    ("q and KV rows", r"catarray|index_elementwise|set_mla_kv|concat"),
    ("lists and masks", r"kv_indices|req_to_token|scatter|gather|index|cumsum|scan|verify_plan|mask"),
    # Upstream's kernels; in the steps of arms on kdtree_sm120 the drafter's alone.
    ("Triton attention", r"^_fwd_(grouped_)?kernel|extend_attention|decode_attention|verify_splitkv"),
    ("attention", r"mla_tree_verify|flash|attn"),
    ("tree", r"ddtree|tree_accept|kv_move|topk|sort|radix"),
    ("experts", r"moe|expert|grouped_gemm|fused_moe|align_block"),
    ("matrix products", r"gemm|cutlass|cublas|nvjet|splitk|ampere_|sm90_xmma|sm80_xmma|matmul"),
)
OTHER, IDLE, GAPS = "other", "idle", "gaps in graphs"
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MIN_REPLAY = 8  # kernels of the smallest graph that may be a target's


def kind_of(name: str) -> str:
    lowered = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lowered)), OTHER)


def kernels_of(path: Path) -> list[tuple[float, float, str]]:
    """(start, duration, name) of each kernel of a trace; microseconds, in order."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        events = json.load(file)["traceEvents"]
    return sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "kernel" and e.get("ph") == "X")


class Work(NamedTuple):
    """A kernel, a copy or a fill on the GPU; microseconds."""

    start: float
    end: float
    name: str
    launch: int | None  # the same for all that one call started: a replayed graph's


def work_of(path: Path) -> list[Work]:
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        events = json.load(file)["traceEvents"]
    return sorted(
        Work(e["ts"], e["ts"] + e["dur"], e["name"], e.get("args", {}).get("correlation"))
        for e in events if e.get("cat") in GPU_WORK and e.get("ph") == "X"
    )  # fmt: skip


def step_starts(work: list[Work]) -> list[float]:
    """Where each replay of the step's largest graph, the target's, begins; none where no graph was replayed. One that
    began before the profile did is left out. Of a captured step the rest, eager or in the drafter's graph, lies
    between two of them."""
    sizes = collections.Counter(item.launch for item in work if item.launch is not None)
    largest = max(sizes.values(), default=0)
    if largest < MIN_REPLAY:
        return []
    replays = {launch for launch, size in sizes.items() if size > 0.9 * largest}
    starts: dict[int, float] = {}
    for item in work:
        if item.launch in replays:
            starts.setdefault(item.launch, item.start)
    return sorted(starts.values())


def whole_steps(path: Path) -> int:
    """Steps of a trace between two replays of the target's graph."""
    return max(0, len(step_starts(work_of(path))) - 1)


def kernel_times(path: Path, *, steps: int, label: Callable[[str], str] = kind_of) -> dict[str, float]:
    """Microseconds a step by kind, which is ``label`` of a kernel's name; ``gaps in graphs``: between two kernels of a
    replay; ``idle``: other time that no work filled. They add up to the step's time.

    Of the steps from one replay of the target's graph to another, and so without the prefill that was still running
    when the profile began; of the whole trace over ``steps`` where there are none. A kernel may be on the GPU before
    the one ahead of it has ended, and waits for it then: that time counts for the one ahead.
    """
    work = work_of(path)
    if not work:
        return {}
    starts = step_starts(work)
    if len(starts) > 1:
        begin, end, steps = starts[0], starts[-1], len(starts) - 1
    else:
        begin, end = work[0].start, max(item.end for item in work)
    totals: dict[str, float] = collections.defaultdict(float)
    done, last = begin, None
    for item in work:
        start, stop = max(item.start, begin), min(item.end, end)
        if stop <= done:
            continue
        if start > done:
            totals[GAPS if item.launch is not None and item.launch == last else IDLE] += start - done
        totals[label(item.name)] += stop - max(start, done)
        done, last = stop, item.launch
    totals[IDLE] += end - done
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
