# SPDX-License-Identifier: Apache-2.0
"""Two ranks under churn with aborts and retractions, KV slots in runs (tier 0) and moved (tier 1). After each step both
ranks compare a checksum of their rows of req_to_token and of their free list, and a server whose ranks differ ends."""

from __future__ import annotations

import backend_churn as churn

from .jobs import RANKS, Job, Run, explained

TIERS = ("tier0", "tier1")
# A request takes 5 to 430 slots, and 16 of them run: admitted as if they were to answer little, they are retracted.
POOL, CONSERVATIVENESS = 1024, 0.05
# Requests this short, kept in the prefix cache, leave no 64 free slots next to each other in a pool this full: tier 1
# moved nothing in 2220 steps on two GPUs.
MORE = {"tier0": [], "tier1": ["--disable-radix-cache"]}


def jobs(run: Run) -> list[Job]:
    def work(tier: str) -> dict:
        args = churn.parser().parse_args([
            "--out", "unused", "--device", run.device, "--ranks", str(RANKS), "--steps", str(run.args.churn_steps),
            "--seconds", str(run.args.churn_seconds), "--clients", str(run.args.clients), "--kv-defrag", tier,
            "--pool", str(POOL), "--conservativeness", str(CONSERVATIVENESS), "--check-slots", "--shared-gpus",
            "--start-timeout", str(run.args.start_timeout), *MORE[tier],
        ])  # fmt: skip
        log = run.logs / f"churn-{tier}.log"
        with explained(log):
            return churn.run(args, log, deadline=run.start + run.args.quiet)

    return [Job("churn", tier, lambda tier=tier: work(tier)) for tier in TIERS]


def rows(outcomes: dict[str, dict], device: str) -> list[dict]:
    return [row_of(tier, outcomes[tier]) for tier in TIERS if tier in outcomes]


def row_of(tier: str, outcome: dict) -> dict:
    if "error" in outcome:
        return {"kv_defrag": tier, "problems": [outcome["error"]]}
    row = {"kv_defrag": tier, **outcome, "problems": list(outcome["problems"])}
    for kind, count in (("retraction", outcome["retractions"]), ("abort", outcome["requests"].get("abort", 0))):
        if not count:
            row["problems"].append(f"there was no {kind}: it shows nothing about one")
    return row
