# SPDX-License-Identifier: Apache-2.0
"""Decode speed against context length, one request at a time, over a streaming API."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.kdtree.arguments import count, counts
from sglang.kdtree.bench.client import (
    Client,
    ServerFacts,
    add_server_arguments,
    client_from,
)
from sglang.kdtree.bench.measure import Measurement, measure, summarise
from sglang.kdtree.bench.text import KINDS, Source, build_prompt, load_source, nonce_for
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError, require_at_least
from sglang.kdtree.result import Result, new_table

DEFAULT_CONTEXTS = (1_000, 4_000, 16_000, 32_000, 64_000, 128_000, 185_000, 200_000)
# What the longest default prompt keeps free: the error of its length, and a chat template's own tokens.
SPARE_SHARE, SPARE_TOKENS = 0.01, 64
# A prompt whose first tokens were in a cache measures the cache, not the prefill. A few tokens
# are shared by every prompt: the beginning of the sequence and of a chat template.
TOLERATED_CACHED_TOKENS = 64
LOOP_DISTINCT_4GRAMS = 0.3
# How often and how near the length of a prompt is corrected with the server's tokenizer.
REFINEMENTS = 24
IN_PROPORTION = 2
CLOSE_ENOUGH = 0.01
LEAST_CHARACTERS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add = parser.add_argument
    add_contexts_argument(parser, DEFAULT_CONTEXTS)
    add(
        "--text",
        action="append",
        choices=KINDS,
        help="what to read; repeat for several (default: code and prose)",
    )
    prompts = "different prompts of each length"
    add("--repeats", type=count, default=3, metavar="N", help=prompts)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="chooses the prompts")
    add(
        "--nonce",
        default="",
        help="fix the first line of the prompts, which otherwise differs in every run so that no prefix cache can help",
    )
    add("--label", default="", help="a name for this run in tables and plots")
    add(
        "--plot",
        type=Path,
        metavar="PNG",
        help="also draw decode speed and step time against context",
    )


def add_contexts_argument(parser, ladder: Sequence[int]) -> None:
    default = ",".join(f"{rung // 1000}k" for rung in ladder)
    parser.add_argument(
        "--contexts",
        type=counts,
        metavar="LIST",
        help=f"prompt lengths in tokens, k is 1000 (default: {default}, as far as the server holds them, and the longest that it holds)",
    )


def choose_contexts(
    asked: Sequence[int] | None,
    facts: ServerFacts,
    ladder: Sequence[int],
    output_tokens: int,
) -> tuple[list[int], list[int]]:
    """-> (contexts that the server can hold, those that it cannot). Not asked for any: of the ladder, as far
    as they fit, with the longest that fits up to the ladder's end.
    """
    room = facts.room(output_tokens)
    if asked is None:
        top = ladder[-1]
        if room is not None:
            usable = max(1, int((room - SPARE_TOKENS) * (1 - SPARE_SHARE)))
            top = min(top, usable - usable % (1000 if usable > 10_000 else 10))
        asked = [rung for rung in ladder if rung * 1.02 < top] + [top]
    fits = [context for context in asked if room is None or context <= room]
    if not fits:
        raise KitError(
            what="--contexts" if len(ladder) > 1 else "--context",
            expected=f"at least one that leaves {output_tokens} tokens below what the server holds: {room} at most",
            got=",".join(map(str, asked)),
            remedy="Ask for shorter contexts or fewer --output-tokens.",
        )
    return fits, [context for context in asked if context not in fits]


def choose_context(
    asked: int | None, facts: ServerFacts, default: int, output_tokens: int
) -> int:
    return choose_contexts(asked and [asked], facts, [default], output_tokens)[0][0]


def run(args: argparse.Namespace, console: Any) -> Result:
    require_at_least("--output-tokens", args.output_tokens, 8)
    require_at_least("--temperature", args.temperature, 0)
    args.nonce = args.nonce or secrets.token_hex(8)
    kinds = args.text or ["code", "prose"]
    client = client_from(args, os.environ)
    facts = client.facts()
    contexts, beyond = choose_contexts(
        args.contexts, facts, DEFAULT_CONTEXTS, args.output_tokens
    )
    rows = sweep(client, contexts, kinds, args, console)
    why = f"more than the {facts.room(args.output_tokens)} tokens that the server holds beside {args.output_tokens} of an answer"
    skipped = [
        {"text": kind, "context": context, "why": why}
        for kind in kinds
        for context in beyond
    ]
    data = {
        "label": args.label,
        "server": facts.public(),
        "settings": {
            "contexts": contexts + beyond,
            "texts": kinds,
            "output_tokens": args.output_tokens,
            "repeats": args.repeats,
            "temperature": args.temperature,
            "seed": args.seed,
            "nonce": args.nonce,
        },
        "rows": rows,
        "skipped": skipped,
        "warnings": findings(rows),
    }
    result = Result(
        verb="bench-longctx",
        data=data,
        exit_code=EXIT_FINDING if skipped or any(map(cached, rows)) else EXIT_OK,
    )
    if args.plot:
        from sglang.kdtree.bench.plot import plot_runs

        plot_runs([result.document()], args.plot)
    return result


def sweep(client: Client, contexts, kinds, args, console) -> list[dict]:
    from rich.progress import Progress

    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(kinds) * len(contexts) * args.repeats)
        for kind in kinds:
            prompts = PromptMaker(
                client, load_source(kind), seed=args.seed, run=args.nonce
            )
            for context in contexts:
                repeats = []
                for repeat in range(args.repeats):
                    progress.update(task, description=f"{kind} {context:,} tokens")
                    repeats.append(_one(client, prompts, context, repeat, args))
                    progress.advance(task)
                rows.append(summarise(kind, context, repeats))
    return rows


def _one(
    client: Client, prompts: PromptMaker, context: int, repeat: int, args
) -> Measurement:
    prompt = prompts.make(context, repeat=repeat)
    reply = client.stream(
        prompt, max_tokens=args.output_tokens, temperature=args.temperature
    )
    prompts.learn(len(prompt), reply.prompt_tokens)
    return measure(reply)


def one_prompt(client: Client, kind: str, context: int, *, seed: int = 0) -> str:
    """That no cache knows."""
    run = secrets.token_hex(8)
    prompts = PromptMaker(client, load_source(kind), seed=seed, run=run)
    return prompts.make(context, repeat=0)


class PromptMaker:
    """Makes prompts of a wanted token count by learning from the server how many characters a token has."""

    def __init__(self, client: Client, source: Source, *, seed: int, run: str):
        self.client = client
        self.source = source
        self.seed = seed
        self.run = run
        self.characters_per_token: float | None = None

    def make(self, tokens: int, *, repeat: int) -> str:
        if self.characters_per_token is None:
            sample = self.source.window(start=0, length=2000)
            self.learn(len(sample), self._count(sample))
        nonce = nonce_for(
            run=self.run, kind=self.source.kind, context=tokens, repeat=repeat
        )
        prompt = self._build(round(tokens * self.characters_per_token), repeat, nonce)
        # The most characters that are too few, the fewest that are too many; 0: not met yet.
        short, long = 0, 0
        for attempt in range(REFINEMENTS):
            counted = self.client.count_tokens(prompt)
            if counted is None or abs(counted - tokens) <= CLOSE_ENOUGH * tokens:
                break
            self.learn(len(prompt), counted)
            if counted < tokens:
                short = len(prompt)
            else:
                long = len(prompt)
            # In proportion, which is enough for even text; between the two where it is uneven, as beside a table.
            characters = round(tokens * self.characters_per_token)
            if long and (attempt >= IN_PROPORTION or not short < characters < long):
                characters = (short + long) // 2
            if characters in (short, long):
                break
            prompt = self._build(characters, repeat, nonce)
        return prompt

    def _build(self, characters: int, repeat: int, nonce: str) -> str:
        return build_prompt(
            self.source,
            characters=max(LEAST_CHARACTERS, characters),
            seed=self.seed,
            repeat=repeat,
            nonce=nonce,
        )

    def _count(self, sample: str) -> int | None:
        counted = self.client.count_tokens(sample)
        if counted is None:
            counted = self.client.stream(
                sample, max_tokens=1, temperature=0.0
            ).prompt_tokens
        return counted

    def learn(self, characters: int, tokens: int | None) -> None:
        if not tokens:
            raise KitError(
                what=f"{self.client.url} ({self.client.api})",
                expected="prompt_tokens in the answer",
                got=repr(tokens),
                remedy="The server must report usage in its stream.",
            )
        self.characters_per_token = characters / tokens


def cached(row: dict) -> bool:
    return (row["cached_tokens"] or 0) > TOLERATED_CACHED_TOKENS


def findings(rows: list[dict]) -> list[str]:
    """A loop is said and no more: its step times are true, only the tokens a step are too many."""
    found = []
    for row in rows:
        where = f"{row['text']} at {row['context']:,}"
        if cached(row):
            found.append(
                f"{where}: {row['cached_tokens']} prompt tokens came from a cache: the prefill speed is not one"
            )
        distinct = row["distinct_4grams"]
        if (
            row["text"] != "phrase"
            and distinct is not None
            and distinct < LOOP_DISTINCT_4GRAMS
        ):
            found.append(
                f"{where}: only {distinct:.0%} of the answer's 4-grams differ: a loop, its accept length flatters"
            )
    return found


def render(result: Result, console: Any) -> None:
    data = result.data
    server = data["server"]
    console.print(
        f"{server['model']} on {server['url']}: {server['engine']} {server['version'] or ''}, "
        f"{server['attention_backend'] or 'backend unknown'}, {server['speculative_algorithm'] or 'no speculation reported'}",
        markup=False,
    )
    console.print(rows_table(data["rows"]))
    for row in data["skipped"]:
        console.print(
            f"skipped: {row['text']} at {row['context']:,}: {row['why']}",
            style="yellow",
            markup=False,
        )
    for text in data["warnings"]:
        console.print(f"WARN {text}", style="yellow", markup=False)


def rows_table(rows: list[dict]) -> Any:
    table = new_table(
        "text|prompt tokens|prefill tok/s|decode tok/s|step ms|tokens a step|distinct 4-grams",
        title="p50 (p90)",
    )
    for row in rows:
        table.add_row(
            row["text"],
            f"{row['prompt_tokens']:,}",
            _pair(row["prefill_tok_s"], 0),
            _pair(row["decode_tok_s"], 1),
            _pair(row["step_ms"], 2),
            _pair(row["accept_length"], 2),
            "-" if row["distinct_4grams"] is None else f"{row['distinct_4grams']:.2f}",
        )
    return table


def _pair(value: dict[str, float], digits: int) -> str:
    return f"{value['p50']:,.{digits}f} ({value['p90']:,.{digits}f})"
