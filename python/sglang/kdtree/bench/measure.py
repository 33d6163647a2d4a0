# SPDX-License-Identifier: Apache-2.0
"""From the timestamps of a stream to speeds: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from sglang.kdtree.bench.client import Reply
from sglang.kdtree.bench.text import distinct_ngrams, words
from sglang.kdtree.errors import KitError


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    ttft_s: float
    prefill_tok_s: float
    decode_tok_s: float
    steps: int | None  # decode or verify steps after the first token
    accept_length: float | None  # tokens a step, the bonus token included
    step_ms: list[float]
    step_tokens: list[int]
    distinct_4grams: float | None


def measure(reply: Reply) -> Measurement:
    """The first event ends the prefill and brings the first token; what follows is decode.

    Steps: the server's own count of verify steps where it tells one, else the messages that
    brought tokens (one a step, unless the network merged some).
    """
    at = [reply.sent_at, *(event.at for event in reply.events)]
    if (
        len(reply.events) < 2
        or not reply.prompt_tokens
        or not reply.completion_tokens
        or not at[0] < at[1] < at[-1]
    ):
        raise KitError(
            what="the server's stream",
            expected="token counts and at least two messages with tokens",
            got=f"{len(reply.events)} messages, prompt_tokens {reply.prompt_tokens}, completion_tokens {reply.completion_tokens}",
            remedy="Ask for more --output-tokens; the server must stream and report usage.",
        )
    first, last = reply.events[0], reply.events[-1]
    counted = all(event.completion_tokens is not None for event in reply.events)
    first_tokens = first.completion_tokens if counted else 1
    decoded = reply.completion_tokens - first_tokens
    ttft = first.at - reply.sent_at
    decode_s = last.at - first.at
    # One message carries one step also where it does not say how many tokens it brought.
    steps = reply.verify_steps or (len(reply.events) - 1)
    computed = reply.prompt_tokens - (reply.cached_tokens or 0)
    pairs = list(pairwise(reply.events))
    items = reply.output_ids if reply.output_ids else words(reply.text)
    return Measurement(
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        completion_tokens=reply.completion_tokens,
        ttft_s=ttft,
        prefill_tok_s=computed / ttft,
        decode_tok_s=decoded / decode_s,
        steps=steps,
        accept_length=decoded / steps,
        step_ms=[1000 * (after.at - before.at) for before, after in pairs],
        step_tokens=(
            [
                after.completion_tokens - before.completion_tokens
                for before, after in pairs
            ]
            if counted
            else []
        ),
        distinct_4grams=distinct_ngrams(items),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def p50_p90(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p90": percentile(values, 0.9)}


def summarise(kind: str, wanted: int, repeats: Sequence[Measurement]) -> dict[str, Any]:
    """One row: percentiles over repeats for rates, over all steps of all repeats for step times."""
    step_ms = [value for one in repeats for value in one.step_ms]
    distinct = [
        one.distinct_4grams for one in repeats if one.distinct_4grams is not None
    ]
    cached = [one.cached_tokens for one in repeats if one.cached_tokens is not None]
    return {
        "text": kind,
        "context": wanted,
        "prompt_tokens": round(
            sum(one.prompt_tokens for one in repeats) / len(repeats)
        ),
        "cached_tokens": max(cached) if cached else None,
        "repeats": len(repeats),
        "ttft_s": p50_p90([one.ttft_s for one in repeats]),
        "prefill_tok_s": p50_p90([one.prefill_tok_s for one in repeats]),
        "decode_tok_s": p50_p90([one.decode_tok_s for one in repeats]),
        "step_ms": p50_p90(step_ms),
        "accept_length": p50_p90([one.accept_length for one in repeats]),
        "distinct_4grams": sum(distinct) / len(distinct) if distinct else None,
    }
