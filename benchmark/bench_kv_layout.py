# SPDX-License-Identifier: Apache-2.0
"""What the layout of KV slots is worth on a GPU: the verify kernel, the allocator's sorts and the move, in one command.

    python benchmark/bench_kv_layout.py                      # writes benchmark/results/<gpu>/kv_layout.json
    python benchmark/bench_kv_layout.py --device cpu --tiny  # tries the program; the times say nothing

verify   one call of mla_tree_verify over the same lengths, with the slots of a request in one run, in runs of 64 or
         16, or each anywhere; in a pool that just holds them, and spread over a pool of --pool-gb, for the TLB. Where
         the runs allow it also with the promise of page_size 16 and 64. Checked against an fp64 answer first.
order    what the allocator does to its free list at a prefill, at a plan and when idle.
move     kv_move_all_layers of one step's budget, alone and beside a step of verify calls on another stream.

Layouts of one pool and shape take turns in --rounds rounds, so that a clock that falls does not favour the first one.
A result of a CPU is written only where its path says so: --out .../cpu/...
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "kernels"))

from verify_bench import counters, inputs, results, timing  # noqa: E402
from verify_bench.arms import ARMS, Context, lack_of_resources  # noqa: E402
from verify_bench.shapes import Shape  # noqa: E402

FORMAT = "kv_layout-1"
SINK = 64  # slots at the front that no request gets; a multiple of every page size
MODEL_LAYERS = 61
RUNS = {"contiguous": None, "runs64": 64, "runs16": 16, "scattered": 1}
PROMISES = {"contiguous": (1, 16, 64), "runs64": (1, 16, 64), "runs16": (1, 16), "scattered": (1,)}
SHAPES = [
    Shape((65536,), 16, 8),
    Shape((189440,), 16, 8),
    Shape((65536,), 16, 8, "fp8"),
    Shape((8192,) * 8, 16, 8),
]
TINY = [Shape((200,), 3, 2), Shape((70, 130), 3, 2)]
FREE_SLOTS = (10_000, 100_000, 1_000_000)
BUDGET_BYTES = 64 << 20


class Pool(NamedTuple):
    name: str
    layers: int
    slots: int


def slots_of(layout: str, lengths: list[int], *, slots: int, generator: torch.Generator) -> list[torch.Tensor]:
    """int64 slots of each request. Runs start at multiples of their length; SINK slots at the front are unused."""
    device, run = generator.device, RUNS[layout]
    if run is None:  # in equal parts of the pool, at its pages
        part = (slots - SINK) // len(lengths) // SINK * SINK
        assert part >= max(lengths), f"{slots} slots do not hold {len(lengths)} requests of {max(lengths)}"
        return [torch.arange(n, device=device) + SINK + i * part for i, n in enumerate(lengths)]
    counts = [math.ceil(n / run) for n in lengths]
    order = torch.randperm((slots - SINK) // run, generator=generator, device=device)
    assert order.numel() >= sum(counts), f"{slots} slots do not hold {sum(counts)} runs of {run}"
    within = torch.arange(run, device=device)
    return [
        (SINK + first[:, None] * run + within).flatten()[:n]
        for first, n in zip(order[: sum(counts)].split(counts), lengths, strict=True)
    ]


def pools_of(shape: Shape, *, pool_bytes: int, l2_bytes: int) -> list[Pool]:
    """The pool that just holds the requests, and one of ``pool_bytes`` over the layers of the model."""
    tight = SINK + shape.bs * math.ceil((shape.prefix + shape.s_q) / SINK) * SINK
    large = pool_bytes // MODEL_LAYERS // counters.row_bytes(shape.kv_dtype)
    pools = [Pool("tight", inputs.layers_for(shape, l2_bytes), tight)]
    if large > 2 * tight:
        pools.append(Pool("large", MODEL_LAYERS, large))
    return pools


class KVPool:
    """The KV of all layers, made once for a pool: [slots, 576] each."""

    def __init__(self, pool: Pool, kv_dtype: str, device: torch.device):
        self.pool = pool
        dtype = inputs.TORCH_DTYPE[kv_dtype]
        self.layers = []
        for layer in range(pool.layers):
            generator = torch.Generator(device=device).manual_seed(layer)
            rows = torch.empty((pool.slots, counters.D_QK), dtype=dtype, device=device)
            for part in rows.split(1 << 18):  # no second pool in bf16 beside one in fp8
                part.copy_(torch.randn(part.shape, generator=generator, device=device, dtype=torch.bfloat16))
            self.layers.append(rows)

    @property
    def bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def problem_of(shape: Shape, kv: KVPool, layout: str, base: inputs.Problem) -> inputs.Problem:
    """``base`` with its requests laid out in ``kv``."""
    generator = torch.Generator(device=base.device).manual_seed(5)
    lengths = [prefix + shape.s_q for prefix in shape.prefixes]
    lists = slots_of(layout, lengths, slots=kv.pool.slots, generator=generator)
    return inputs.Problem(
        shape=shape,
        q=base.q,
        kv=kv.layers,
        kv_indptr=base.kv_indptr,
        kv_indices=torch.cat(lists),
        prefix_indptr=base.prefix_indptr,
        prefix_indices=torch.cat([slots[:p] for slots, p in zip(lists, shape.prefixes, strict=True)]),
        draft_slots=torch.stack([slots[p:] for slots, p in zip(lists, shape.prefixes, strict=True)]),
        visible=base.visible,
        mask_words=base.mask_words,
    )


def num_runs(problem: inputs.Problem) -> float:
    """Runs of consecutive slots per request, mean."""
    bounds = problem.kv_indptr.tolist()
    lists = [problem.kv_indices[lo:hi] for lo, hi in zip(bounds, bounds[1:], strict=False)]
    return sum(1 + int((s[1:] != s[:-1] + 1).sum()) for s in lists) / len(lists)


def verify_rows(shape: Shape, kv: KVPool, *, device: torch.device, rounds: int, budget_ms: float) -> list[dict]:
    arm = ARMS["ours"](Context(native=ROOT, sglang_kernels=ROOT))
    base = inputs.build(shape, 1, device)
    cases = []
    for layout, promises in PROMISES.items():
        for page in promises:
            asked = Shape(shape.prefixes, shape.s_q, shape.h_q, shape.kv_dtype, page)
            problem = problem_of(asked, kv, layout, base)
            prepared = arm.prepare(problem)
            prepared.run(0)
            error = inputs.relative_error(prepared.out, inputs.oracle(problem))
            limits = arm.max_error[shape.kv_dtype]
            if not (error[0] <= limits[0] and error[1] <= limits[1]):
                raise SystemExit(f"bench_kv_layout: {layout} at {asked} is off by {error}, allowed is {limits}")
            cases.append((layout, asked, problem, prepared, error, []))
    for _ in range(rounds):
        for _, _, problem, prepared, _, took in cases:
            took.append(
                timing.measure(
                    prepared.run, problem.layers, device, begin_step=prepared.begin_step, budget_ms=budget_ms
                )
            )
    rows = []
    for layout, asked, problem, _, error, took in cases:
        middle = sorted(took, key=lambda t: t.p50)[len(took) // 2]
        rows.append(
            results.row("ours", asked, middle, error)
            | {
                "kind": "verify",
                "pool": kv.pool.name,
                "pool_bytes": kv.bytes,
                "layers": kv.pool.layers,
                "layout": layout,
                "runs_per_request": round(num_runs(problem), 1),
                "us_p50_of_rounds": [round(t.p50, 3) for t in took],
            }
        )
    return rows


def this_trees_slot_runs():
    """The allocator's functions without the rest of sglang, which a GPU host may not have."""
    path = ROOT / "python" / "sglang" / "srt" / "mem_cache" / "defrag" / "slot_runs.py"
    spec = importlib.util.spec_from_file_location("kv_layout_slot_runs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def order_rows(device: torch.device, sizes: tuple[int, ...], budget_ms: float) -> list[dict]:
    """The free list of a pool twice its size, every second run of 32 slots free."""
    slot_runs = this_trees_slot_runs()
    arrange, bring_forward, longest_runs = slot_runs.arrange, slot_runs.bring_forward, slot_runs.longest_runs
    rows = []
    for n in sizes:
        ascending = (torch.arange(n, device=device) // 32 * 64 + torch.arange(n, device=device) % 32) + 1
        shuffled = ascending[torch.randperm(n, generator=torch.Generator(device).manual_seed(1), device=device)]
        arranged = arrange(shuffled)
        for name, work in {
            "arrange": lambda _, s=shuffled: arrange(s),
            "bring_forward": lambda _, a=arranged: bring_forward(a, 1000),
            "longest_runs": lambda _, a=arranged: longest_runs(a, 256),
        }.items():
            work(0)
            took = timing.measure(work, 1, device, graph=False, budget_ms=budget_ms)
            rows.append({"kind": "order", "op": name, "free_slots": n} | _percentiles(took))
    return rows


def move_rows(shape: Shape, kv: KVPool, *, device: torch.device, budget_bytes: int, budget_ms: float) -> list[dict]:
    """One step's budget of slots from where they are scattered to one run."""
    import sgl_kernel_sm120 as kernels

    a_slot = len(kv.layers) * kv.layers[0].stride(0) * kv.layers[0].element_size()
    count = max(1, min(budget_bytes // a_slot, (kv.pool.slots - SINK) // 4))
    source = torch.randperm(count, generator=torch.Generator(device).manual_seed(2), device=device) * 2 + SINK
    target = torch.arange(count, device=device) + SINK + 2 * count + 1

    def move(_) -> None:
        kernels.kv_move_all_layers(kv.layers, target, source)

    move(0)
    took = timing.measure(move, 1, device, graph=False, budget_ms=budget_ms)
    rate = round(2 * count * a_slot / took.p50 * 1e-3, 2)
    rows = [{"kind": "move", "beside": "nothing", "slots": count, "bytes": count * a_slot, "gbps": rate}]
    rows[0] |= _percentiles(took)
    if device.type == "cuda":
        rows += _beside_verify(shape, kv, move, rows[0])
    return rows


def _beside_verify(shape: Shape, kv: KVPool, move, alone: dict, repeats: int = 20) -> list[dict]:
    """A step of verify calls, one a layer, without and with a move on another stream that starts with it."""
    device = kv.layers[0].device
    problem = problem_of(shape, kv, "scattered", inputs.build(shape, 1, device))
    prepared = ARMS["ours"](Context(native=ROOT, sglang_kernels=ROOT)).prepare(problem)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    prepared.begin_step()
    prepared.run(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        prepared.begin_step()
        for layer in range(len(kv.layers)):
            prepared.run(layer)

    def step_us(with_move: bool) -> float:
        def work() -> None:
            if with_move:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    move(0)
            graph.replay()
            torch.cuda.current_stream().wait_stream(side)

        return timing._events_us(work)

    for with_move in (False, True):
        step_us(with_move)
    took = {flag: [step_us(flag) for _ in range(repeats)] for flag in (False, True)}
    medians = {flag: round(statistics.median(values), 2) for flag, values in took.items()}
    return [
        {
            "kind": "move",
            "beside": str(shape),
            "slots": alone["slots"],
            "bytes": alone["bytes"],
            "step_us_without": medians[False],
            "step_us_with": medians[True],
        }
    ]


def _percentiles(took: timing.Timing) -> dict:
    return {"us_p20": round(took.p20, 2), "us_p50": round(took.p50, 2), "us_p80": round(took.p80, 2)}


def line(row: dict) -> str:
    if row["kind"] == "verify":
        return (
            f"{row['pool']:6} {row['layout']:10} page {row['page_size']:2} bs {row['bs']} prefix {row['prefix']:6} "
            f"{row['kv_dtype']:4} {row['runs_per_request']:9.1f} runs {row['us_p50']:9.2f} us {row['gbps']:8.1f} GB/s"
        )
    return "  ".join(f"{key} {value}" for key, value in row.items())


def default_out() -> Path:
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "_")
    return HERE / "results" / name / "kv_layout.json"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="result file; on a GPU results/<gpu>/kv_layout.json, on a CPU none")
    parser.add_argument(
        "--pool-gb", type=float, default=64.0, help="of the large pool, at most 85 %% of the memory free"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-ms", type=float, default=60.0, help="for one measurement")
    parser.add_argument("--tiny", action="store_true", help="a few tokens: tries the program")
    parser.add_argument("--commit", help="of this tree, where there is no git")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --tiny tries the program")
    if args.device == "cpu" and args.out is not None and "cpu" not in (*args.out.parts, args.out.stem):
        parser.error(f"--out {args.out}: a result of a CPU belongs into a folder or a file named cpu")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    device = torch.device(args.device)
    pool_bytes, l2_bytes, out = int(args.pool_gb * 1e9), 1, args.out
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        pool_bytes = min(pool_bytes, int(0.85 * torch.cuda.mem_get_info()[0]))
        out = out or default_out()
    head = results.header(args.commit or results.commit(ROOT), args.device, None, {})
    head |= {"format": FORMAT, "pool_gb_asked": args.pool_gb, "rounds": args.rounds}
    data = {"header": head, "rows": [], "not_available": []}

    def keep(rows: list[dict]) -> None:
        for row in rows:
            print(line(row), flush=True)
        data["rows"] += rows
        if out is not None:
            results.save(out, data)

    sizes = (500,) if args.tiny else FREE_SLOTS
    keep(order_rows(device, sizes, args.budget_ms))
    for shape in TINY if args.tiny else SHAPES:
        for pool in pools_of(shape, pool_bytes=pool_bytes, l2_bytes=l2_bytes):
            kv = None
            try:
                kv = KVPool(pool, shape.kv_dtype, device)
                keep(verify_rows(shape, kv, device=device, rounds=args.rounds, budget_ms=args.budget_ms))
                if pool.name == "large":
                    budget = BUDGET_BYTES
                    keep(move_rows(shape, kv, device=device, budget_bytes=budget, budget_ms=args.budget_ms))
            except Exception as error:
                reason = lack_of_resources(error)
                if reason is None:
                    raise
                results.add_missing(data, f"{pool.name} pool", reason, shape)
                keep([])
            del kv
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"written: {out}" if out is not None else "not written: a result of a CPU; --out .../cpu/... keeps it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
