# SPDX-License-Identifier: Apache-2.0
"""Put the runs of a later call of one_rank or backend_e2e into the result file of an earlier one. Needs no GPU.

    python benchmark/merge_results.py FIRST.json LATER.json --out FIRST.json

All rows of a run (an arm at a size; an Engine of backend_e2e) that the later file has replace those of the first. The
header stays the first's, and its "runs" lists each later call with what it made. Files that do not belong together
(other format, device, GPU, model, scale, drafter's window or experts' tiles) are refused. A profile that was not cut to
whole steps is dropped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "kernels")]

import backend_e2e  # noqa: E402
from one_rank import results as one_rank  # noqa: E402

ALIKE = ("format", "device", "scale", "model", "drafter", "draft_window", "expert_tiles", "rule")
MISSING = {one_rank.FORMAT: "not_available", backend_e2e.FORMAT: "not_run"}


def run_of(item: dict) -> str:
    """Of a row, or of what is said to be missing."""
    if "name" in item:
        return item["name"]
    parts = [f"{item['arm']}-{item['s_q']}"]
    if item.get("kv_dtype", "bf16") != "bf16":
        parts.append(item["kv_dtype"])
    if item.get("page_size", 1) > 1:
        parts.append(f"page{item['page_size']}")
    return " ".join(parts)


def merge(first: dict, later: dict) -> dict:
    """ValueError where the two do not belong together."""
    kind = first["header"].get("format")
    if kind not in MISSING:
        raise ValueError(f"format {kind!r} is neither one_rank's nor backend_e2e's")
    for name in ALIKE:
        mine, theirs = first["header"].get(name), later["header"].get(name)
        if mine != theirs:
            raise ValueError(f"the headers differ in {name!r}")
    cards = [(data["header"].get("gpu") or {}).get("name") for data in (first, later)]
    if cards[0] != cards[1]:
        raise ValueError(f"the first file is of {cards[0]}, the later one of {cards[1]}")
    made = list(dict.fromkeys(run_of(row) for row in later["rows"]))
    rows = [row for row in first["rows"] if run_of(row) not in made] + later["rows"]
    if kind == one_rank.FORMAT:
        rows = [without_uncut_profile(row) for row in rows]
    there = {run_of(row) for row in rows}
    missing = {run_of(item): item for data in (first, later) for item in data.get(MISSING[kind], [])}
    # What the later call did not finish either is missing still; an arm with some rows may be said to lack others.
    kept = [item for run, item in missing.items() if run not in there or item in later.get(MISSING[kind], [])]
    call = {name: later["header"].get(name) for name in ("date", "commit", "options")} | {"made": made}
    runs = [*first["header"].get("runs", []), call, *later["header"].get("runs", [])]
    return {"header": first["header"] | {"runs": runs}, "rows": rows, MISSING[kind]: kept}


def without_uncut_profile(row: dict) -> dict:
    if row.get("profiled_steps"):
        return row
    return {name: value for name, value in row.items() if name not in ("kernels_us", "profiled_steps")}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        data = merge(*(json.loads(path.read_text()) for path in (args.first, args.later)))
        if data["header"]["format"] == one_rank.FORMAT:
            found = one_rank.problems(data)
            if found:
                raise ValueError("; ".join(found[:5]))
            one_rank.save(args.out, data)
        else:
            backend_e2e.save(args.out, data)
    except ValueError as error:
        print(f"merge_results: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(data['rows'])} rows; made later: {', '.join(data['header']['runs'][-1]['made'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
