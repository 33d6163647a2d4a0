# SPDX-License-Identifier: Apache-2.0
"""Time the kernels that a draft tree adds to a decode step: ddtree_build, tree_accept, kv_move_all_layers.

    python benchmark/kernels/bench_ddtree.py --out benchmark/results/h200/ddtree.json
    python benchmark/kernels/bench_ddtree.py --device cpu --shape bs=1,n=32,k=32,depth=7     # to try the program

Every result is compared with the CPU op, bit for bit, before it is timed; a wrong one is not timed and the exit code is
1. A CUDA graph of 61 calls over several inputs is timed with events, as bench_mla_tree_verify.py does.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from verify_bench import results, timing

import sgl_kernel_sm120
from sgl_kernel_sm120 import DraftTree

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "ddtree-1"
INPUTS = 8  # score sheets to rotate over
LAYERS, KV_ROW = 61, 576  # of the KV that accepted paths are moved in, bf16
POOL_SLOTS = 32768  # the largest shape has as many nodes


@dataclasses.dataclass(frozen=True)
class Shape:
    bs: int
    n: int  # nodes, the root included
    k: int
    depth: int

    def __str__(self) -> str:
        return f"bs={self.bs},n={self.n},k={self.k},depth={self.depth}"


# The first two have a target for ddtree_build on an H200, in us.
TARGETS = {Shape(1, 32, 32, 7): 10.0, Shape(64, 32, 32, 7): 25.0}
SHAPES = [
    *TARGETS,
    Shape(1, 8, 7, 7),
    Shape(1, 16, 15, 7),
    Shape(1, 64, 63, 7),
    Shape(1, 128, 64, 7),
    Shape(1, 128, 64, 31),
    Shape(16, 32, 31, 7),
    Shape(64, 64, 63, 7),
    Shape(256, 32, 31, 7),
    Shape(256, 128, 64, 31),
]


def parse_shape(text: str) -> Shape:
    try:
        fields = dict(part.split("=") for part in text.split(","))
        return Shape(**{name: int(value) for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write bs=1,n=32,k=32,depth=7") from error


@dataclasses.dataclass
class Problem:
    """INPUTS batches of candidates, and targets that follow the tree for a few nodes. On the host."""

    root: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    trees: list[DraftTree]
    targets: list[torch.Tensor]


def build(shape: Shape, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(INPUTS, shape.bs, shape.depth, 2048, generator=generator) * 2.5
    scores, ids = logits.log_softmax(-1).topk(shape.k)
    root = torch.randint(0, 2048, (shape.bs,), generator=generator)
    trees = [sgl_kernel_sm120.ddtree_build(root, i, s, shape.n) for i, s in zip(ids, scores, strict=True)]
    targets = []
    for tree in trees:
        child = tree.tokens.gather(1, tree.first_child.clamp(min=0).long())
        goes_on = torch.rand(child.shape, generator=generator) < 0.8
        targets.append(torch.where(goes_on, child, 0))
    return Problem(root, ids, scores, trees, targets)


def arms(shape: Shape, problem: Problem, device: torch.device) -> dict[str, tuple[Callable, list]]:
    """By name: a call on input i, and what it has to give for each input."""
    root = problem.root.to(device)
    ids, scores = problem.ids.to(device), problem.scores.to(device)
    trees = [DraftTree(*(t.to(device) for t in tree)) for tree in problem.trees]
    targets = [t.to(device) for t in problem.targets]
    max_len = min(shape.depth + 1, shape.n)
    accepted = [
        sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, target, max_len)
        for tree, target in zip(problem.trees, problem.targets, strict=True)
    ]
    pool = torch.zeros(LAYERS, POOL_SLOTS, KV_ROW, dtype=torch.bfloat16, device=device)
    kv = list(pool)
    slots = torch.randperm(POOL_SLOTS)[: shape.bs * shape.n].view(shape.bs, shape.n)
    front = slots[:, :max_len].reshape(-1).to(device)
    path = [slots.gather(1, a.path).flatten().to(device) for a in accepted]
    return {
        "ddtree_build": (lambda i: sgl_kernel_sm120.ddtree_build(root, ids[i], scores[i], shape.n), problem.trees),
        "tree_accept": (
            lambda i: sgl_kernel_sm120.tree_accept(trees[i].tokens, trees[i].parents, targets[i], max_len),
            accepted,
        ),
        "kv_move_all_layers": (lambda i: sgl_kernel_sm120.kv_move_all_layers(kv, front, path[i]), []),
    }


def is_right(call: Callable, wanted: list) -> bool:
    return all(
        torch.equal(ours.cpu(), theirs)
        for i, answer in enumerate(wanted)
        for ours, theirs in zip(call(i), answer, strict=True)
    )


def run_shape(shape: Shape, device: torch.device, seed: int, budget_ms: float) -> tuple[list[dict], bool]:
    rows, right = [], True
    for name, (call, wanted) in arms(shape, build(shape, seed), device).items():
        if not is_right(call, wanted):
            print(f"WRONG: {name} at {shape}", file=sys.stderr)
            right = False
            continue
        measured = timing.measure(call, INPUTS, device, budget_ms=budget_ms)
        rows.append(
            {
                "op": name,
                **dataclasses.asdict(shape),
                "us_p20": round(measured.p20, 3),
                "us_p50": round(measured.p50, 3),
                "us_p80": round(measured.p80, 3),
                "target_us": TARGETS.get(shape) if name == "ddtree_build" else None,
                "calls": measured.calls,
                "samples": measured.samples,
                "graph": measured.graph,
            }
        )
    return rows, right


def show(rows: list[dict]) -> None:
    print(f"{'op':20} {'bs':>4} {'n':>4} {'k':>3} {'depth':>5} {'us p50':>9} {'target':>7}")
    for row in rows:
        target = "" if row["target_us"] is None else f"{row['target_us']:.0f}"
        print(
            f"{row['op']:20} {row['bs']:4} {row['n']:4} {row['k']:3} {row['depth']:5} {row['us_p50']:9.2f} {target:>7}"
        )


def save(args: argparse.Namespace, rows: list[dict]) -> None:
    document = {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or results.commit(ROOT),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "sgl_kernel_sm120": sgl_kernel_sm120.__version__,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the CPU ops, to try it")
    parser.add_argument("--shape", nargs="+", type=parse_shape, help="such as bs=1,n=32,k=32,depth=7")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--budget-ms", type=float, default=150.0, help="timing budget of an op and shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what the file says (default: git's HEAD)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu times the CPU ops")
    torch.set_grad_enabled(False)
    device, rows, right = torch.device(args.device), [], True
    for shape in args.shape or SHAPES:
        more, is_shape_right = run_shape(shape, device, args.seed, args.budget_ms)
        rows += more
        right = right and is_shape_right
        if args.out:  # after each shape: the references of the last ones take a minute on the host
            save(args, rows)
    show(rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
