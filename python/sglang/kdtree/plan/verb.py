# SPDX-License-Identifier: Apache-2.0
"""The plan verb: arguments, assembly of the report, tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from sglang.kdtree.arguments import count
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError, require_at_least
from sglang.kdtree.model_shape import NAMED_QUANTISATION, load_drafter, load_target
from sglang.kdtree.plan import calibrate, kv_pool, machine, weights
from sglang.kdtree.plan.command import ENVIRONMENT, launch_flags, shell_command
from sglang.kdtree.plan.solve import (
    OUT_OF_MEMORY_FRACTION,
    POOL_ERROR,
    PROVEN_FRACTION,
    Outcome,
    Static,
    Wish,
    evaluate,
    nearest_wishes,
    solve,
    static_memory,
)
from sglang.kdtree.result import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    path = {"type": Path, "metavar": "PATH"}
    target = "config.json of the target, or its folder"
    add("--model", required=True, help=target, **path)
    add("--draft", help="config.json of the DFlash drafter, or its folder", **path)
    gpu = f"{', '.join(machine.KNOWN_GPUS)} or the memory of one GPU"
    add("--gpu", default="rtx-pro-6000", help=gpu)
    for name, default, text in (
        ("--gpus", 8, "number of GPUs = tensor-parallel size"),
        ("--dp", 1, "attention data-parallel size"),
        ("--ep", 1, "expert-parallel size; whole experts on a rank, the same bytes"),
        ("--context", 200_000, "tokens of one request, answer included"),
        ("--concurrency", 1, "requests of that length at the same time"),
        ("--max-running-requests", None, "default: the larger of 8 and --concurrency"),
        ("--chunked-prefill-size", 4096, None),
        (
            "--tree-size",
            None,
            "nodes of a step, root too (default: drafter's block + 1)",
        ),
        ("--page-size", 1, None),
    ):
        add(name, type=count, metavar="N", default=default, help=text)
    redundant = "with --ep: N more experts a layer"
    add("--redundant-experts", type=int, default=0, metavar="N", help=redundant)
    add("--kv-dtype", choices=list(kv_pool.ELEMENT_BYTES), default="bf16")
    override = "override the quantisation found in config.json"
    add("--weights", choices=list(NAMED_QUANTISATION), help=override)
    backends = ["kdtree_sm120", "triton"]
    add("--attention-backend", choices=backends, default=backends[0])
    evaluated = "evaluate this fraction instead of choosing one"
    add("--mem-fraction-static", type=float, metavar="F", help=evaluated)
    add(
        "--accounting",
        choices=list(kv_pool.ACCOUNTING),
        default="own-geometry",
        help="; ".join(
            f"{n}: drafter {text}" for n, text in kv_pool.ACCOUNTING.items()
        ),
    )
    add(
        "--reserved",
        metavar="SIZE",
        help="GPU memory gone before the weights are loaded (default: 1024MiB on one GPU, 3645MiB on several)",
    )
    add(
        "--observed",
        action="append",
        default=[],
        metavar="F:TOKENS",
        help="a pool seen in a server log; give one or two to calibrate the plan",
    )


def run(args: argparse.Namespace, console: Any) -> Result:
    del console
    wish = wish_from(args)
    observations = [calibrate.parse_observation(text) for text in args.observed]
    calibrations = calibrate.calibrations(observations, known=known_of(wish))
    chosen = next((c for c in calibrations if not c.contradiction), None)
    wish = msgspec.structs.replace(wish, calibration=chosen)
    static, outcome = solve(wish, fraction=args.mem_fraction_static)
    unread = (
        ["every reading of --observed contradicts a known fact: it was not used."]
        if calibrations and not chosen
        else []
    )
    alternatives = (
        [] if outcome.fits else nearest_wishes(wish, fraction=args.mem_fraction_static)
    )
    data = {
        "fits": outcome.fits,
        "reason": outcome.reason,
        **numbers(wish, static, outcome),
        "observations": [
            observed(wish, static, observation) for observation in observations
        ],
        "calibrations": [
            msgspec.to_builtins(c) | {"used": c is chosen} for c in calibrations
        ],
        "assumptions": assumptions(wish, static),
        "warnings": unread + warnings(wish, static, outcome),
        "alternatives": [
            {
                "change": label,
                "mem_fraction_static": o.fraction,
                "pool_tokens": o.pool_tokens,
            }
            for label, _, o in alternatives
        ],
        "command": command(args, wish, outcome),
    }
    return Result(
        verb="plan", data=data, exit_code=EXIT_OK if outcome.fits else EXIT_FINDING
    )


def wish_from(args: argparse.Namespace) -> Wish:
    require_at_least("--redundant-experts", args.redundant_experts, 0)
    if args.mem_fraction_static is not None and not 0 < args.mem_fraction_static < 1:
        raise KitError(
            what="--mem-fraction-static",
            expected="a fraction between 0 and 1",
            got=str(args.mem_fraction_static),
            remedy="Typical values are 0.80 to 0.94.",
        )
    target = load_target(args.model, quantisation=NAMED_QUANTISATION.get(args.weights))
    drafter = load_drafter(args.draft) if args.draft else None
    block = drafter.block_size if drafter else None
    return Wish(
        target=target,
        drafter=drafter,
        gpu=machine.parse_gpu(args.gpu),
        gpus=args.gpus,
        attention_dp=args.dp,
        expert_parallel=args.ep,
        redundant_experts=args.redundant_experts,
        context=args.context,
        concurrency=args.concurrency,
        max_requests=args.max_running_requests or max(8, args.concurrency),
        chunk=args.chunked_prefill_size,
        tree_size=args.tree_size or (block + 1 if block else 1),
        page_size=args.page_size,
        kv_dtype=args.kv_dtype,
        backend=args.attention_backend,
        accounting=args.accounting,
        reserved_bytes=(
            machine.parse_bytes(args.reserved, argument="--reserved")
            if args.reserved
            else machine.reserved_bytes(gpus=args.gpus)
        ),
    )


def known_of(wish: Wish) -> calibrate.Known:
    static = static_memory(wish)
    return calibrate.Known(
        free=static.free_bytes,
        resident=static.resident_bytes,
        weights=weights.rank_bytes(static.target_parts),
        cell=static.cell_bytes,
        card=wish.gpu.total_bytes,
    )


def numbers(wish: Wish, static: Static, outcome: Outcome) -> dict[str, Any]:
    parts = static.target_parts + static.drafter_parts
    return {
        "mem_fraction_static": outcome.fraction,
        "pool": {
            "tokens": outcome.pool_tokens,
            "wanted_tokens": wish.wanted_tokens,
            "page_size": wish.page_size,
            "by_accounting": by_accounting(wish, fraction=outcome.fraction),
        },
        "bytes_per_token_per_rank": {
            "target": static.target_cell_bytes,
            "drafter": static.drafter_cell_bytes,
            "used_for_the_pool": round(static.cell_bytes),
        },
        "rank_bytes": {
            "gpu_total": wish.gpu.total_bytes,
            "free_before_load": static.free_bytes,
            "resident": static.resident_bytes,
            "kv_pool": round(outcome.pool_tokens * static.cell_bytes),
            "slack": outcome.slack_bytes,
            "margin": outcome.margin_bytes,
        },
        "weights": [
            {
                "part": p.name,
                "params": p.params,
                "bits": p.bits,
                "rank_bytes": p.rank_bytes,
            }
            for p in parts
        ],
        "checkpoint_bytes": {
            "target": weights.checkpoint_bytes(static.target_parts),
            "drafter": weights.checkpoint_bytes(static.drafter_parts),
        },
        "late_allocations": static.late,
    }


def by_accounting(wish: Wish, *, fraction: float) -> dict[str, int]:
    """The pool's tokens by every way to charge the drafter; a calibration has its own."""
    wishes = {
        name: msgspec.structs.replace(wish, accounting=name)
        for name in kv_pool.ACCOUNTING
    }
    return {
        name: evaluate(other, static_memory(other), fraction=fraction).pool_tokens
        for name, other in wishes.items()
        if wish.drafter and not wish.calibration
    }


def observed(
    wish: Wish, static: Static, observation: calibrate.Observation
) -> dict[str, Any]:
    tokens = kv_pool.pool_tokens(
        free_bytes=static.free_bytes,
        fraction=observation.fraction,
        resident_bytes=static.resident_bytes,
        cell_bytes=static.cell_bytes,
        page_size=wish.page_size,
    )
    return {
        "mem_fraction_static": observation.fraction,
        "observed_tokens": observation.tokens,
        "planned_tokens": tokens,
        "relative_error": tokens / observation.tokens - 1,
    }


def assumptions(wish: Wish, static: Static) -> list[dict[str, str]]:
    tokens_per_gb = 1e9 / static.cell_bytes
    rows = [
        (
            f"weights {weights.rank_bytes(static.resident_parts) / 1e9:.2f} GB a rank",
            "derived",
            "from config.json, part by part",
        ),
        (
            f"{static.cell_bytes:,.0f} B of KV a token and rank, pool = (free x fraction - resident) / that",
            "derived",
            "SGLang's own formula; a pool is the small rest of large figures: "
            f"1 GB a rank more or less resident is {tokens_per_gb:,.0f} tokens",
        ),
        (
            f"{wish.reserved_bytes / 2**20:,.0f} MiB gone before the weights are loaded",
            "assumed",
            reserve_reason(wish),
        ),
        (
            f"drafter charged by {wish.accounting}",
            "derived" if wish.accounting == "own-geometry" else "assumed",
            f"{kv_pool.ACCOUNTING[wish.accounting]} (--accounting)",
        ),
        (
            f"{static.late['prefill activations'] / wish.chunk / 1e6:.2f} MB of activations a token of a prefill chunk",
            "calibrated",
            "on 8 x RTX PRO 6000 with Kimi K2.6, 0.93 ran and 0.94 ran out of memory; scaled by the model's width",
        ),
        (
            "library workspaces and allocator rounding",
            "left out",
            "they lower the pool; calibrate with --observed",
        ),
    ]
    if wish.embedding_cache_bytes:
        rows.append(
            (
                f"{wish.embedding_cache_bytes / 2**20:,.0f} MiB of the KV budget kept for image embeddings",
                "derived",
                "SGLANG_VLM_CACHE_SIZE_MB's default, with images sent by way of the CPU",
            )
        )
    if wish.target.vision_params:
        rows.append(
            (
                f"vision tower of {wish.target.vision_params / 1e6:.0f} million weights",
                "assumed",
                "not in config.json",
            )
        )
    if wish.calibration:
        rows.append(
            (
                "free memory, resident bytes and bytes per token",
                "observed",
                "solved from --observed",
            )
        )
    return [{"what": what, "kind": kind, "why": why} for what, kind, why in rows]


def reserve_reason(wish: Wish) -> str:
    why = "driver context, libraries"
    if wish.gpus == 1:
        return why
    why += ", collectives"
    if wish.reserved_bytes != machine.RESERVED_MANY_GPUS:
        return why
    return (
        f"{why}; fitted: it misses two pools of 8 x RTX PRO 6000 (Kimi K2.6 and its drafter, TP 8: "
        "101,134 tokens at 0.85, 195,011 at 0.93) by 2.9 % each, 0.2 and 0.4 GB, in opposite directions, "
        "with the drafter charged layer-scaled"
    )


def warnings(wish: Wish, static: Static, outcome: Outcome) -> list[str]:
    found = [
        "--context-length does not size the pool: memory does. It only limits a request and widens per-request tables."
    ]
    if outcome.fraction >= PROVEN_FRACTION:
        higher = (
            "plan goes no higher unless --mem-fraction-static asks for it."
            if outcome.fraction < OUT_OF_MEMORY_FRACTION
            else f"{outcome.fraction:g} was asked for; test a full-length prefill before use."
        )
        found.append(
            f"{OUT_OF_MEMORY_FRACTION:g} ran out of memory at a 32k prefill on 8 x RTX PRO 6000 (Kimi K2.6, its drafter "
            f"loaded after the pool), {PROVEN_FRACTION:g} did not: {higher}"
        )
    pools = by_accounting(wish, fraction=outcome.fraction)
    for name in pools:
        apart = pools[name] / max(1, outcome.pool_tokens) - 1
        if abs(apart) > POOL_ERROR:
            found.append(
                f"the pool is counted by {wish.accounting}; by {name} it would be {pools[name]:,} tokens ({apart:+.1%}): "
                f"drafter {kv_pool.ACCOUNTING[name]}."
            )
    if outcome.fits and outcome.margin_bytes < 0.005 * static.free_bytes:
        found.append(
            f"only {outcome.margin_bytes / 1e9:.2f} GB of slack are unclaimed."
        )
    if wish.backend == "triton" and wish.tree_size > 1:
        share = static.late["triton graph and mask buffers"]
        found.append(
            f"the Triton backend's graph buffers take {share / 1e9:.2f} GB at --max-running-requests {wish.max_requests}; "
            "they grow with requests x tree size x context."
        )
    if wish.target.brings_code:
        found.append(
            "--trust-remote-code runs Python files of the checkpoint: read them, and pin the revision."
        )
    if wish.target.kv_lora_rank != 512 or wish.target.rope_dim != 64:
        found.append(
            "kdtree_sm120 serves latent rows of 512 + 64; this model has "
            f"{wish.target.kv_lora_rank} + {wish.target.rope_dim}."
        )
    return found


def command(args: argparse.Namespace, wish: Wish, outcome: Outcome) -> dict[str, Any]:
    flags = launch_flags(
        wish,
        fraction=outcome.fraction,
        model=_folder(args.model, "MODEL"),
        draft=_folder(args.draft, "DRAFT"),
    )
    return {
        "environment": ENVIRONMENT,
        "flags": [list(pair) for pair in flags],
        "shell": shell_command(flags),
    }


def _folder(path: Path | None, placeholder: str) -> str | None:
    """The model folder, or a placeholder when only a config file was given."""
    if path is None:
        return None
    return str(path) if path.is_dir() else placeholder


def render(result: Result, console: Any) -> None:
    from rich.table import Table

    data = result.data
    style, word = (
        ("bold green", "fits") if data["fits"] else ("bold red", "does not fit")
    )
    console.print(
        f"The wish {word}" + (f": {data['reason']}" if data["reason"] else ""),
        style=style,
        markup=False,
    )
    table = Table(title="One rank", show_header=False)
    rank, cell, pool = (
        data["rank_bytes"],
        data["bytes_per_token_per_rank"],
        data["pool"],
    )
    for label, value in [
        ("GPU memory", _gb(rank["gpu_total"])),
        ("free before loading", _gb(rank["free_before_load"])),
        ("resident when the pool is sized", _gb(rank["resident"])),
        (
            "KV bytes per token",
            f"{cell['used_for_the_pool']:,} B (target {cell['target']:,} + drafter {cell['drafter']:,})",
        ),
        ("--mem-fraction-static", f"{data['mem_fraction_static']:g}"),
        (
            "KV pool",
            f"{pool['tokens']:,} tokens, {_gb(rank['kv_pool'])}; wanted {pool['wanted_tokens']:,}",
        ),
        *[
            (f"  by {name}", f"{tokens:,} tokens")
            for name, tokens in pool["by_accounting"].items()
        ],
        ("slack", _gb(rank["slack"])),
        *[(f"  {name}", _gb(size)) for name, size in data["late_allocations"].items()],
        ("unclaimed", _gb(rank["margin"])),
    ]:
        table.add_row(label, value)
    console.print(table)
    for row in data["observations"]:
        console.print(
            f"observed {row['observed_tokens']:,} tokens at {row['mem_fraction_static']:g}: planned "
            f"{row['planned_tokens']:,} ({row['relative_error']:+.2%})",
            markup=False,
        )
    for row in data["calibrations"]:
        solved = (
            f"free {row['free_bytes'] / 2**30:.1f} GiB, resident {row['resident_bytes'] / 1e9:.2f} GB, "
            f"{row['cell_bytes']:,.0f} B a token"
        )
        verdict = "used" if row["used"] else (row["contradiction"] or "not used")
        console.print(
            f"calibration, {row['assumed']} assumed: {solved}: {verdict}",
            style="dim",
            markup=False,
        )
    for text in data["warnings"]:
        console.print(f"WARN {text}", style="yellow", markup=False)
    if not data["fits"] and not data["alternatives"]:
        console.print("no single change of the wish makes it fit", style="cyan")
    for row in data["alternatives"]:
        console.print(
            f"would fit: {row['change']} (pool {row['pool_tokens']:,} tokens at {row['mem_fraction_static']:g})",
            style="cyan",
            markup=False,
        )
    assumed = Table("assumption", "kind", "why", title="Assumptions")
    for row in data["assumptions"]:
        assumed.add_row(row["what"], row["kind"], row["why"])
    console.print(assumed)
    console.print(
        data["command"]["shell"], markup=False, highlight=False, soft_wrap=True
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
