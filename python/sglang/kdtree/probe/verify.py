# SPDX-License-Identifier: Apache-2.0
"""Is the tree-verify kernel right? Offline on dumped reproducers, or on a server in validate mode."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec

from sglang.kdtree.arguments import count
from sglang.kdtree.bench.client import (
    Client,
    ServerFacts,
    add_server_arguments,
    client_from,
)
from sglang.kdtree.bench.longctx import (
    add_contexts_argument,
    choose_contexts,
    one_prompt,
)
from sglang.kdtree.bench.text import KINDS
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError, require_at_least
from sglang.kdtree.optional import require
from sglang.kdtree.probe.reproducer import (
    FILE_PATTERN,
    Reproducer,
    load_reproducer,
    recompute,
)
from sglang.kdtree.result import Result, new_table

DEFAULT_CONTEXTS = (1_000, 4_000, 16_000)  # sent to a server in validate mode
# What the report calls a metric, and its name at /metrics: totals, of which the growth counts, and gauges.
TOTALS = {
    "rows_compared": "sglang:kdtree_validate_rows_total",
    "rows_over_ulp": "sglang:kdtree_validate_rows_over_ulp_total",
    "mismatches": "sglang:kdtree_validate_mismatches_total",
}
GAUGES = {
    "max_abs_error": "sglang:kdtree_validate_max_abs_error",
    "mean_rel_error": "sglang:kdtree_validate_mean_rel_error",
}

# By which of the two is wrong: neither, ours, upstream's, both.
VERDICTS = ("both-right", "kdtree-wrong", "upstream-wrong", "both-wrong")


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """One output against the reference. relative is the norm of the difference over the norm of the reference."""

    max_abs: float
    relative: float
    rows_over_ulp: (
        int  # of s_q x h_q rows, those with an element more than one bf16 ulp off
    )
    finite: bool


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    layer: int
    context: int
    s_q: int
    h_q: int
    mask_layout: str
    kdtree: Deviation
    upstream: Deviation
    verdict: str  # of VERDICTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser, output_tokens=64)
    add = parser.add_argument
    add(
        "--dump",
        type=Path,
        metavar="PATH",
        help="a reproducer, or a folder of them: work offline, start no request",
    )
    add(
        "--limit",
        type=float,
        default=0.01,
        help="relative error by norm that counts as wrong; bf16 rounding gives 0.002",
    )
    add_contexts_argument(parser, DEFAULT_CONTEXTS)
    add(
        "--steps",
        type=count,
        default=600,
        metavar="N",
        help="verify steps to run; the server brings its counters up to date every 256",
    )


def run(args: argparse.Namespace, console: Any) -> Result:
    require_at_least("--limit", args.limit, 0)
    require_at_least("--output-tokens", args.output_tokens, 8)
    return offline(args.dump, args.limit) if args.dump else online(args, console)


def offline(path: Path, limit: float) -> Result:
    files = sorted(path.glob(FILE_PATTERN)) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise KitError(
            what=f"--dump {path}",
            expected=f"a reproducer or a folder with {FILE_PATTERN}",
            got="none",
            remedy="In validate mode each rank writes its first mismatch to the folder that --kdtree-dump-dir names.",
        )
    judgements = [judge(load_reproducer(file), limit=limit) for file in files]
    wrong = [j for j in judgements if j.verdict != "both-right"]
    data = {
        "mode": "offline",
        "limit": limit,
        "reproducers": [msgspec.to_builtins(j) for j in judgements],
        "wrong": len(wrong),
    }
    return Result(
        verb="probe-verify", data=data, exit_code=EXIT_FINDING if wrong else EXIT_OK
    )


def judge(r: Reproducer, *, limit: float) -> Judgement:
    reference = recompute(r)
    ours, theirs = (
        deviation(r.tensors["out_kdtree"], reference),
        deviation(r.tensors["out_reference"], reference),
    )
    bad = (
        not ours.finite or ours.relative > limit,
        not theirs.finite or theirs.relative > limit,
    )
    return Judgement(
        file=r.path.name,
        layer=r.layer,
        context=r.context,
        s_q=r.s_q,
        h_q=r.h_q,
        mask_layout=r.mask_layout,
        kdtree=ours,
        upstream=theirs,
        verdict=VERDICTS[bad[0] + 2 * bad[1]],
    )


def deviation(out: Any, reference: Any) -> Deviation:
    import torch

    got = out.float()
    finite = bool(torch.isfinite(got).all())
    difference = torch.nan_to_num(
        (got - reference).abs(), nan=float(torch.finfo(torch.float32).max)
    )
    # A bf16 number has 8 significant bits: the distance of neighbours at x is 2 ** (exponent(x) - 8),
    # with frexp's exponent. The smallest normal number bounds it from below.
    exponent = torch.frexp(reference)[1].clamp(min=-125)
    over = difference > torch.ldexp(torch.ones_like(reference), exponent - 8)
    norm = reference.norm()
    return Deviation(
        max_abs=float(difference.max()),
        relative=(
            float(difference.double().norm() / norm)
            if norm > 0
            else float(difference.max())
        ),
        rows_over_ulp=int(over.any(dim=-1).sum()),
        finite=finite,
    )


def online(args: argparse.Namespace, console: Any) -> Result:
    client = client_from(args, os.environ)
    facts = client.facts()
    mode = facts.raw.get("kdtree_verify")
    if mode != "validate":
        raise KitError(
            what=f"{facts.url}/server_info: kdtree_verify",
            expected="'validate'",
            got=repr(mode),
            remedy="Start the server with --attention-backend kdtree_sm120 --kdtree-verify validate --enable-metrics.",
        )
    before = validate_counters(client)
    steps = generate(client, facts, args, console)
    after = validate_counters(client)
    data = {
        "mode": "online",
        "server": facts.public(),
        "steps": steps,
        **compare_counters(before, after),
    }
    bad = data["mismatches"] > 0 or data["rows_compared"] == 0
    return Result(
        verb="probe-verify", data=data, exit_code=EXIT_FINDING if bad else EXIT_OK
    )


def generate(client: Client, facts: ServerFacts, args, console: Any) -> int:
    """Send prompts of every length and kind, round after round, until enough verify steps ran."""
    contexts, _ = choose_contexts(
        args.contexts, facts, DEFAULT_CONTEXTS, args.output_tokens
    )
    steps = 0
    while steps < args.steps:
        for context in contexts:
            for kind in KINDS:
                with console.status(f"{steps} steps; {kind} at {context:,} tokens"):
                    reply = client.stream(
                        one_prompt(client, kind, context),
                        max_tokens=args.output_tokens,
                        temperature=0.0,
                    )
                steps += max(1, reply.verify_steps or len(reply.events) - 1)
    return steps


def validate_counters(client: Client) -> dict[str, dict[str, float]]:
    """Metric -> labels -> value, only those of validate mode."""
    response = client.get("/metrics")
    if response.status_code == 404:
        raise KitError(
            what=f"{client.url}/metrics",
            expected="Prometheus metrics",
            got="HTTP 404",
            remedy="Start the server with --enable-metrics.",
        )
    client.check_status(response, "/metrics")
    try:
        return parse_counters(response.text)
    except ValueError as error:
        raise KitError(
            what=f"{client.url}/metrics",
            expected="Prometheus' text format",
            got=f"{response.text[:80]!r}... ({error})",
            remedy="Is this an SGLang server?",
        ) from error


def parse_counters(text: str) -> dict[str, dict[str, float]]:
    parser = require("prometheus_client.parser", needed_for="reading /metrics")
    wanted = (*TOTALS.values(), *GAUGES.values())
    found: dict[str, dict[str, float]] = {name: {} for name in wanted}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                labels = ",".join(
                    f"{key}={value}" for key, value in sorted(sample.labels.items())
                )
                found[sample.name][labels] = sample.value
    return found


def compare_counters(before: dict, after: dict) -> dict[str, Any]:
    def grown(name: str) -> int:
        old, new = before[name], after[name]
        return round(sum(value - old.get(labels, 0.0) for labels, value in new.items()))

    return {key: grown(name) for key, name in TOTALS.items()} | {
        key: max(after[name].values(), default=None) for key, name in GAUGES.items()
    }


def render(result: Result, console: Any) -> None:
    data = result.data
    if data["mode"] == "online":
        console.print(
            f"{data['rows_compared']:,} rows compared, {data['rows_over_ulp']:,} more than one bf16 ulp apart, "
            f"{data['mismatches']:,} mismatches; worst max abs {data['max_abs_error']}, mean relative {data['mean_rel_error']}",
            markup=False,
        )
        if data["rows_compared"] == 0:
            console.print(
                "Nothing was compared: no verify step reached the backend, or too few for a report.",
                style="bold red",
            )
        return
    table = new_table(
        "file|layer|context|s_q x h_q|mask|kdtree: rel / max abs|upstream: rel / max abs|verdict"
    )
    for row in data["reproducers"]:
        pairs = [
            f"{row[key]['relative']:.1e} / {row[key]['max_abs']:.1e}"
            for key in ("kdtree", "upstream")
        ]
        table.add_row(
            row["file"],
            str(row["layer"]),
            f"{row['context']:,}",
            f"{row['s_q']} x {row['h_q']}",
            row["mask_layout"],
            *pairs,
            row["verdict"],
        )
    console.print(table)
