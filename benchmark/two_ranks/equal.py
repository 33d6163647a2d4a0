# SPDX-License-Identifier: Apache-2.0
"""The small model on one rank and on two: greedy answers by backend_e2e's rule, sampled ones by their distribution,
validate mode's counters of each rank.

The rule for sampling, made before any run: at temperature 1 and with independent seeds, each token that a verification
drew comes from the same distribution, by a chi-square test at LEVEL. On a CPU, in float32, answers with the same seed
are also the same, token for token.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import backend_e2e as e2e

from .jobs import RANKS, Job, Run

LEVEL = 1e-3
FIRST_SEEDS = {1: 8_000_000, RANKS: 9_000_000}
ONE = e2e.Run("DDTREE", backend="kdtree_sm120", mode="on")
TWO = dataclasses.replace(ONE, ranks=RANKS)
VALIDATE = dataclasses.replace(TWO, mode="validate")
RUNS = (ONE, TWO, VALIDATE)


def jobs(run: Run) -> list[Job]:
    def work(of: e2e.Run):
        args = argparse.Namespace(device=run.device, logs=run.logs, timeout=round(run.quiet_left()))
        sampling = FIRST_SEEDS[of.ranks] if of.mode == "on" else None
        more = e2e.START_SOON if run.device == "cuda" else None
        return e2e.execute(of, args, run.folder, sampling=sampling, more=more)

    return [Job("equal", of.name, lambda of=of: work(of)) for of in RUNS]


def rows(outcomes: dict[str, dict], device: str) -> list[dict]:
    """Of the jobs that have ended; one that ended without an outcome is a row with its error."""
    nothing = {"result": None, "reports": [], "started": []}
    done = {of: {"run": of, **nothing, **outcomes[of.name]} for of in RUNS if of.name in outcomes}
    return [row_of(done, of) for of in done]


def row_of(done: dict[e2e.Run, dict], of: e2e.Run) -> dict:
    row = e2e.judge(done, of, reference=of == ONE)
    if not row["problems"] and of == TWO:
        mine, one = done[TWO]["result"], done[ONE]["result"]
        row["sampling"] = sampling(one, mine)
        row["problems"] += sampling_problems(row["sampling"])
    return row


def sampling(one: dict, two: dict) -> dict:
    """-> chi_square: p of each place behind the first token, which the prefill draws; tokens: how many different ones
    were seen there; seeded: on a CPU, [answers that are the same, answers]"""
    from e2e.distributions import chi_square_p, contingency

    places = range(1, len(one["sampled"][0]))
    tables = [contingency(*([answer[place] for answer in of["sampled"]] for of in (two, one))) for place in places]
    found = {
        "samples": len(two["sampled"]),
        "chi_square": [chi_square_p(table) for table in tables],
        "tokens": [len(table) for table in tables],
    }
    if "seeded" in two:
        same = sum(a == b for a, b in zip(one["seeded"], two["seeded"], strict=True))
        found["seeded"] = [same, len(two["seeded"])]
    return found


def sampling_problems(found: dict[str, Any]) -> list[str]:
    problems = []
    for place, (p, tokens) in enumerate(zip(found["chi_square"], found["tokens"], strict=True), start=1):
        if tokens < 4:
            problems.append(f"sampling: {tokens} tokens have all the probability at place {place}: it shows nothing")
        elif not p > LEVEL:
            problems.append(f"sampling: the distributions of token {place} differ, p {p:.1e}")
    same, count = found.get("seeded", (0, 0))
    if same != count:
        problems.append(f"sampling: {count - same} of {count} seeded answers differ")
    return problems
