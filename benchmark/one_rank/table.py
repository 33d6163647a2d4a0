# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md, as (columns, rows) of text."""

from __future__ import annotations

from .shapes import ACCEPT_LENGTHS, ARMS

# Of each context: the time of a step in these arms, at the smallest tree size.
MAIN = (
    "plain_triton",
    "plain_kdtree",
    "dflash_triton",
    "dflash_kdtree",
    "tree_triton",
    "tree_kdtree_eager",
    "tree_kdtree",
)

# The earlier deployment: tokens a second with CUDA graphs, context -> a tree on upstream's Triton, and
# on a kernel of its own.
EARLIER = {4_096: (39.0, 116.5), 16_384: (6.8, 29.1), 65_536: (1.5, 9.2)}
# Its streaming benchmark before that kernel, on novel prose, of which a step accepted 1.00 tokens:
# a context of ours -> its context, tokens a second.
COLLAPSE = {
    1_400: (1_427, 118.6), 11_264: (11_402, 19.9), 32_768: (31_952, 6.3), 65_536: (63_903, 2.8),
    131_072: (127_802, 1.4), 185_000: (184_728, 0.7),
}  # fmt: skip


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def by_context(data: dict, s_q: int | None = None) -> dict[int, dict[str, dict]]:
    """context -> arm -> row, at bf16 and page size 1; of arms with sizes those of s_q (default: the smallest)."""
    rows = [r for r in data["rows"] if (r["kv_dtype"], r["page_size"]) == ("bf16", 1)]
    sizes = sorted({r["s_q"] for r in rows if ARMS[r["arm"]].has_sizes})
    wanted = s_q if s_q is not None else (sizes[0] if sizes else None)
    found: dict[int, dict[str, dict]] = {}
    for row in sorted(rows, key=lambda r: r["context"]):
        if not ARMS[row["arm"]].has_sizes or row["s_q"] == wanted:
            found.setdefault(row["context"], {})[row["arm"]] = row
    return found


def steps(data: dict, s_q: int | None = None) -> tuple[list[str], list[list[str]]]:
    arms = [arm for arm in MAIN if any(r["arm"] == arm for r in data["rows"])]
    rows = []
    for context, of in by_context(data, s_q).items():
        tree, stock, plain = (of.get(arm) for arm in ("tree_kdtree", "tree_triton", "plain_triton"))

        def ratio(other, tree=tree):
            return f"{other['ms_per_step_p50'] / tree['ms_per_step_p50']:.2f}x" if other and tree else "-"

        rows.append(
            [f"{context:,}"]
            + [ms(of[arm]["ms_per_step_p50"] if arm in of else None) for arm in arms]
            + [ratio(stock), ratio(plain)]
        )
    return ["context", *(ARMS[a].label for a in arms), "tree over Triton's tree", "tree over plain Triton"], rows


def larger_trees(data: dict) -> tuple[list[str], list[list[str]]]:
    """Trees beyond the smallest size, on every arm that has them."""
    arms = {"tree_triton": "Triton", "tree_kdtree_eager": "no graphs", "tree_kdtree": "kdtree_sm120"}
    sizes = sorted({row["s_q"] for row in data["rows"] if row["arm"] in arms})[1:]
    columns = ["context", *(f"tree of {n}, {label}" for n in sizes for label in (*arms.values(), "over Triton's"))]
    cells: dict[int, list[str]] = {context: [f"{context:,}"] for context in by_context(data)}
    for size in sizes:
        for context, of in by_context(data, size).items():
            took = [of[arm]["ms_per_step_p50"] if arm in of else None for arm in arms]
            stock, _, ours = took
            cells[context] += [*map(ms, took), f"{stock / ours:.1f}x" if stock and ours else "-"]
    return columns, list(cells.values())


def speeds(data: dict) -> tuple[list[str], list[list[str]]]:
    """tok/s at each accept length, of plain decoding and of the tree on our kernel."""
    columns = ["context", "plain decode, Triton"]
    sizes = sorted({r["s_q"] for r in data["rows"] if r["arm"] == "tree_kdtree"})
    columns += [f"tree of {n}, at {a}" for n in sizes for a in ACCEPT_LENGTHS]
    rows = []
    for context, of in by_context(data).items():
        plain = of.get("plain_triton")
        cells = [f"{plain['tok_s']['1']:.1f}" if plain else "-"]
        for size in sizes:
            tree = by_context(data, size).get(context, {}).get("tree_kdtree")
            cells += [f"{tree['tok_s'][str(a)]:.1f}" if tree else "-" for a in ACCEPT_LENGTHS]
        rows.append([f"{context:,}", *cells])
    return columns, rows


def eagle(data: dict) -> tuple[list[str], list[list[str]]]:
    rows = []
    for context, of in by_context(data).items():
        stock, ours = (of.get(arm) for arm in ("eagle_triton", "eagle_kdtree"))
        if stock or ours:
            times = [r["ms_per_step_p50"] if r else None for r in (stock, ours)]
            rows.append(
                [f"{context:,}", ms(times[0]), ms(times[1]), f"{times[0] / times[1]:.2f}x" if all(times) else "-"]
            )
    return ["context", ARMS["eagle_triton"].label, ARMS["eagle_kdtree"].label, "speed"], rows


def kernels(data: dict) -> tuple[list[str], list[list[str]]]:
    """Of the tree on our kernel: microseconds a step by kind of kernel."""
    profiled = {c: of["tree_kdtree"] for c, of in by_context(data).items() if "kernels_us" in of.get("tree_kdtree", {})}
    kinds = sorted({kind for row in profiled.values() for kind in row["kernels_us"]})
    rows = [
        [f"{context:,}", *(f"{row['kernels_us'].get(kind, 0):,.0f}" for kind in kinds)]
        for context, row in profiled.items()
    ]
    return ["context", *kinds], rows


def differences(data: dict) -> tuple[list[str], list[list[str]]]:
    """Of the tree on our kernel less plain decoding on upstream's: milliseconds a step by kind of kernel."""
    rows, kinds = [], set()
    for context, of in by_context(data).items():
        tree, plain = (of.get(arm, {}).get("kernels_us") for arm in ("tree_kdtree", "plain_triton"))
        if tree and plain:
            rows.append((context, {kind: tree.get(kind, 0) - plain.get(kind, 0) for kind in tree | plain}))
            kinds |= tree.keys() | plain.keys()
    lines = [
        [f"{context:,}", *(f"{found.get(kind, 0) / 1e3:+.2f}" for kind in sorted(kinds))] for context, found in rows
    ]
    return ["context", *sorted(kinds)], lines


def beside(data: dict) -> tuple[list[str], list[list[str]]]:
    """The earlier deployment's speeds of a tree, and this run's steps at the same contexts."""
    rows = []
    for context, of in by_context(data).items():
        stock, ours = (of.get(arm) for arm in ("tree_triton", "tree_kdtree"))
        if context in EARLIER and stock and ours:
            triton, own = EARLIER[context]
            times = [row["ms_per_step_p50"] for row in (stock, ours)]
            rows.append(
                [
                    f"{context:,}", f"{triton:.1f}", f"{own:.1f}", f"{own / triton:.1f}x", ms(times[0]), ms(times[1]),
                    f"{times[0] / times[1]:.1f}x",
                ]
            )  # fmt: skip
    columns = ["context", "then: Triton, tok/s", "its own kernel, tok/s", "speed"]
    return [*columns, "here: Triton, ms a step", "kdtree_sm120, ms a step", "speed"], rows


def collapse(data: dict) -> tuple[list[str], list[list[str]]]:
    """The earlier deployment's decode speed over context, and this run's tokens a second where a step accepts one."""
    rows = []
    for context, of in by_context(data).items():
        arms = [of.get(arm) for arm in ("tree_triton", "tree_kdtree", "plain_triton")]
        if context in COLLAPSE and all(arms):
            then, speed = COLLAPSE[context]
            rows.append([f"{then:,}", f"{speed:.1f}", f"{context:,}"])
            rows[-1] += [f"{1e3 / row['ms_per_step_p50']:.1f}" for row in arms]
    columns = ["context then", "then: Triton's tree, tok/s", "context here", "here: Triton's tree, tok/s"]
    return [*columns, "kdtree_sm120's tree, tok/s", "plain decode on Triton, tok/s"], rows
