# SPDX-License-Identifier: Apache-2.0
"""Samples the GPUs while a decode runs and names what limits them."""

from __future__ import annotations

import argparse
import csv
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang.kdtree.arguments import count
from sglang.kdtree.bench.client import Reply, add_server_arguments, client_from
from sglang.kdtree.bench.longctx import choose_context, one_prompt
from sglang.kdtree.bench.measure import measure
from sglang.kdtree.bench.text import KINDS
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError, require_at_least
from sglang.kdtree.model_shape import TargetShape, load_target
from sglang.kdtree.optional import figure_module
from sglang.kdtree.plan.kv_pool import ELEMENT_BYTES, target_cell_bytes
from sglang.kdtree.probe.nvml import Nvml, Sample, open_nvml
from sglang.kdtree.probe.regime import classify, effective_bandwidth_gb_s, means
from sglang.kdtree.result import Result, new_table

DEFAULT_CONTEXT = 64_000
# GB/s from the data sheets.
PEAK_GB_S = {"RTX PRO 6000": 1792.0, "RTX 5090": 1792.0, "H200": 4800.0, "H100": 3350.0}
# What a sample holds beside its time and GPU, as the live table and the plot call it.
COLUMNS = {
    "sm_pct": "SM %",
    "memory_pct": "mem %",
    "power_w": "W",
    "power_limit_w": "limit W",
    "sm_clock_mhz": "SM MHz",
    "memory_clock_mhz": "mem MHz",
    "pcie_rx_mb_s": "PCIe rx",
    "pcie_tx_mb_s": "PCIe tx",
    "nvlink_rx_mb_s": "NVL rx",
    "nvlink_tx_mb_s": "NVL tx",
    "used_gb": "used GB",
}
PANELS = {
    "%": ("sm_pct", "memory_pct"),
    "W": ("power_w", "power_limit_w"),
    "MHz": ("sm_clock_mhz", "memory_clock_mhz"),
    "PCIe MB/s": ("pcie_rx_mb_s", "pcie_tx_mb_s"),
    "NVLink MB/s": ("nvlink_rx_mb_s", "nvlink_tx_mb_s"),
    "GB": ("used_gb",),
}
LINES = {"-": "solid", "--": "dashed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add = parser.add_argument
    add(
        "--context",
        type=count,
        metavar="N",
        help="prompt length of the decode that the probe starts (default: 64k, or the longest that the server holds)",
    )
    add("--text", choices=KINDS, default="prose")
    add(
        "--watch",
        type=float,
        metavar="S",
        help="only watch for S seconds what runs anyway; starts no request",
    )
    interval = "seconds between samples"
    add("--interval", type=float, default=0.1, metavar="S", help=interval)
    add("--gpus", metavar="LIST", help="GPU numbers, comma-separated (default: all)")
    add(
        "--model-config",
        type=Path,
        metavar="PATH",
        help="config.json of the target, for the effective KV bandwidth (default: the server's, if it lies here)",
    )
    add("--kv-dtype", choices=list(ELEMENT_BYTES), help="default: the server's")
    add(
        "--peak-bandwidth",
        type=float,
        metavar="GB/S",
        help="default: by the card's name",
    )
    add("--csv", type=Path, metavar="FILE", help="write every sample")
    add("--plot", type=Path, metavar="PNG", help="draw the samples over time")


def run(
    args: argparse.Namespace,
    console: Any,
    *,
    nvml: Nvml | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    require_at_least("--interval", args.interval, 0.001)
    require_at_least("--output-tokens", args.output_tokens, 8)
    for argument, value in (
        ("--watch", args.watch),
        ("--peak-bandwidth", args.peak_bandwidth),
    ):
        if value is not None:
            require_at_least(argument, value, 0.001)
    target = (
        load_target(args.model_config, argument="--model-config")
        if args.model_config
        else None
    )
    nvml = nvml or open_nvml()
    gpus = chosen_gpus(args.gpus, len(nvml.handles))
    if args.watch:
        samples = watch(
            nvml, gpus, args, console, clock, stop=_after(clock() + args.watch, clock)
        )
        phases, reply = {"watch": samples}, None
    else:
        samples, reply, server = sample_request(nvml, gpus, args, console, clock)
        phases = split_phases(samples, reply)
        target = target or served_target(server)
        fp8 = "fp8" in str(server.get("kv_cache_dtype"))
        args.kv_dtype = args.kv_dtype or ("fp8" if fp8 else "bf16")
    main_phase = "watch" if args.watch else "decode"
    if not phases[main_phase]:
        raise KitError(
            what="samples",
            expected=f"at least one during {main_phase}",
            got="none",
            remedy="Lower --interval or ask for more --output-tokens.",
        )
    names = [nvml.names()[gpu] for gpu in gpus]
    data = report(phases, names, gpus, nvml.driver()) | {"decode": None}
    if reply:
        cell = target_cell_bytes(target, kv_dtype=args.kv_dtype) if target else None
        peak = args.peak_bandwidth or peak_of(names[0])
        data["decode"] = decode_facts(reply, cell=cell, peak=peak)
    if args.csv:
        write_csv(args.csv, samples)
    if args.plot:
        plot(samples, args.plot)
    regime = data["phases"][main_phase]["regime"]["name"]
    finding = regime in ("latency-bound", "host-bound")
    return Result(
        verb="probe-gpu", data=data, exit_code=EXIT_FINDING if finding else EXIT_OK
    )


def chosen_gpus(text: str | None, count: int) -> list[int]:
    if text is None:
        return list(range(count))
    try:
        gpus = [int(part) for part in text.split(",")]
    except ValueError:
        gpus = [-1]
    if not gpus or any(not 0 <= gpu < count for gpu in gpus):
        raise KitError(
            what="--gpus",
            expected=f"numbers from 0 to {count - 1}",
            got=repr(text),
            remedy="For example --gpus 0,1.",
        )
    return gpus


def _after(deadline: float, clock: Callable[[], float]) -> Callable[[], bool]:
    return lambda: clock() >= deadline


def watch(
    nvml: Nvml, gpus: list[int], args, console, clock, *, stop: Callable[[], bool]
) -> list[Sample]:
    from rich.live import Live

    samples: list[Sample] = []
    with Live(console=console, transient=True, auto_refresh=False) as live:
        while not stop():
            newest = nvml.sample(at_s=clock(), gpus=gpus)
            samples += newest
            live.update(live_table(newest), refresh=True)
            time.sleep(args.interval)
    return samples


def served_target(server: dict[str, Any]) -> TargetShape | None:
    """Of the model that the server names, if it lies here and can be planned."""
    folder = Path(server.get("model_path") or "")
    try:
        return load_target(folder) if folder.is_absolute() else None
    except KitError:
        return None


def sample_request(
    nvml, gpus, args, console, clock
) -> tuple[list[Sample], Reply, dict[str, Any]]:
    """Run one streamed request in a thread and sample until it ends; also what the server says of itself."""
    client = client_from(args, os.environ)
    client.clock = clock
    facts = client.facts()
    context = choose_context(args.context, facts, DEFAULT_CONTEXT, args.output_tokens)
    prompt = one_prompt(client, args.text, context)
    outcome: dict[str, Any] = {}

    def request() -> None:
        try:
            outcome["reply"] = client.stream(
                prompt, max_tokens=args.output_tokens, temperature=0.0
            )
        except KitError as error:
            outcome["error"] = error

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    samples = watch(
        nvml, gpus, args, console, clock, stop=lambda: not thread.is_alive()
    )
    if "error" in outcome:
        raise outcome["error"]
    return samples, outcome["reply"], facts.raw


def split_phases(samples: Sequence[Sample], reply: Reply) -> dict[str, list[Sample]]:
    first, last = reply.events[0].at, reply.events[-1].at
    return {
        "prefill": [s for s in samples if reply.sent_at <= s.at_s < first],
        "decode": [s for s in samples if first <= s.at_s <= last],
    }


def report(
    phases: dict[str, list[Sample]], names: list[str], gpus: list[int], driver: str
) -> dict[str, Any]:
    rows = {}
    for phase, samples in phases.items():
        if samples:
            m = means(samples)
            rows[phase] = {
                "means": msgspec.to_builtins(m),
                "regime": msgspec.to_builtins(classify(m)),
            }
    return {
        "driver": driver,
        "gpus": [{"index": g, "name": n} for g, n in zip(gpus, names, strict=True)],
        "phases": rows,
    }


def decode_facts(
    reply: Reply, *, cell: int | None, peak: float | None
) -> dict[str, Any]:
    measured = measure(reply)
    step_s = (reply.events[-1].at - reply.events[0].at) / measured.steps
    bandwidth = (
        effective_bandwidth_gb_s(
            context=measured.prompt_tokens, cell_bytes=cell, step_s=step_s
        )
        if cell
        else None
    )
    return {
        "context": measured.prompt_tokens,
        "step_ms": 1000 * step_s,
        "decode_tok_s": measured.decode_tok_s,
        "accept_length": measured.accept_length,
        "kv_bytes_per_token_per_rank": cell,
        "effective_kv_gb_s": bandwidth,
        "peak_gb_s": peak,
        "share_of_peak": bandwidth / peak if bandwidth and peak else None,
    }


def peak_of(name: str) -> float | None:
    return next((peak for part, peak in PEAK_GB_S.items() if part in name), None)


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=Sample.__struct_fields__)
        writer.writeheader()
        writer.writerows(msgspec.structs.asdict(sample) for sample in samples)


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Every column of the samples; a colour is a GPU."""
    pyplot = figure_module()
    figure, axes = pyplot.subplots(
        len(PANELS), 1, figsize=(9, 11), sharex=True, constrained_layout=True
    )
    start = samples[0].at_s
    for index, gpu in enumerate(sorted({sample.gpu for sample in samples})):
        own = [sample for sample in samples if sample.gpu == gpu]
        at = [s.at_s - start for s in own]
        for axis, keys in zip(axes, PANELS.values(), strict=True):
            for key, style in zip(keys, LINES):
                # A counter that the card lacks leaves a gap.
                values = [getattr(s, key) for s in own]
                values = [float("nan") if v is None else v for v in values]
                axis.plot(at, values, style, color=f"C{index}", label=f"GPU {gpu}")
    for axis, (unit, keys) in zip(axes, PANELS.items(), strict=True):
        lines = [f"{COLUMNS[k]} {word}" for k, word in zip(keys, LINES.values())]
        axis.set_title(", ".join(lines), loc="left", fontsize=9)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
    handles = axes[-1].get_lines()
    figure.legend(handles=handles, loc="outside upper center", ncols=8, fontsize=8)
    axes[-1].set_xlabel("seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def live_table(samples: Sequence[Sample]) -> Any:
    columns = "|".join(("GPU", *COLUMNS.values()))
    table = new_table(columns, box=None, padding=(0, 1, 0, 0))
    for s in samples:
        values = [getattr(s, key) for key in COLUMNS]
        table.add_row(
            str(s.gpu), *["-" if value is None else f"{value:,.0f}" for value in values]
        )
    return table


def pair(means: dict[str, Any], *keys: str) -> str:
    return "/".join("-" if means[key] is None else f"{means[key]:,.0f}" for key in keys)


def render(result: Result, console: Any) -> None:
    data = result.data
    table = new_table(
        "phase|samples|SM %|memory %|W|limit W|SM/memory MHz|PCIe rx/tx MB/s|NVLink rx/tx MB/s|used GB|regime",
        title="Means over all GPUs",
    )
    for phase, row in data["phases"].items():
        m = row["means"]
        table.add_row(
            phase,
            str(m["samples"]),
            f"{m['sm_pct']:.1f}",
            f"{m['memory_pct']:.1f}",
            f"{m['power_w']:.0f}",
            f"{m['power_limit_w']:.0f}",
            pair(m, "sm_clock_mhz", "memory_clock_mhz"),
            pair(m, "pcie_rx_mb_s", "pcie_tx_mb_s"),
            pair(m, "nvlink_rx_mb_s", "nvlink_tx_mb_s"),
            pair(m, "used_gb"),
            row["regime"]["name"],
        )
    console.print(table)
    decode = data["decode"]
    if decode and decode["effective_kv_gb_s"] is not None:
        share = (
            ""
            if decode["share_of_peak"] is None
            else f", {decode['share_of_peak']:.1%} of {decode['peak_gb_s']:,.0f} GB/s"
        )
        console.print(
            f"KV read at {decode['effective_kv_gb_s']:,.1f} GB/s a rank ({decode['context']:,} tokens in {decode['step_ms']:.1f} ms){share}",
            markup=False,
        )
    for phase, row in data["phases"].items():
        console.print(f"{phase}: {row['regime']['reasoning']}", markup=False)
        console.print(f"  {row['regime']['remedy']}", markup=False)
