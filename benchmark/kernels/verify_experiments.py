# SPDX-License-Identifier: Apache-2.0
"""Experiments beside the verify kernel: from what its test programs print to one result file and its tables.

    python benchmark/kernels/verify_experiments.py RAW --describe variants.json --out verify_experiments.json

RAW holds a folder for each run on a GPU. Of a run are read, where there are any: time.txt and check.txt (builds of the
kernel, each after a line "== NAME"), gather*.txt (a gather and nothing else), x*.txt (other main loops),
sanitizer_*.txt (compute-sanitizer) and NAME.details.txt with NAME.source.csv (ncu). variants.json has what no program
prints: the header's card, versions and what each variant is; runs: folder -> the build of files that name none; and
rows, where more than a program's output is gone and a table of its numbers is left.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from verify_bench import result_file

FORMAT = "verify_experiments-1"
HEADER_KEYS = {"format": str, "date": str, "gpu": dict, "versions": dict, "method": str, "variants": dict}
KINDS: dict[str, dict] = {
    "build": {"variant": str, "bs": int, "s_q": int, "h_q": int, "prefix": int, "kv_dtype": str, "us": float},
    "check": {"variant": str, "cases": int, "wrong": int, "worst_rel": float},
    "gather": {"copy": str, "stages": int, "readers": int, "cluster": int, "slots": str, "us": float},
    "loop": {"variant": str, "prefix": int, "cluster": int, "group": int, "slots": str, "merge": bool, "us": float},
    "sanitizer": {"variant": str, "tool": str, "kv_dtype": str, "errors": int},
    "profile": {"variant": str, "kv_dtype": str, "us": float, "sm_ghz": float, "percent": dict, "busy": dict},
    "clocks": {"variant": str, "role": str, "total": int, "parts": dict},
    "benchmark": {"commit": str, "bs": int, "s_q": int, "h_q": int, "prefix": int, "kv_dtype": str, "us": float},
}

TIME = re.compile(
    r"^time (bf16|fp8) +bs (\d+) q (\d+) h (\d+) prefix +(\d+): +([\d.]+) us \(min ([\d.]+), (\d+) layers\)"
)
CHECK = re.compile(r"^check (bf16|fp8) .*: rel ([\d.e+-]+|nan|inf) .*(ok|WRONG|BAD)?$")
GATHER = re.compile(
    r"^(\S+) +pitch +(\d+) stages +(\d+) readers (\d) cluster (\d) (prefetch|group) +(\d+) (all|window) +([\d.]+) us"
)
LOOP = re.compile(
    r"^time tokens +(\d+) cluster (\d) group +(\d+) (all|window) +"
    r"(with merge|main only) *: +([\d.]+) us \(min ([\d.]+)\)"
)
METRIC = re.compile(r"^ +(\S.*?)  +(\S+) +([\d.,]+)$")
# ncu's name of a metric -> ours. The first section that has it counts.
SHARES = {
    "SM: Issue Active": "issue",
    "SM: Pipe Tensor Cycles Active": "tensor",
    "L1: Data Pipe Lsu Wavefronts": "shared_memory",
    "DRAM Throughput": "dram",
}


def sections(text: str, first: str) -> Iterator[tuple[str, list[str]]]:
    """The lines after each line "== NAME"; those before any belong to `first`."""
    name, lines = first, []
    for line in text.splitlines():
        if line.startswith("== "):
            if lines:
                yield name, lines
            name, lines = line[3:].split()[0], []
        else:
            lines.append(line)
    yield name, lines


def read_times(text: str, first: str) -> Iterator[dict]:
    for variant, lines in sections(text, first):
        for m in filter(None, map(TIME.match, lines)):
            bs, prefix = int(m[2]), int(m[5])
            # The program's only batch is one long request beside short ones.
            yield {"kind": "build", "variant": variant, "bs": bs, "s_q": int(m[3]), "h_q": int(m[4])} | {
                "prefix": prefix,
                "prefixes": [prefix] + [1024] * (bs - 1),
                "kv_dtype": m[1],
                "us": float(m[6]),
                "us_min": float(m[7]),
                "layers": int(m[8]),
            }


def read_checks(text: str, first: str) -> Iterator[dict]:
    for variant, lines in sections(text, first):
        lines = [line for line in lines if line.startswith("check ")]
        errors = [float(m[2]) for m in map(CHECK.match, lines) if m]
        wrong = sum(not line.endswith(" repeats that differ 0 ok") for line in lines)
        if lines:
            yield {"kind": "check", "variant": variant, "cases": len(lines), "wrong": wrong, "worst_rel": max(errors)}


def read_gather(text: str) -> Iterator[dict]:
    for m in filter(None, map(GATHER.match, text.splitlines())):
        yield {"kind": "gather", "copy": m[1], "pitch": int(m[2]), "stages": int(m[3]), "readers": int(m[4])} | {
            "cluster": int(m[5]),
            "prefetch": int(m[7]) if m[6] == "prefetch" else 0,
            "group": int(m[7]) if m[6] == "group" else 0,
            "slots": m[8],
            "us": float(m[9]),
        }


def read_loops(text: str, first: str) -> Iterator[dict]:
    for variant, lines in sections(text, first):
        for m in filter(None, map(LOOP.match, lines)):
            yield {"kind": "loop", "variant": variant, "prefix": int(m[1]), "cluster": int(m[2])} | {
                "group": int(m[3]),
                "slots": m[4],
                "merge": m[5] == "with merge",
                "us": float(m[6]),
                "us_min": float(m[7]),
            }


def read_sanitizer(name: str, text: str, first: str) -> dict:
    """sanitizer_[VARIANT_]TOOL[_KV].txt"""
    *variant, tool, kv = (name if name.endswith(("_bf16", "_fp8")) else name + "_bf16").split("_")[1:]
    found = re.search(r"(?:ERROR SUMMARY: |\()(\d+) errors?", text)
    if not found:
        raise ValueError(f"{name}: no summary of compute-sanitizer")
    return {
        "kind": "sanitizer",
        "variant": "_".join(variant) or first,
        "tool": tool,
        "kv_dtype": kv,
        "errors": int(found[1]),
    }


def read_roles(lines: list[str]) -> dict[str, float]:
    """Of ncu's samples of SASS: the share of a role's samples that are not at a barrier. A role begins where its
    registers are set, and its instructions tell which it is."""
    rows = list(csv.reader(lines))[1:]
    at = {name: i for i, name in enumerate(rows.pop(0))}
    code = [(r[at["Source"]].strip(), int(r[at["# Samples"]] or 0), int(r[at["Instructions Executed"]])) for r in rows]
    starts = [i for i, (text, *_) in enumerate(code) if "USETMAXREG" in text] + [len(code)]
    busy = {}
    for a, b in zip(starts, starts[1:], strict=False):
        executed: dict[str, int] = {}
        waiting, in_wait = 0, False
        for text, samples, count in code[a:b]:
            name = re.sub(r"^@!?U?PT?\d* +", "", text).split(".")[0].split(" ")[0]
            executed[name] = executed.get(name, 0) + count
            in_wait |= "PHASECHK" in text
            waiting += samples * in_wait
            in_wait &= "BRA" not in text
        if executed.get("LDGSTS"):
            role = "load"
        elif executed.get("HMMA"):
            role = "value" if "score" in busy else "score"
        else:
            role = "softmax"
        busy[role] = round(1 - waiting / sum(samples for _, samples, _ in code[a:b]), 3)
    return busy


def read_profile(details: str, source: list[str] | None) -> dict:
    program = re.match(r"\[\d+\] (\S+)@", details)[1]
    percent: dict[str, float] = {}
    other: dict[str, float] = {}
    for m in filter(None, map(METRIC.match, details.splitlines())):
        value = float(m[3].replace(",", ""))
        if m[1] in SHARES and m[2] == "%":
            percent.setdefault(SHARES[m[1]], value)
        elif m[1] in ("SM Frequency", "Duration"):
            other.setdefault(m[1], value)
    return {
        "kind": "profile",
        "variant": program,
        "kv_dtype": "fp8" if "Fp8Kv" in details else "bf16",
        "us": other["Duration"],
        "sm_ghz": other["SM Frequency"],
        "percent": percent,
        "busy": read_roles(source) if source else {},
    }


def read_run(folder: Path, first: str) -> Iterator[dict]:
    for path in sorted(folder.glob("*.txt")):
        text, name = path.read_text(), path.name
        if name == "time.txt":
            yield from read_times(text, first)
        elif name == "check.txt":
            yield from read_checks(text, first)
        elif name.startswith("gather"):
            yield from read_gather(text)
        elif name.startswith("sanitizer_"):
            yield read_sanitizer(path.stem, text, first)
        elif name.endswith(".details.txt"):
            source = path.with_name(name.replace(".details.txt", ".source.csv"))
            whole = source.exists() and name != "x1.details.txt"  # which has other roles
            if text.startswith("["):
                yield read_profile(text, source.read_text().splitlines() if whole else None)
        elif name.startswith("x"):
            yield from read_loops(text, path.stem)


def read_benchmark(data: dict) -> Iterator[dict]:
    """Our rows of a result file of the benchmark, such as one that a newer file has replaced since."""
    for row in data["rows"]:
        if row["arm"] == "ours" and row["page_size"] == 1:
            keep = ("bs", "s_q", "h_q", "prefix", "prefixes", "kv_dtype")
            yield {"kind": "benchmark", "commit": data["header"]["commit"][:7], **{k: row[k] for k in keep}} | {
                "us": row["us_p50"],
                "us_min": row["us_p20"],
            }


def problems(data: dict) -> list[str]:
    """What is wrong with a result file; empty when it is one."""
    found, rows = result_file.field_problems(
        data, format=FORMAT, header_keys=HEADER_KEYS, row_keys={"kind": str, "run": str}, missing_keys={}
    )
    for i, row in rows:
        keys = KINDS.get(row["kind"])
        if keys is None:
            found.append(f"row {i}: no kind {row['kind']!r}; there are {', '.join(KINDS)}")
            continue
        found += [f"row {i}: '{k}' is {row.get(k)!r}" for k, kind in keys.items() if not isinstance(row.get(k), kind)]
        if "variant" in keys and row.get("variant") not in data["header"]["variants"]:
            found.append(f"row {i}: the header does not describe the variant {row.get('variant')!r}")
        if "us" in keys and not row.get("us", 0) > 0:
            found.append(f"row {i}: us is {row.get('us')!r}")
    return found


def load(path: Path) -> dict:
    return result_file.load(path, problems)


# Tables: (columns, rows), as benchmark/report.py writes them.
Table = tuple[list[str], list[list[str]]]
SHAPES = [
    *((1, 9, p, "bf16") for p in (200, 1024, 4096, 65536, 189440)),
    (1, 33, 189440, "bf16"),
    (8, 9, 189440, "bf16"),
    *((1, 9, p, "fp8") for p in (1024, 65536, 189440)),
    (1, 33, 189440, "fp8"),
]
SHORT_SHAPES = [(1, 9, p, kv) for kv in ("bf16", "fp8") for p in (200, 1024, 4096, 16384, 189440)]


def of(data: dict, kind: str) -> list[dict]:
    return [row for row in data["rows"] if row["kind"] == kind]


def us(values: list[float]) -> str:
    """The median of the turns."""
    if not values:
        return "-"
    value = statistics.median(values)
    return f"{value:.0f}" if value >= 200 else f"{value:.1f}"


def span(values: list[float]) -> str:
    if not values:
        return "-"
    low, high = (f"{v:.0f}" if v >= 100 else f"{v:.1f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def what(data: dict, variant: str) -> str:
    return data["header"]["variants"][variant]["what"]


def build_table(data: dict, table: str, shapes: list[tuple]) -> Table:
    """Builds of the kernel itself, in the order of the header: the median of all turns of all runs. A variant of the
    header may name the table that it belongs to."""
    times: dict[tuple, list[float]] = {}
    for r in of(data, "build"):
        times.setdefault((r["variant"], r["bs"], r["s_q"], r["prefix"], r["kv_dtype"]), []).append(r["us"])
    columns = ["build", "turns"]
    for bs, s_q, prefix, kv in shapes:
        name = f"{prefix:,}{' + 7 x 1,024' if bs > 1 else ''}{f', q {s_q}' if s_q != 9 else ''}"
        columns.append(f"{'fp8 ' if kv == 'fp8' else ''}{name}")
    rows = []
    for variant, described in data["header"]["variants"].items():
        found = [times.get((variant, *shape), []) for shape in shapes]
        if any(found) and described.get("table", "builds") == table:
            rows.append([f"`{variant}`: {what(data, variant)}", str(max(map(len, found))), *map(us, found)])
    return columns, rows


def builds(data: dict) -> Table:
    return build_table(data, "builds", SHAPES)


def short(data: dict) -> Table:
    """The builds that were about short contexts."""
    return build_table(data, "short", SHORT_SHAPES)


def rows(data: dict) -> Table:
    """The builds that were about the rows and SMs of a block, at 189,440 tokens where not said: each run's turns are of
    one process that heats the card, so that they vary more than in the other tables."""
    shapes = [(9, 8, p, "bf16") for p in (4096, 16384, 65536, 189440)]
    shapes += [(q, 8, 189440, "bf16") for q in (8, 10, 33)] + [(9, 64, 189440, "bf16")]
    shapes += [(33, 8, 4096, "bf16"), (9, 64, 4096, "bf16"), (9, 8, 189440, "fp8"), (33, 8, 189440, "fp8")]
    times: dict[tuple, list[float]] = {}
    for r in of(data, "build"):
        times.setdefault((r["variant"], r["s_q"], r["h_q"], r["prefix"], r["kv_dtype"]), []).append(r["us"])
    columns = ["build"]
    for q, h, prefix, kv in shapes:
        names = ["fp8"] * (kv == "fp8") + [f"{prefix:,}"] * (prefix != 189440 or (q, h) == (9, 8))
        columns.append(", ".join([*names, *[f"q {q}"] * (q != 9), *[f"h {h}"] * (h != 8)]))
    cells = [
        [f"`{v}`: {what(data, v)}", *(span(times.get((v, *shape), [])) for shape in shapes)]
        for v, described in data["header"]["variants"].items()
        if described.get("table") == "rows"
    ]
    return columns, cells


def profile(data: dict) -> Table:
    shares, roles = list(SHARES.values()), ["load", "score", "softmax", "value"]
    rows = [
        [r["variant"], r["kv_dtype"], f"{r['us']:.1f}", f"{r['sm_ghz']:.2f}"]
        + [f"{r['percent'][k]:.0f}" for k in shares]
        + [f"{100 * r['busy'][k]:.0f}" if r["busy"] else "-" for k in roles]
        for r in of(data, "profile")
    ]
    used = ["issue slots %", "tensor pipe %", "shared memory %", "DRAM %"]
    return ["build", "KV", "us", "GHz", *used, *(f"{role} warps busy %" for role in roles)], rows


def clocks(data: dict) -> Table:
    """What the warps of a role spend on a tile, by the clock register: reading it costs a tenth of the time."""
    found: dict[tuple[str, str], list[dict]] = {}
    for r in of(data, "clocks"):
        found.setdefault((r["variant"], r["role"]), []).append(r)
    cells = []
    for (variant, role), turns in found.items():
        parts = [f"{p} {statistics.mean(t['parts'][p] for t in turns):.0f}" for p in turns[0]["parts"]]
        total = f"{statistics.mean(t['total'] for t in turns):.0f}"
        cells.append([f"`{variant}`", role, total, ", ".join(parts)])
    return ["build", "warp", "clocks a tile", "of which"], cells


def sanitizers(data: dict) -> Table:
    tools = ("memcheck", "initcheck", "synccheck", "racecheck")
    found: dict[tuple[str, str], dict[str, int]] = {}
    for r in of(data, "sanitizer"):
        found.setdefault((r["variant"], r["kv_dtype"]), {})[r["tool"]] = r["errors"]
    rows = [[variant, kv, *(str(e.get(tool, "-")) for tool in tools)] for (variant, kv), e in found.items()]
    return ["build", "KV", *tools], rows


COPIES = {
    "cp.async": "`cp.async`, 16 bytes a thread",
    "bulk": "`cp.async.bulk`, a row each",
    "tensor": "a tensor map, a row each",
    "tensor9": "a tensor map, nine copies a row",
}


def gather(data: dict) -> Table:
    rows = []
    for copy, ahead in [(c, a) for c in COPIES for a in (False, True)]:
        cells = [
            span([
                r["us"]
                for r in of(data, "gather")
                if (r["copy"], r["slots"], r["readers"], r["group"]) == (copy, slots, readers, 0)
                and bool(r["prefetch"]) == ahead
            ])
            for readers in (1, 2)
            for slots in ("all", "window")
        ]  # fmt: skip
        if set(cells) != {"-"}:
            rows.append([COPIES[copy] + (", and prefetched into L2 6 to 32 tiles ahead" if ahead else ""), *cells])
    return ["how", "one reader", "one reader, from L2", "two readers", "two readers, from L2"], rows


def order(data: dict) -> Table:
    """Two readers, the second of which swaps groups of G tiles; beside it a main loop that does so."""
    groups = sorted({r["group"] for r in of(data, "gather")} | {r["group"] for r in of(data, "loop")})
    bare = [r for r in of(data, "gather") if (r["readers"], r["slots"], r["prefetch"]) == (2, "all", 0)]
    # The runs with groups: the others did not have any.
    runs = {r["run"] for r in bare if r["group"]}
    bare = [r for r in bare if r["run"] in runs]
    loop = [r for r in of(data, "loop") if r["merge"] and r["prefix"] == 189440 and r["slots"] == "all"]
    loop = [r for r in loop if r["variant"] in {x["variant"] for x in loop if x["group"]}]
    rows = [
        [str(g), span([r["us"] for r in bare if r["group"] == g]), span([r["us"] for r in loop if r["group"] == g])]
        for g in groups
    ]
    return ["G", "gather alone", "main loop A"], rows


def loops(data: dict) -> Table:
    found = of(data, "loop")
    lengths = (1024, 4096, 16384, 65536, 189440)

    def cell(variant: str, prefix: int, slots: str = "all", merge: bool = True, cluster: int = 1) -> str:
        wanted = (variant, prefix, slots, merge, cluster, 0)
        keys = ("variant", "prefix", "slots", "merge", "cluster", "group")
        return span([r["us"] for r in found if tuple(r[k] for k in keys) == wanted])

    rows = [
        [what(data, v), *(cell(v, p) for p in lengths)]
        + [cell(v, 189440, merge=False), cell(v, 189440, "window", False), cell(v, 189440, cluster=2)]
        for v, described in data["header"]["variants"].items()
        if described.get("table") != "clusters" and any(r["variant"] == v for r in found)
    ]
    last = [f"{lengths[-1]:,}, {how}" for how in ("no merge", "no merge, from L2", "in clusters of two")]
    return ["loop", *(f"{p:,}" for p in lengths), *last], rows


def clusters(data: dict) -> Table:
    """Loops of two blocks that share a gather: microseconds with the merge, and at the longest length without it and
    with slots in a window that L2 holds."""
    lengths = (1024, 4096, 16384, 65536, 189440)
    times: dict[tuple, list[float]] = {}
    for r in of(data, "loop"):
        times.setdefault((r["variant"], r["prefix"], r["slots"], r["merge"]), []).append(r["us"])
    cases = [(p, "all", True) for p in lengths] + [(189440, "all", False), (189440, "window", True)]
    rows = [
        [f"`{v}`: {what(data, v)}", *(span(times.get((v, *case), [])) for case in cases)]
        for v, described in data["header"]["variants"].items()
        if described.get("table") == "clusters"
    ]
    return ["loop", *(f"{p:,}" for p in lengths), "189,440, no merge", "189,440, from L2"], rows


def history(data: dict) -> Table:
    """What the benchmark gave for the commits before, and the prototype."""
    found = of(data, "benchmark")
    commits = list(dict.fromkeys(r["commit"] for r in found))
    shapes = [(1, 9, 8, p, "bf16") for p in (1024, 4096, 16384, 65536, 131072, 189440)]
    shapes += [(1, 33, 8, 189440, "bf16"), (1, 9, 64, 189440, "bf16"), (8, 9, 8, 189440, "bf16")]
    shapes += [(1, 9, 8, p, "fp8") for p in (1024, 4096, 65536, 189440)] + [(1, 33, 8, 189440, "fp8")]
    rows = []
    for bs, s_q, h_q, prefix, kv in shapes:
        for ragged in (False, True) if bs > 1 else (False,):
            cells = [
                us([
                    r["us"]
                    for r in found
                    if (r["commit"], r["bs"], r["s_q"], r["h_q"], r["prefix"], r["kv_dtype"])
                    == (commit, bs, s_q, h_q, prefix, kv)
                    and (len(set(r["prefixes"])) > 1) == ragged
                ])
                for commit in commits
            ]  # fmt: skip
            length = f"{prefix:,}{' + 7 x 1,024' if ragged else ''}"
            rows.append([f"{bs}, {s_q}, {h_q}", length, kv, *cells])
    return ["bs, q, h", "prefix", "KV", *(what(data, c) for c in commits)], rows


TABLES: dict[str, Callable[[dict], Table]] = {
    f"experiments_{f.__name__}": f
    for f in (history, builds, short, rows, clocks, profile, sanitizers, gather, order, loops, clusters)
}


def header(data: dict) -> str:
    h, gpu = data["header"], data["header"]["gpu"]
    versions = ", ".join(f"{name} {value}" for name, value in h["versions"].items())
    return f"{gpu['name']}, {gpu['sms']} SMs, {h['date']}; {versions}. {h['method']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw", type=Path, help="a folder with a folder for each run")
    parser.add_argument("--describe", type=Path, required=True, help="JSON: header, runs, perhaps rows")
    parser.add_argument("--benchmark", type=Path, nargs="*", default=[], help="older result files of the benchmark")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    described = json.loads(args.describe.read_text())
    data = {"header": {"format": FORMAT, **described["header"]}, "rows": described.get("rows", [])}
    for path in args.benchmark:
        data["rows"] += [{"run": path.stem, **row} for row in read_benchmark(json.loads(path.read_text()))]
    for folder, first in described["runs"].items():
        data["rows"] += [{"run": folder, **row} for row in read_run(args.raw / folder, first)]
    found = problems(data)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    result_file.save(args.out, data)
    print(f"wrote {args.out}: {len(data['rows'])} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
