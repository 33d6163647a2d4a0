# SPDX-License-Identifier: Apache-2.0
"""Tokens committed per verify step against context, on predictable and on novel text, with a verdict.

A low accept length on hard text says nothing about the drafter: only the predictable phrase
tells a drafter that lost its context from one that met a text nobody could guess.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang.kdtree.bench.client import Client, Reply, add_server_arguments, client_from
from sglang.kdtree.bench.longctx import (
    add_contexts_argument,
    choose_contexts,
    one_prompt,
)
from sglang.kdtree.bench.text import PHRASE, words
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError, require_at_least
from sglang.kdtree.result import Result, new_table

DEFAULT_CONTEXTS = (1_000, 16_000, 64_000, 128_000)
# Thresholds of the verdict, chosen on a drafter in order: Kimi K2.6's on 8 x RTX PRO 6000 committed
# 7.0 to 7.9 tokens a step on the phrase at every context, and 1.0 on novel prose.
FOLLOWS_PHRASE = 0.8  # share of the answer that continues the phrase
ACCEPTED_PHRASE = 2.0  # tokens a step below which even the phrase was not guessed
KEPT_SHARE = 0.6  # of the accept length at the shortest context
HARD_TEXT = 1.5
VERDICTS = (
    "healthy text-too-hard drafter-loses-context drafter-or-bug inconclusive".split()
)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    context: int
    prompt_tokens: int
    steps: int
    commit_length: float  # tokens a step, the bonus token included
    accepted_drafts: float | None  # drafts accepted a step, "depth"
    proposed_drafts: float | None
    histogram: list[int] | None  # steps by number of accepted drafts
    follows_phrase: float | None
    # What a chain over the same drafts would have committed, at least; DDTREE tells the ratio.
    chain_length: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of VERDICTS
    is_finding: bool
    reasoning: str
    remedy: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add = parser.add_argument
    add_contexts_argument(parser, DEFAULT_CONTEXTS)
    add(
        "--novel",
        choices=("prose", "code"),
        default="prose",
        help="the text that is not predictable",
    )
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace, console: Any) -> Result:
    require_at_least("--output-tokens", args.output_tokens, 16)
    client = client_from(args, os.environ)
    facts = client.facts()
    if facts.engine == "sglang" and not facts.speculative_algorithm:
        raise KitError(
            what=f"{facts.url}/server_info: speculative_algorithm",
            expected="a server that speculates",
            got="none",
            remedy="Start it with --speculative-algorithm DDTREE and --speculative-draft-model-path DRAFT.",
        )
    measured, skipped = choose_contexts(
        args.contexts, facts, DEFAULT_CONTEXTS, args.output_tokens
    )
    points = [
        point
        for kind in ("phrase", args.novel)
        for point in probe(client, kind, measured, args, console)
    ]
    verdict = judge(points)
    data = {
        "server": facts.public(),
        "skipped_contexts": skipped,
        "points": [msgspec.to_builtins(point) for point in points],
        "verdict": msgspec.to_builtins(verdict),
    }
    return Result(
        verb="probe-commit-length",
        data=data,
        exit_code=EXIT_FINDING if verdict.is_finding else EXIT_OK,
    )


def probe(
    client: Client, kind: str, contexts: Sequence[int], args, console
) -> list[Point]:
    points = []
    for context in contexts:
        with console.status(f"{kind} at {context:,} tokens"):
            reply = client.stream(
                one_prompt(client, kind, context, seed=args.seed),
                max_tokens=args.output_tokens,
                temperature=0.0,
            )
        points.append(point_from(reply, kind=kind, context=context))
    return points


def point_from(reply: Reply, *, kind: str, context: int) -> Point:
    steps = reply.verify_steps or (len(reply.events) - 1)
    if steps < 1 or not reply.completion_tokens:
        raise KitError(
            what="the server's stream",
            expected="at least one step after the first token",
            got=f"{len(reply.events)} messages, {reply.completion_tokens} tokens",
            remedy="Ask for more --output-tokens.",
        )
    first = reply.events[0].completion_tokens or 1
    histogram = reply.meta.get("spec_correct_drafts_histogram")
    correct, proposed = (
        reply.meta.get("spec_num_correct_drafts"),
        reply.meta.get("spec_num_proposed_drafts"),
    )
    commit_length = (reply.completion_tokens - first) / steps
    return Point(
        text=kind,
        context=context,
        prompt_tokens=reply.prompt_tokens or 0,
        steps=steps,
        commit_length=commit_length,
        accepted_drafts=None if correct is None else correct / steps,
        proposed_drafts=None if proposed is None else proposed / steps,
        histogram=histogram,
        follows_phrase=phrase_share(reply.text) if kind == "phrase" else None,
        chain_length=chain_length(reply.meta, commit_length),
    )


def chain_length(meta: dict[str, Any], commit_length: float) -> float | None:
    """From the totals that DDTREE leaves with a finished request's last token.

    They count what the last step committed beyond the end of the request, for tree and chain alike.
    """
    values = meta.get("ddtree")
    totals = values[-1] if isinstance(values, list) and values else None
    if not isinstance(totals, dict) or not totals.get("tree_tokens"):
        return None
    return commit_length * totals["chain_tokens"] / totals["tree_tokens"]


def phrase_share(text: str) -> float:
    """Share of the answer's words that continue the repeated phrase, at the best alignment."""
    cycle, found = words(PHRASE), words(text)
    if not found:
        return 0.0
    best = max(
        sum(
            word == cycle[(offset + index) % len(cycle)]
            for index, word in enumerate(found)
        )
        for offset in range(len(cycle))
    )
    return best / len(found)


def judge(points: Sequence[Point]) -> Verdict:
    phrase = sorted((p for p in points if p.text == "phrase"), key=lambda p: p.context)
    novel = [p for p in points if p.text != "phrase"]
    shortest = phrase[0]
    lost = [p for p in phrase if p.commit_length < KEPT_SHARE * shortest.commit_length]
    strayed = [p for p in phrase if (p.follows_phrase or 0) < FOLLOWS_PHRASE]
    if strayed:
        where = ", ".join(f"{p.context:,}" for p in strayed)
        return Verdict(
            name="inconclusive",
            is_finding=True,
            reasoning=f"The target itself does not continue the phrase at {where} tokens, so its answer there is not predictable.",
            remedy="Probe with a model that follows a repeated phrase, at contexts it was trained for.",
        )
    if shortest.commit_length < ACCEPTED_PHRASE:
        return Verdict(
            name="drafter-or-bug",
            is_finding=True,
            reasoning=f"Even the repeated phrase commits only {shortest.commit_length:.2f} tokens a step at {shortest.context:,} tokens.",
            remedy="Wrong drafter for this target (layers, mask token, checkpoint), or the tree is verified as a chain: "
            "check the drafter's config and run probe verify.",
        )
    if lost:
        where = ", ".join(f"{p.context:,} ({p.commit_length:.2f})" for p in lost)
        return Verdict(
            name="drafter-loses-context",
            is_finding=True,
            reasoning=f"The phrase commits {shortest.commit_length:.2f} tokens a step at {shortest.context:,} tokens, but less than "
            f"{KEPT_SHARE:.0%} of that at {where}.",
            remedy="The drafter's sliding window or its YaRN scaling is not active at this length: see "
            "--speculative-draft-window-size and the rope settings of the drafter's config.",
        )
    lengths = [p.commit_length for p in phrase]
    works = f"The phrase commits {min(lengths):.2f} to {max(lengths):.2f} tokens a step at every context: drafter, window and rope scaling work."
    if novel and max(p.commit_length for p in novel) < HARD_TEXT:
        worst = max(p.commit_length for p in novel)
        return Verdict(
            name="text-too-hard",
            is_finding=False,
            reasoning=f"{works} The novel text commits at most {worst:.2f}: nobody guesses it.",
            remedy="Nothing to mend here: a drafter trained on such text, or a smaller tree, would serve it better.",
        )
    return Verdict(
        name="healthy", is_finding=False, reasoning=works, remedy="Nothing to mend."
    )


def render(result: Result, console: Any) -> None:
    data = result.data
    table = new_table(
        "text|context|steps|commit length|as a chain|accepted drafts|of proposed",
        title="Tokens committed per verify step",
    )
    for point in data["points"]:
        table.add_row(
            point["text"],
            f"{point['prompt_tokens']:,}",
            str(point["steps"]),
            f"{point['commit_length']:.2f}",
            *[
                "-" if point[key] is None else f"{point[key]:.2f}"
                for key in ("chain_length", "accepted_drafts", "proposed_drafts")
            ],
        )
    console.print(table)
    if skipped := ", ".join(f"{context:,}" for context in data["skipped_contexts"]):
        console.print(f"skipped, the server holds less: {skipped}", style="yellow")
    verdict = data["verdict"]
    console.print(
        verdict["name"],
        style="bold yellow" if verdict["is_finding"] else "bold green",
        markup=False,
    )
    console.print(verdict["reasoning"], markup=False)
    console.print(verdict["remedy"], markup=False)
