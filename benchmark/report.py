# SPDX-License-Identifier: Apache-2.0
"""Write the benchmark's tables into the documents, from the result files.

    python benchmark/report.py                  # every *.md of the repository that has a block python
    benchmark/report.py --check          # change nothing; exit 1 when a document is not what its result file gives
    python benchmark/report.py FILE.md ...

A block in a document names a table and a result file (relative to the repository):

    <!-- results: context benchmark/results/h200/mla_tree_verify.json -->
    anything here is replaced
    <!-- /results -->
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(HERE / "kernels")]

import arithmetic_sm120  # noqa: E402
import verify_experiments  # noqa: E402
from acceptance import results as acceptance_results  # noqa: E402
from acceptance import table as acceptance_table  # noqa: E402
from one_rank import results as one_rank_results  # noqa: E402
from one_rank import table as one_rank_table  # noqa: E402
from one_rank import tune_experts  # noqa: E402
from two_ranks import results as two_ranks_results  # noqa: E402
from two_ranks import table as two_ranks_table  # noqa: E402
from verify_bench import results, table  # noqa: E402
from verify_bench.arms import ARMS  # noqa: E402
from verify_bench.shapes import Shape  # noqa: E402

OPEN = re.compile(r"^<!-- results: (?P<table>\S+) (?P<file>\S+) -->$")
CLOSE = "<!-- /results -->"
SKIPPED_FOLDERS = {".git", "build", "bundle", "out", "node_modules", ".venv"}
LABELS = {name: arm.label for name, arm in ARMS.items()}


class ReportError(Exception):
    pass


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: float | None, ours: float | None) -> str:
    if value is None or not ours:
        return "-"
    return f"{value / ours:.0f}x" if value / ours >= 10 else f"{value / ours:.1f}x"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + ["---:"] * (len(columns) - 1)
    return "\n".join("| " + " | ".join(r) + " |" for r in [columns, align, *rows])


def by_shape(data: dict) -> dict[Shape, dict[str, dict]]:
    """shape -> arm -> row, in the order of the file."""
    found: dict[Shape, dict[str, dict]] = {}
    for r in data["rows"]:
        found.setdefault(results.shape_of(r), {})[r["arm"]] = r
    return found


def select(data: dict, keep: Callable[[Shape], bool], arms: tuple[str, ...]) -> list[tuple[Shape, dict[str, dict]]]:
    chosen = [(s, rows) for s, rows in by_shape(data).items() if keep(s) and any(a in rows for a in arms)]
    if not chosen:
        raise ReportError("no row of the result file belongs in this table")
    return chosen


def p50(rows: dict[str, dict], arm: str) -> float | None:
    return rows[arm]["us_p50"] if arm in rows else None


def is_base(s: Shape) -> bool:
    return (s.bs, s.s_q, s.h_q, s.kv_dtype, s.page_size) == (1, 9, 8, "bf16", 1)


def percent_of(data: dict, key: str, value: float) -> str:
    ceiling = data["header"]["ceilings"].get(key)
    return f"{100 * value / ceiling:.0f}" if ceiling else "-"


def context(data: dict) -> str:
    arms = ("triton_extend", "triton_decode", "flashinfer_full", "flashinfer_100k", "ours")
    rows = []
    for shape, r in select(data, is_base, arms):
        ours = p50(r, "ours")
        gbps = r["ours"]["gbps"] if ours else None
        rows.append(
            [f"{shape.prefix:,}"]
            + [us(p50(r, a)) for a in arms]
            + [f"{gbps:,.0f}" if gbps else "-", percent_of(data, "copy_gbps", gbps) if gbps else "-"]
            + [ratio(p50(r, a), ours) for a in ("triton_extend", "flashinfer_100k")]
        )
    return markdown(
        ["prefix", *(LABELS[a] for a in arms), "GB/s", "% copy", "vs Triton extend", "vs FlashInfer 100 KB"], rows
    )


def shapes(data: dict) -> str:
    arms = ("triton_extend", "triton_decode", "flashinfer_full", "flashinfer_100k", "ours")
    rows = []
    for shape, r in select(data, lambda s: not is_base(s) and s.kv_dtype == "bf16" and s.page_size == 1, arms):
        ours = p50(r, "ours")
        lengths = (
            " + ".join(f"{shape.prefixes.count(p)} x {p:,}" for p in dict.fromkeys(shape.prefixes))
            if shape.ragged
            else f"{shape.prefix:,}"
        )
        rows.append(
            [f"{shape.bs}, {shape.s_q}, {shape.h_q}", lengths]
            + [us(p50(r, a)) for a in arms]
            + [
                f"{r['ours']['tflops']:.0f}" if ours else "-",
                percent_of(data, "mma_tflops", r["ours"]["tflops"]) if ours else "-",
            ]
            + [ratio(p50(r, a), ours) for a in ("triton_extend", "flashinfer_full", "flashinfer_100k")]
        )
    columns = [
        "bs, q, h",
        "prefix",
        *(LABELS[a] for a in arms),
        "TFLOP/s",
        "% MMA",
        "vs Triton extend",
        "vs FlashInfer",
        "vs FlashInfer 100 KB",
    ]
    return markdown(columns, rows)


def ladder(data: dict) -> str:
    arms = ("torch_reference", "ladder_32bit_s16", "ladder_32bit_s64", "ladder_128bit_s64", "ours")
    rows = [
        [f"{s.prefix:,}"] + [us(p50(r, a)) for a in arms] + [ratio(p50(r, "ladder_128bit_s64"), p50(r, "ours"))]
        for s, r in select(data, is_base, arms)
    ]
    return markdown(["prefix", *(LABELS[a] for a in arms), "vs the last rung"], rows)


def _against_base(
    data: dict, keep: Callable[[Shape], bool], change: Callable[[Shape], Shape], names: tuple[str, str]
) -> str:
    found = by_shape(data)
    rows = []
    for shape, r in select(data, keep, ("ours",)):
        base = p50(found.get(change(shape), {}), "ours")
        ours = p50(r, "ours")
        label = [f"{shape.bs}, {shape.s_q}, {shape.h_q}", f"{shape.prefix:,}", shape.kv_dtype, str(shape.page_size)]
        rows.append([*label, us(base), us(ours), f"{base / ours:.2f}x" if base else "-", f"{r['ours']['gbps']:,.0f}"])
    return markdown(["bs, q, h", "prefix", "KV", "page", names[0], names[1], "speed", "GB/s"], rows)


def fp8(data: dict) -> str:
    return _against_base(
        data,
        lambda s: s.kv_dtype == "fp8",
        lambda s: Shape(s.prefixes, s.s_q, s.h_q, "bf16", s.page_size),
        ("bf16 KV", "fp8 KV"),
    )


def pages(data: dict) -> str:
    return _against_base(
        data,
        lambda s: s.page_size > 1,
        lambda s: Shape(s.prefixes, s.s_q, s.h_q, s.kv_dtype, 1),
        ("page 1", "whole pages"),
    )


def arithmetic(data: dict) -> str:
    return markdown(*arithmetic_sm120.report_table(data))


RATES = (
    ("copy_gbps", "copy", "GB/s"),
    ("read_gbps", "read", "GB/s"),
    ("l2_read_gbps", "L2 read", "GB/s"),
    ("mma_tflops", "mma.sync bf16", "TFLOP/s"),
)


def header(data: dict) -> str:
    h = data["header"]
    gpu, rates = h["gpu"] or {}, h["ceilings"]
    card = [gpu.get("name", h["device"])]
    card += [
        f"{label} {gpu[key]}"
        for key, label in (("driver_version", "driver"), ("power_limit", "power limit"))
        if key in gpu
    ]
    if "sms" in gpu:
        card.insert(1, f"{gpu['sms']} SMs")
    if "clocks_sm" in gpu:
        card.append(f"SM clock {gpu['clocks_sm']}{' right after the probes' if rates else ''}")
    lines = [f"{', '.join(card)}; {h['date'][:10]}, commit {h['commit'][:12]}."]
    measured = [f"{label} {rates[key]:,.0f} {unit}" for key, label, unit in RATES if rates.get(key)]
    if measured:
        lines.append(f"Measured in the same process: {', '.join(measured)}.")
    lines.append(f"Versions: {', '.join(f'{name} {v}' for name, v in h['versions'].items() if v)}.")
    return "\n".join(lines)


def geomeans(data: dict) -> str:
    rows = [[LABELS[arm], f"{value:.2f}x", str(count)] for arm, (value, count) in table.geomeans(data["rows"]).items()]
    return markdown(["arm", "time over ours, geometric mean", "shapes"], rows)


# us, as the issue of this kernel set them: bs, s_q, h_q, prefix.
TARGETS = {
    (1, 9, 8, 4096): 8,
    (1, 9, 8, 16384): 15,
    (1, 9, 8, 65536): 35,
    (1, 9, 8, 131072): 62,
    (1, 9, 8, 189440): 82,
    (1, 33, 8, 189440): 300,
    (1, 9, 64, 189440): 650,
    (8, 9, 8, 189440): 600,
}


def targets(data: dict) -> str:
    """Beside each the same shape with an fp8 cache, which was to be no slower anywhere."""
    found = by_shape(data)
    rows = []
    for (bs, s_q, h_q, prefix), target in TARGETS.items():
        times = [p50(found.get(Shape((prefix,) * bs, s_q, h_q, kv, 1), {}), "ours") for kv in ("bf16", "fp8")]
        over = f"{times[0] / target:.2f}" if times[0] else "-"
        rows.append([f"{bs}, {s_q}, {h_q}", f"{prefix:,}", str(target), us(times[0]), over, us(times[1])])
    return markdown(["bs, q, h", "prefix", "target", "bf16", "over the target", "fp8"], rows)


def roofline(data: dict) -> str:
    """What a call of 72 rows against 189,440 tokens cannot be quicker than, by rates measured in the same process."""
    tokens, rates = 189440, data["header"]["ceilings"]
    kv, flop = tokens * 1152, tokens * 80 * 2 * (576 + 512)
    parts = (
        ("KV once from memory", f"{kv / 1e6:.0f} MB", "copy_gbps", kv / 1e9),
        ("KV into the SMs, for each of two row tiles of 40", f"{2 * kv / 1e6:.0f} MB", "l2_read_gbps", 2 * kv / 1e9),
        ("MMA of 80 rows", f"{flop / 1e9:.0f} GFLOP", "mma_tflops", flop / 1e12),
    )
    names = {key: (label, unit) for key, label, unit in RATES}
    rows = [
        [what, amount, f"{rates[key]:,.0f} {names[key][1]} ({names[key][0]})", f"{need / rates[key] * 1e6:.0f}"]
        for what, amount, key, need in parts
    ]
    return markdown(["what", "amount", "rate, measured", "us"], rows)


def ddtree_build(data: dict) -> str:
    rows = [
        [str(r["bs"]), str(r["n"]), str(r["k"]), str(r["depth"]), f"{r['us_p50']:.1f}"]
        for r in sorted(data["rows"], key=lambda r: (r["n"], r["bs"], r["depth"]))
        if r["op"] == "ddtree_build"
    ]
    return markdown(["b", "N", "K", "depth", "us"], rows)


def candidates(data: dict) -> str:
    """us of choosing a draft's tokens, by batch and vocabulary"""
    arms, found = ("ours", "torch", "argmax"), {}
    for r in data["rows"]:
        found.setdefault((r["vocab"], r["bs"]), {})[r["arm"]] = f"{r['us_p50']:,.0f}"
    rows = [[f"{vocab:,}", str(bs), *(us[arm] for arm in arms)] for (vocab, bs), us in found.items()]
    return markdown(["vocabulary", "b", "the best 31", "torch's topk and logsumexp", "argmax alone"], rows)


def _experiments(name: str) -> Callable[[dict], str]:
    return lambda data: markdown(*verify_experiments.TABLES[name](data))


LAYERS = 61  # of Kimi K2.6


def attention_of_a_step(data: dict) -> str:
    """Arithmetic on measured rows: what the layers' attention takes of one step, one call after another."""
    arms = ("triton_decode", "triton_extend", "ours")
    rows = [
        [f"{shape.prefix:,}"] + [f"{LAYERS * p50(r, a) / 1e3:,.2f}" if a in r else "-" for a in arms]
        for shape, r in select(data, is_base, arms)
    ]
    return markdown(["prefix", *(f"{LABELS[a]}, ms" for a in arms)], rows)


def one_rank_header(data: dict) -> str:
    h = data["header"]
    if h["scale"] != "full":
        raise ReportError(f"the result is of scale {h['scale']!r}, which says nothing about speed")
    model, gpu, window = h["model"], h["gpu"] or {}, h["draft_window"]
    seen = f"the last {window:,} tokens" if window else "the whole context"
    return (
        f"{gpu.get('name', h['device'])}, driver {gpu.get('driver_version', 'unknown')}; {h['date'][:10]}, commit "
        f"{h['commit'][:12]}. {model['num_hidden_layers']} layers, {model['num_attention_heads']} heads a rank, one "
        f"request. The drafter of DFLASH and DDTREE sees {seen}. "
        f"Versions: {', '.join(f'{name} {v}' for name, v in h['versions'].items() if v)}."
    ) + "".join(
        f" Of {call['date'][:10]}, commit {call['commit'][:12]}: {', '.join(call['made'])}."
        for call in h.get("runs", [])
    )


def _one_rank(make: Callable[[dict], tuple[list[str], list[list[str]]]]) -> Callable[[dict], str]:
    def render_table(data: dict) -> str:
        one_rank_header(data)
        columns, rows = make(data)
        # A run need not have had every arm.
        return markdown(columns, rows) if rows else NOT_MEASURED

    return render_table


def expert_tiles(data: dict) -> str:
    return markdown(*tune_experts.table(data))


def two_ranks_header(data: dict) -> str:
    if data["header"]["device"] != "cuda":
        raise ReportError("the result is of a CPU, which says nothing about two GPUs")
    return two_ranks_table.header(data)


def _two_ranks(part: str) -> Callable[[dict], str]:
    def render_table(data: dict) -> str:
        two_ranks_header(data)
        if data["header"]["part"] != part:
            raise ReportError(f"the result is of the part {data['header']['part']!r}")
        columns, rows = getattr(two_ranks_table, part)(data)
        if not rows:
            raise ReportError("no row of the result file belongs in this table")
        return markdown(columns, rows)

    return render_table


TABLES: dict[str, Callable[[dict], str]] = {
    f.__name__: f
    for f in (header, context, shapes, ladder, fp8, pages, arithmetic, geomeans, attention_of_a_step, targets, roofline)
} | {
    "ddtree_build": ddtree_build,
    "experiments_header": verify_experiments.header,
    **{name: _experiments(name) for name in verify_experiments.TABLES},
    "acceptance_lengths": acceptance_table.acceptance_lengths,
    "acceptance_adaptive": acceptance_table.acceptance_adaptive,
    "commit_length_header": acceptance_table.commit_length_header,
    "commit_length": acceptance_table.commit_length,
}
ENGINE_TABLES = (
    acceptance_table.engine_header,
    acceptance_table.engine_acceptance,
    acceptance_table.engine_speeds,
    acceptance_table.engine_against_chain,
    acceptance_table.engine_paired,
    acceptance_table.engine_ways,
    acceptance_table.engine_adaptive,
)
# Of runs that a document may describe before anybody has made them.
OPTIONAL_TABLES: dict[str, Callable[[dict], str]] = {
    "one_rank_header": one_rank_header,
    **{
        f"one_rank_{make.__name__}": _one_rank(make)
        for make in (
            one_rank_table.steps,
            one_rank_table.larger_trees,
            one_rank_table.speeds,
            one_rank_table.eagle,
            one_rank_table.kernels,
            one_rank_table.differences,
            one_rank_table.beside,
            one_rank_table.collapse,
        )
    },
    "expert_tiles": expert_tiles,
    "candidates": candidates,
    **{f"acceptance_{make.__name__}": make for make in ENGINE_TABLES},
    "two_ranks_header": two_ranks_header,
    **{f"two_ranks_{part}": _two_ranks(part) for part in two_ranks_results.ROW_KEYS},
}
one_rank_steps = OPTIONAL_TABLES["one_rank_steps"]  # python/series.toml names it
NOT_MEASURED = "Not measured yet."
LOADERS = {
    results.FORMAT: results.load,
    one_rank_results.FORMAT: one_rank_results.load,
    tune_experts.FORMAT: tune_experts.load,
    acceptance_results.FORMAT: acceptance_results.load,
    acceptance_results.ENGINE_FORMAT: acceptance_results.load_engine,
    acceptance_results.COMMIT_LENGTH_SCHEMA: acceptance_results.load_commit_length,
    two_ranks_results.FORMAT: two_ranks_results.load,
    verify_experiments.FORMAT: verify_experiments.load,
    **dict.fromkeys(("ddtree-1", "candidates-1", "kv_layout-1"), lambda path: json.loads(path.read_text())),
}


def load_any(path: Path) -> dict:
    """A result file of any format, checked by that format's rules."""
    data = json.loads(path.read_text())
    found = data.get("header", data).get("format") if isinstance(data, dict) else None
    if found is None and isinstance(data, dict) and data.get("runs"):  # what the kit's verbs wrote
        found = next(iter(data["runs"].values())).get("schema")
    return LOADERS.get(found, results.load)(path)


def body_of(name: str, file: str, load: Callable[[str], dict]) -> str:
    if name not in OPTIONAL_TABLES:
        return TABLES[name](load(file))
    try:
        data = load(file)
    except FileNotFoundError:
        return NOT_MEASURED
    return OPTIONAL_TABLES[name](data)


def render(text: str, load: Callable[[str], dict], where: str) -> str:
    """The document with every block filled in; a block inside a ``` fence is an example and stays."""
    out: list[str] = []
    lines = text.split("\n")
    i, fenced = 0, False
    while i < len(lines):
        out.append(lines[i])
        fenced ^= lines[i].startswith("```")
        m = None if fenced else OPEN.match(lines[i])
        if not m:
            if not fenced and lines[i].startswith("<!-- results:"):
                raise ReportError(f"{where}:{i + 1}: expected '<!-- results: TABLE FILE -->', got '{lines[i]}'")
            i += 1
            continue
        try:
            end = next(j for j in range(i + 1, len(lines)) if lines[j] == CLOSE or OPEN.match(lines[j]))
        except StopIteration:
            end = i
        if lines[end] != CLOSE:
            raise ReportError(f"{where}:{i + 1}: no '{CLOSE}' after this block's start")
        known = [*TABLES, *OPTIONAL_TABLES]
        if m["table"] not in known:
            raise ReportError(f"{where}:{i + 1}: no table '{m['table']}'; there are {', '.join(known)}")
        try:
            body = body_of(m["table"], m["file"], load)
        except (OSError, ValueError, ReportError) as e:
            raise ReportError(f"{where}:{i + 1}: {m['table']}: {e}") from e
        out += [body, CLOSE]
        i = end + 1
    return "\n".join(out)


def documents(root: Path) -> list[Path]:
    found = []
    for path in sorted(root.rglob("*.md")):
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts) and "<!-- results:" in path.read_text():
            found.append(path)
    return found


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="documents (default: every *.md with a block)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a document is out of date")
    args = parser.parse_args(argv)
    stale = 0
    cache: dict[str, dict] = {}

    def load(name: str) -> dict:
        if name not in cache:
            cache[name] = load_any(root / name)
        return cache[name]

    for path in args.files or documents(root):
        old = path.read_text()
        try:
            new = render(old, load, str(path))
        except ReportError as e:
            print(f"report: {e}", file=sys.stderr)
            return 2
        if new == old:
            continue
        if args.check:
            stale += 1
            sys.stdout.writelines(
                difflib.unified_diff(
                    old.splitlines(True), new.splitlines(True), f"{path} (in the tree)", f"{path} (from the results)"
                )
            )
        else:
            path.write_text(new)
            print(f"wrote {path}")
    if stale:
        print(f"report: {stale} document(s) differ from the results; run python benchmark/report.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
