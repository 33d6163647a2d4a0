# SPDX-License-Identifier: Apache-2.0
"""Expert imbalance at low batch: who waits for whom, and what another placement would give."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang.kdtree.arguments import count, counts_or_none
from sglang.kdtree.bench.client import Client, add_server_arguments, client_from
from sglang.kdtree.bench.longctx import choose_context, one_prompt
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError, require_at_least
from sglang.kdtree.model_shape import load_target
from sglang.kdtree.optional import figure_module
from sglang.kdtree.probe import moe_model
from sglang.kdtree.probe.moe_trace import divided, load_counts, trace_files
from sglang.kdtree.result import Result, new_table

# A rank that waits this long is worth a change of placement; arbitrary.
LOST_SHARE_FINDING = 0.25
DEFAULT_CONTEXT = 1_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser, output_tokens=64)
    add = parser.add_argument
    number = {"type": count, "metavar": "N"}
    add(
        "--trace",
        type=Path,
        metavar="PATH",
        help="recorder files (.pt, or their folder) or a routing trace (.npz)",
    )
    add(
        "--record-dir",
        type=Path,
        metavar="DIR",
        help="instead of --trace: drive the recorder of the server at --url, which writes its files here (its SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR)",
    )
    add(
        "--context",
        help=f"prompt length when recording (default: {DEFAULT_CONTEXT}, or the longest that the server holds)",
        **number,
    )
    add("--ranks", default=8, help="expert-parallel ranks", **number)
    add(
        "--copies",
        help="ranks that recorded the same tokens: tensor-parallel size over attention data-parallel size "
        "(default: asked of the server with --record-dir, else 1)",
        **number,
    )
    add(
        "--experts",
        help="experts a layer, if the trace does not show them all",
        **number,
    )
    for name, default, text in (
        ("--redundant", "16,32", "redundant experts a layer to try, '' for none"),
        ("--batches", "2,4,8", "larger batches to try, as multiples, '' for none"),
    ):
        add(name, type=counts_or_none, default=default, metavar="LIST", help=text)
    add(
        "--algorithm",
        default="deepseek",
        choices=("deepseek", "deepseek_vec"),
        help="SGLang's load balancer to call",
    )
    add(
        "--model-config",
        type=Path,
        metavar="PATH",
        help="config.json of the model: turns expert reads into microseconds",
    )
    add(
        "--bandwidth",
        type=float,
        default=1792.0,
        metavar="GB/S",
        help="at which weights are read",
    )
    add(
        "--plot",
        type=Path,
        metavar="PNG",
        help="heat map of activated experts, layer by rank",
    )


def run(args: argparse.Namespace, console: Any) -> Result:
    if (args.trace is None) == (args.record_dir is None):
        raise KitError(
            what="--trace or --record-dir",
            expected="exactly one",
            got="both" if args.trace else "neither",
            remedy="Give recordings, or a running server and the folder it records to.",
        )
    require_at_least("--bandwidth", args.bandwidth, 0.001)
    if args.trace:
        files, copies = trace_files(args.trace), args.copies or 1
    else:
        client = client_from(args, os.environ)
        facts = client.facts()
        files = record(client, args.record_dir, args, console)
        copies = args.copies or recording_copies(facts.raw)
    counts = divided(load_counts(files, experts=args.experts), copies=copies)
    num_layers, experts = counts.tokens.shape[1:]
    costs = moe_model.scenarios(
        counts.tokens,
        ranks=args.ranks,
        redundant=args.redundant,
        batches=args.batches,
        algorithm=args.algorithm,
    )
    expert_us = (
        expert_read_us(args.model_config, args.bandwidth) if args.model_config else None
    )
    activated = moe_model.activated_per_rank(
        counts.tokens,
        moe_model.contiguous(layers=num_layers, experts=experts, ranks=args.ranks),
    )
    if args.plot:
        plot(activated, counts.layers, args.plot)
    base = costs[0]
    data = {
        "source": counts.source,
        "steps": counts.steps,
        "layers": counts.layers,
        "experts": experts,
        "ranks": args.ranks,
        "tokens_per_step": float(counts.tokens.sum(axis=2).mean()),
        "expert_read_us": expert_us,
        "activated_per_rank": activated.mean(axis=(0, 1)).tolist(),
        "worst_layers": worst_layers(activated, counts.layers),
        "scenarios": [
            msgspec.to_builtins(c)
            | {
                "relative_time": (
                    c.time_per_step / base.time_per_step if base.time_per_step else None
                ),
                "lost_us_per_step": moe_model.time_lost_us(c, expert_us=expert_us),
            }
            for c in costs
        ],
    }
    finding = base.lost_share > LOST_SHARE_FINDING
    return Result(
        verb="probe-moe", data=data, exit_code=EXIT_FINDING if finding else EXIT_OK
    )


def recording_copies(server_info: dict[str, Any]) -> int:
    tp, dp = server_info.get("tp_size") or 1, server_info.get("dp_size") or 1
    return tp // dp if server_info.get("enable_dp_attention") else tp


def expert_read_us(config: Path, bandwidth_gb_s: float) -> float:
    shape = load_target(config, argument="--model-config")
    if not shape.routed_experts:
        raise KitError(
            what=str(config),
            expected="a mixture-of-experts model",
            got="no routed experts",
            remedy="Leave --model-config out.",
        )
    bits = shape.quantisation.bits if "experts" in shape.quantisation.quantised else 16
    size = 3 * shape.hidden * shape.moe_intermediate * bits / 8
    return size / (bandwidth_gb_s * 1e9) * 1e6


def worst_layers(
    activated: np.ndarray, layers: list[int], count: int = 5
) -> list[dict[str, Any]]:
    slowest = activated.max(axis=2)
    lost = (slowest[:, :, None] - activated).sum(axis=(0, 2))
    order = np.argsort(-lost, kind="stable")[:count]
    total = slowest.sum(axis=0) * activated.shape[2]
    return [
        {"layer": layers[i], "lost_share": float(lost[i] / total[i])} for i in order
    ]


RECORDER = (
    "Start the server with --expert-distribution-recorder-mode per_pass and "
    "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR set to the folder of --record-dir."
)


def record(client: Client, folder: Path, args, console) -> list[Path]:
    """Record one request's decode, without its prefill; returns the new files, one or one a rank."""
    facts = client.facts()
    context = choose_context(args.context, facts, DEFAULT_CONTEXT, args.output_tokens)
    mode = facts.raw.get("expert_distribution_recorder_mode")
    if not mode:  # such a server ends when it is asked to record
        raise KitError(
            what=f"{facts.url}/server_info: expert_distribution_recorder_mode",
            expected="a mode",
            got=repr(mode),
            remedy=RECORDER,
        )
    before = set(folder.glob("*.pt"))
    prompt = one_prompt(client, "prose", context)
    with console.status("recording the expert distribution"):
        client.stream(
            prompt,
            max_tokens=args.output_tokens,
            temperature=0.0,
            on_first_token=lambda: client.post("/start_expert_distribution_record"),
        )
        client.post("/stop_expert_distribution_record")
        client.post("/dump_expert_distribution_record")
    new = sorted(set(folder.glob("*.pt")) - before)
    if not new:
        raise KitError(
            what=f"--record-dir {folder}",
            expected="a new recording of the server",
            got="no new .pt file",
            remedy=RECORDER,
        )
    return new


def plot(activated: np.ndarray, layer_ids: list[int], path: Path) -> None:
    pyplot = figure_module()
    layers, ranks = activated.shape[1:]
    figure, axis = pyplot.subplots(
        figsize=(max(4, ranks * 0.6), max(3, layers * 0.14)), constrained_layout=True
    )
    image = axis.imshow(activated.mean(axis=0), aspect="auto", cmap="viridis")
    axis.set(
        xlabel="rank", ylabel="MoE layer", title="activated experts, mean over steps"
    )
    axis.set_xticks(range(ranks))
    ticks = range(0, layers, max(1, layers // 12))
    axis.set_yticks(ticks, [str(layer_ids[i]) for i in ticks])
    figure.colorbar(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def render(result: Result, console: Any) -> None:
    data = result.data
    console.print(
        f"{data['steps']} steps, {len(data['layers'])} MoE layers, {data['experts']} experts on {data['ranks']} ranks, "
        f"{data['tokens_per_step']:.1f} routed tokens a layer and step",
        markup=False,
    )
    table = new_table(
        "placement|activated a rank|slowest rank|idle ranks|lost waiting|time",
        title="Per layer and step",
    )
    for row in data["scenarios"]:
        lost = f"{row['lost_share']:.1%}"
        if row["lost_us_per_step"] is not None:
            lost += f" ({row['lost_us_per_step']:,.0f} us a step)"
        table.add_row(
            row["name"],
            f"{row['activated_mean']:.2f}",
            f"{row['slowest_mean']:.2f}",
            f"{row['idle_share']:.1%}",
            lost,
            "-" if row["relative_time"] is None else f"{row['relative_time']:.2f}x",
        )
    console.print(table)
    worst = ", ".join(
        f"{row['layer']} ({row['lost_share']:.0%})" for row in data["worst_layers"]
    )
    console.print(f"most lost in layers: {worst}", markup=False)
    console.print(
        "Model: at low batch an expert's time is the reading of its weights; collectives are not included.",
        style="dim",
    )
