# SPDX-License-Identifier: Apache-2.0
"""Time the tree-verify attention kernels side by side: same inputs, one process, CUDA graphs over rotating KV pools.

    python benchmark/kernels/bench_mla_tree_verify.py                             # all arms, all default groups
    python benchmark/kernels/bench_mla_tree_verify.py --shapes context --arms ours flashinfer_100k
    python benchmark/kernels/bench_mla_tree_verify.py --shape bs=1,q=9,h=8,prefix=65536,kv=bf16,page=1 --out result.json

Every arm is checked against an fp64 answer before it is timed; a wrong arm is not timed and the exit code is 1. An
arm that cannot run is listed with the reason. The result file is written after every shape, so an interrupted run
keeps what it has.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
from verify_bench import counters, inputs, probes, results, shapes, table, timing
from verify_bench.arms import ARMS, Context, Unavailable, lack_of_resources

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = HERE.parent / "build"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=f"of {', '.join(ARMS)}"
    )
    parser.add_argument(
        "--shapes",
        nargs="*",
        choices=shapes.GROUPS,
        metavar="GROUP",
        help=f"of {', '.join(shapes.GROUPS)}; default: all but smoke, or none with --shape",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        action="extend",
        default=[],
        metavar="SPEC",
        help="such as bs=1,q=9,h=8,prefix=65536,kv=bf16,page=1; prefix=185000+1000 is a ragged batch",
    )
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the CPU ops, to try the program"
    )
    parser.add_argument("--native", type=Path, default=BUILD / "native", help="libraries of build_native.py")
    parser.add_argument(
        "--sglang-kernels",
        type=Path,
        default=BUILD / "sglang_kernels",
        help="upstream's kernel files, where sglang is not installed",
    )
    parser.add_argument("--budget-ms", type=float, default=150.0, help="timing budget an arm and shape")
    parser.add_argument("--min-replays", type=int, default=timing.MIN_REPLAYS, help="samples of even the slowest arm")
    parser.add_argument("--layers", type=int, help="KV pools to rotate over (default: four times L2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--require",
        nargs="*",
        choices=ARMS,
        default=[],
        metavar="ARM",
        help="exit 1 if one of these could not run somewhere",
    )
    parser.add_argument(
        "--check-only", action="store_true", help="check every arm against the fp64 answer, time nothing"
    )
    parser.add_argument("--commit", help="what the header says (default: git's HEAD)")
    parser.add_argument("--list", action="store_true", help="print the arms and shapes, run nothing")
    args = parser.parse_args(argv)
    if args.shapes is None:
        args.shapes = [] if args.shape else list(shapes.DEFAULT_GROUPS)
    try:
        args.selected = shapes.select(args.shapes, args.shape)
    except ValueError as e:
        parser.error(str(e))
    if not args.selected:
        parser.error("no shape selected")
    if args.budget_ms <= 0 or args.min_replays < 1 or (args.layers is not None and args.layers < 1):
        parser.error("--budget-ms, --min-replays and --layers must be positive")
    if not args.list and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu times the CPU ops, --list only lists")
    return args


def run_shape(shape: shapes.Shape, args: argparse.Namespace, context: Context, data: dict) -> bool:
    """Check and time all arms at one shape; False if one was wrong."""
    device = torch.device(args.device)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.type == "cuda" else 0
    layers = args.layers or inputs.layers_for(shape, l2)
    problem = inputs.build(shape, layers, device, args.seed)
    answers: dict[bool, torch.Tensor] = {}
    right = True
    for name in args.arms:
        arm = ARMS[name](context)
        try:
            if reason := arm.unsupported(shape):
                raise Unavailable(reason)
            prepared = arm.prepare(problem)
            if prepared.begin_step:
                prepared.begin_step()
            prepared.run(0)
            if arm.tree_mask not in answers:
                answers[arm.tree_mask] = inputs.oracle(problem, 0, arm.tree_mask)
            error = inputs.relative_error(prepared.out, answers[arm.tree_mask])
            limits = arm.max_error[shape.kv_dtype]
            if not (error[0] <= limits[0] and error[1] <= limits[1]):  # NaN is wrong too
                right = False
                raise Unavailable(f"WRONG: relative error {error[0]:.2e}, worst row {error[1]:.2e}")
            if args.check_only:
                print(f"right: {name} at {shape}: relative error {error[0]:.2e}, worst row {error[1]:.2e}")
                continue
            measured = timing.measure(
                prepared.run,
                layers,
                device,
                begin_step=prepared.begin_step,
                graph=prepared.graph,
                budget_ms=args.budget_ms,
                min_replays=args.min_replays,
            )
        except (Unavailable, NotImplementedError) as e:
            reason = str(e)
        except Exception as e:  # the other arms and shapes go on; the exit code tells
            reason = lack_of_resources(e)
            if reason is None:
                right = False
                reason = f"FAILED: {type(e).__name__}: {e}"
        else:
            data["rows"].append(results.row(name, shape, measured, error))
            continue
        finally:
            prepared = None  # frees the arm's buffers before the next one's
        results.add_missing(data, name, reason.splitlines()[0], shape)
    return right


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    context = Context(args.native, args.sglang_kernels)
    if args.list:
        for name, arm in ARMS.items():
            print(f"{name:20} {arm.note}")
        for shape in args.selected:
            print(f"{shape}: {counters.kv_bytes(shape) / 1e6:.1f} MB of KV, {counters.flops(shape) / 1e9:.1f} GFLOP")
        return 0
    torch.set_grad_enabled(False)
    ceilings = probes.measure(args.native) if args.device == "cuda" and not args.check_only else None
    versions = {name: ARMS[name](context).version() for name in ("ours", "triton_extend", "flashinfer_100k")}
    renamed = {
        "sgl_kernel_sm120": versions["ours"],
        "sglang": versions["triton_extend"],
        "flashinfer": versions["flashinfer_100k"],
    }
    data = {
        "header": results.header(args.commit or results.commit(ROOT), args.device, ceilings, renamed),
        "rows": [],
        "not_available": [],
    }
    right = True
    for i, shape in enumerate(args.selected):
        start = time.perf_counter()
        right &= run_shape(shape, args, context, data)
        gc.collect()
        if args.out and not args.check_only:
            results.save(args.out, data)
        print(
            f"[{i + 1}/{len(args.selected)}] {shape}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True
        )
    if not args.check_only:
        table.show(data)
    table.show_missing(data)
    missing = {m["arm"] for m in data["not_available"]} & set(args.require)
    if missing:
        print(f"required, but not available somewhere: {', '.join(sorted(missing))}", file=sys.stderr)
    return 0 if right and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
