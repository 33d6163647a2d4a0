# SPDX-License-Identifier: Apache-2.0
"""one_rank as two ranks with real collectives: each rank has the shapes of one rank of eight, see Scale.times."""

from __future__ import annotations

import argparse

from one_rank import __main__ as one_rank
from one_rank import results as one_rank_results
from one_rank.shapes import RANKS as RANKS_OF_KIMI
from one_rank.shapes import SCALES
from one_rank.shapes import Run as Arm

from .jobs import LAST, RANKS, TIMED, Job, Run

CONTEXTS = {"cuda": [4_096, 65_536, 185_000], "cpu": [64, 200]}
TREE = 9


def arms(device: str, *, custom: bool) -> list[tuple[Arm, int, bool]]:
    """(arm, its first GPU, whether all contexts). Upstream's own all-reduce does not depend on the context, and a small
    pool lets it stand beside the others in memory."""
    found = [
        (Arm("tree_kdtree", TREE), 0, True),
        (Arm("plain_triton", 1), 1 if device == "cuda" else 0, True),
        (Arm("tree_kdtree", TREE, RANKS), 0, True),
        (Arm("plain_triton", 1, RANKS), 0, True),
    ]
    if custom and device == "cuda":
        found.append((Arm("tree_kdtree", TREE, RANKS, True), 0, False))
    return found


def jobs(run: Run) -> list[Job]:
    scale = SCALES["full" if run.device == "cuda" else "small"]

    def work(arm: Arm, first_gpu: int, everywhere: bool) -> dict:
        contexts = run.args.contexts or CONTEXTS[run.device]
        args = argparse.Namespace(
            contexts=contexts if everywhere else contexts[:1], kv_dtype="bf16", page_size=1, steps=run.args.steps,
            limit=3.0, profile=run.device == "cuda", logs=run.logs, timeout=round(run.left()), draft_window=None,
        )  # fmt: skip
        found, reason = one_rank.measure(arm, args, scale, run.folders[stage_of(arm)], first_gpu=first_gpu)
        return {"rows": found, "reason": reason}

    return [
        Job("steps", arm.name, lambda found=(arm, gpu, everywhere): work(*found), stage_of(arm))
        for arm, gpu, everywhere in arms(run.device, custom=run.args.custom_all_reduce)
    ]


def stage_of(arm: Arm) -> int:
    """Upstream's own all-reduce measures last: should it hang, it costs no other time."""
    return LAST if arm.custom_all_reduce else TIMED


def rows(outcomes: dict[str, dict], device: str) -> list[dict]:
    found = []
    for name, outcome in outcomes.items():
        measured = [{"name": name, "ranks": 1, **row, "problems": []} for row in outcome.get("rows", ())]
        reason = outcome.get("error") or outcome.get("reason")
        if reason and measured:
            measured[-1]["problems"].append(reason)
        elif reason:
            # Upstream's own all-reduce wants peer access that a host may not give: no fault of ours.
            key = "not_available" if name.endswith("-custom") else "problems"
            measured = [{"name": name, "problems": [], key: [reason]}]
        found += measured
    return found


ROW_KEYS = one_rank_results.ROW_KEYS
SHAPES = f"each rank has the shapes of one of {RANKS_OF_KIMI} ranks of Kimi K2.6"
