# SPDX-License-Identifier: Apache-2.0
"""Requests to replay: when they arrive, their prompt, and what they answer.

Time is counted in decode steps. The answer is part of the trace, so that a later
turn of a conversation can begin with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

MOONCAKE_BLOCK = 512  # Tokens that one entry of ``hash_ids`` stands for.
MOONCAKE_LINE = "an object with numbers timestamp, input_length, output_length and a list hash_ids"
MOONCAKE_MOST = 1 << 40  # No time, length or id is more: tokens made of ids stay below those of answers.


class MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOONCAKE_MOST)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOONCAKE_MOST)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOONCAKE_MOST)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MOONCAKE_MOST)]]


# Requests drawn at a time: a call of numpy's for one number takes as long as for a thousand.
MADE_AHEAD = 512


class TraceRequest(NamedTuple):
    arrival: float
    prompt: array
    answer: array


class Mix(NamedTuple):
    """Lengths are geometric or uniform ranges, in tokens; ``load`` is the share of
    the running batch that the arrivals keep busy."""

    about: str
    prompt_mean: int = 96
    answer_mean: int = 32
    long_share: float = 0.0
    long_range: tuple[int, int] = (1024, 4096)
    burst: int = 1  # Requests that arrive together.
    shared_prefix: int = 64
    num_prefixes: int = 64
    follow_up: float = 0.0  # Share of requests that continue an earlier one.
    load: float = 0.95


MIXES = {
    "poisson": Mix("short requests, independent arrivals"),
    "burst": Mix("short requests in bursts of 64", burst=64),
    "long-short": Mix(
        "one prompt in 25 has 1,024 to 4,096 tokens",
        long_share=0.04,
        answer_mean=64,
    ),
    "turns": Mix(
        "half of the requests continue an earlier conversation",
        follow_up=0.5,
        answer_mean=64,
    ),
}


def synthetic(mix: Mix, *, count: int, max_running: int, seed: int | tuple[int, ...]) -> Iterator[TraceRequest]:
    rng = np.random.default_rng(seed)
    rate = mix.load * max_running / mix.answer_mean
    prefixes = [
        array("q", tokens.tobytes()) for tokens in rng.integers(1 << 40, size=(mix.num_prefixes, mix.shared_prefix))
    ]
    conversations: list[array] = []
    now = 0.0
    for begin in range(0, count, MADE_AHEAD):
        n = min(MADE_AHEAD, count - begin)
        gaps = rng.exponential(mix.burst / rate, size=n)
        gaps[(begin + np.arange(n)) % mix.burst != 0] = 0
        arrivals = now + gaps.cumsum()
        now = arrivals[-1]
        own = rng.geometric(1 / mix.prompt_mean, size=n)
        long = rng.random(n) < mix.long_share
        own[long] = rng.integers(*mix.long_range, size=long.sum())
        sizes = rng.geometric(1 / mix.answer_mean, size=n).clip(2, 8 * mix.answer_mean)
        follows = rng.random(n) < mix.follow_up
        which = rng.random(n)
        heads = rng.integers(mix.num_prefixes, size=n)
        tokens = array("q", rng.integers(1 << 40, size=(own + sizes).sum()).tobytes())
        at = 0
        for arrival, length, size, follow, where, head in zip(
            *(values.tolist() for values in (arrivals, own, sizes, follows, which, heads)), strict=True
        ):
            fresh, answer = tokens[at : at + length], tokens[at + length : at + length + size]
            at += length + size
            slot = int(where * len(conversations)) if conversations and follow else None
            prompt = (prefixes[head] if slot is None else conversations[slot]) + fresh
            if mix.follow_up:
                said = prompt + answer
                if len(said) > 2048 and slot is not None:
                    del conversations[slot]
                elif slot is not None:
                    conversations[slot] = said
                elif len(conversations) < 256:
                    conversations.append(said)
            yield TraceRequest(arrival, prompt, answer)


def mooncake(
    path: Path,
    *,
    shrink: int,
    steps_per_second: float,
    limit: int,
    context: int | None = None,
    pool_tokens: int | None = None,
) -> Iterator[TraceRequest]:
    """A trace in Mooncake's format, one JSON object a line: ``timestamp`` in ms,
    ``input_length``, ``output_length`` and ``hash_ids``, one per 512 tokens. Equal
    ids are equal tokens. All lengths are divided by ``shrink``. Blank lines are skipped.
    ValueError: a line that is no such object, or, so divided, longer than ``context`` or
    ``pool_tokens``; no line that is one."""
    if not 1 <= shrink <= MOONCAKE_BLOCK:
        raise ValueError(f"--shrink: expected 1 to {MOONCAKE_BLOCK}, the tokens of a hash id; got {shrink}")
    block = MOONCAKE_BLOCK // shrink
    decoder = msgspec.json.Decoder(MooncakeLine)
    index = number = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if index == limit:
                return
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                entry = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                got = repr(line[:80].decode(errors="replace").strip())
                raise ValueError(f"{where}: expected {MOONCAKE_LINE}; got {got} ({error})") from error
            at = entry.timestamp / 1000 * steps_per_second
            length = max(1, entry.input_length // shrink)
            size = max(2, entry.output_length // shrink)
            for option, most in (("--context", context), ("--pool-tokens", pool_tokens)):
                if most is not None and length + size > most:
                    raise ValueError(
                        f"{where}: expected a request that fits, {option} is {most}: raise it, or --shrink; got "
                        f"{length} + {size} tokens"
                    )
            ids = np.asarray(entry.hash_ids, dtype=np.int64)
            tokens = (ids[:, None] * block + np.arange(block)).reshape(-1)[:length]
            if len(tokens) < length:  # The tail of a prompt may have no id.
                own = -(index + 2) * (1 << 20) - np.arange(length - len(tokens))
                tokens = np.concatenate([tokens, own])
            answer = (1 << 50) + index * (1 << 20) + np.arange(size)
            index += 1
            yield TraceRequest(
                at,
                array("q", tokens.tobytes()),
                array("q", answer.astype(np.int64).tobytes()),
            )
    if index == 0 and limit > 0:
        what = "an empty file" if number == 0 else "blank lines only"
        raise ValueError(f"{path}, line {max(number, 1)}: expected a request, {MOONCAKE_LINE}; got {what}")
