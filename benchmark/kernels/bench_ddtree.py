# SPDX-License-Identifier: Apache-2.0
"""Time the kernels that a draft tree adds to a decode step: ddtree_build, tree_accept, tree_count, kv_move_all_layers.

    python benchmark/kernels/bench_ddtree.py --out benchmark/results/h200/ddtree.json
    python benchmark/kernels/bench_ddtree.py --device cpu --shape bs=1,n=32,k=32,depth=7     # to try the program

Every result is compared bit for bit with the op's torch form before it is timed, and the torch form, which runs on the
device too, with the CPU op on some requests of each input; a wrong one is not timed and the exit code is 1. A CUDA
graph of 61 calls over several inputs is timed with events, as bench_mla_tree_verify.py does.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from verify_bench import results, timing

import sgl_kernel_sm120
from sgl_kernel_sm120 import Acceptance, DraftTree
from sgl_kernel_sm120 import tree as torch_forms

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "ddtree-1"
INPUTS = 8  # score sheets to rotate over
ON_HOST = 4  # requests of an input that the CPU op builds as well
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
    """INPUTS batches of candidates, targets that follow the tree for a few nodes, and the torch forms' answers."""

    root: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor
    trees: list[DraftTree]
    targets: list[torch.Tensor]
    accepted: list[Acceptance]
    counts: list[torch.Tensor]
    options: torch.Tensor


def build(shape: Shape, seed: int, device: torch.device) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    sheets = []
    for _ in range(INPUTS):
        logits = torch.randn(shape.bs, shape.depth, 2048, generator=generator, device=device) * 2.5
        sheets.append(logits.log_softmax(-1).topk(shape.k))
    scores, ids = (torch.stack(x) for x in zip(*sheets, strict=True))
    root = torch.randint(0, 2048, (shape.bs,), generator=generator, device=device)
    max_len = min(shape.depth + 1, shape.n)
    options = torch.tensor([-8, 4, 8, shape.n], dtype=torch.int32, device=device)
    problem = Problem(root, ids, scores, [], [], [], [], options)
    for i, s in zip(ids, scores, strict=True):
        tree = DraftTree(*(torch.empty_like(t) for t in sgl_kernel_sm120.ddtree_build(root, i, s, shape.n)))
        torch_forms._build(root, i, s, *tree, float("-inf"))
        child = tree.tokens.gather(1, tree.first_child.clamp(min=0).long())
        goes_on = torch.rand(child.shape, generator=generator, device=device) < 0.8
        target = torch.where(goes_on, child, 0)
        walk = sgl_kernel_sm120.tree_accept(tree.tokens, tree.parents, target, max_len)
        accepted = Acceptance(*(torch.empty_like(t) for t in walk))
        torch_forms._accept(tree.tokens, tree.parents, target, *accepted)
        counts = torch.empty(shape.bs, torch_forms.NUM_COUNTS + len(options), dtype=torch.int32, device=device)
        torch_forms._count(
            i, s, tree.path_log_probs, tree.used, accepted.accept_len, accepted.out_tokens, options, counts, shape.n
        )
        problem.trees.append(tree)
        problem.targets.append(target)
        problem.accepted.append(accepted)
        problem.counts.append(counts[:, : torch_forms.NUM_COUNTS])  # what follows are sums, in another order
    return problem


def is_torch_form_right(shape: Shape, problem: Problem) -> bool:
    some = min(shape.bs, ON_HOST)
    for i, s, tree in zip(problem.ids, problem.scores, problem.trees, strict=True):
        inputs = (t[:some].cpu() for t in (problem.root, i, s))
        on_host = sgl_kernel_sm120.ddtree_build(*inputs, shape.n)
        if not all(torch.equal(a, b[:some].cpu()) for a, b in zip(on_host, tree, strict=True)):
            return False
    return True


def arms(shape: Shape, problem: Problem, device: torch.device) -> dict[str, tuple[Callable, list]]:
    """By name: a call on input i, and what it has to give for each input."""
    root, ids, scores = problem.root, problem.ids, problem.scores
    trees, targets, accepted = problem.trees, problem.targets, problem.accepted
    max_len = min(shape.depth + 1, shape.n)
    pool = torch.zeros(LAYERS, POOL_SLOTS, KV_ROW, dtype=torch.bfloat16, device=device)
    kv = list(pool)
    slots = torch.randperm(POOL_SLOTS, device=device)[: shape.bs * shape.n].view(shape.bs, shape.n)
    front = slots[:, :max_len].reshape(-1)
    path = [slots.gather(1, a.path).flatten() for a in accepted]

    def count(i: int) -> tuple[torch.Tensor]:
        found = sgl_kernel_sm120.tree_count(trees[i], ids[i], scores[i], accepted[i], shape.n, problem.options)
        return (found[:, : torch_forms.NUM_COUNTS],)

    return {
        "ddtree_build": (lambda i: sgl_kernel_sm120.ddtree_build(root, ids[i], scores[i], shape.n), trees),
        "tree_accept": (
            lambda i: sgl_kernel_sm120.tree_accept(trees[i].tokens, trees[i].parents, targets[i], max_len),
            accepted,
        ),
        "tree_count": (count, [(counts,) for counts in problem.counts]),
        "kv_move_all_layers": (lambda i: sgl_kernel_sm120.kv_move_all_layers(kv, front, path[i]), []),
    }


def is_right(call: Callable, wanted: list) -> bool:
    return all(
        torch.equal(ours, theirs)
        for i, answer in enumerate(wanted)
        for ours, theirs in zip(call(i), answer, strict=True)
    )


def run_shape(shape: Shape, device: torch.device, seed: int, budget_ms: float) -> tuple[list[dict], bool]:
    rows, right = [], True
    problem = build(shape, seed, device)
    if not is_torch_form_right(shape, problem):
        print(f"WRONG: the torch form of ddtree_build on {device.type} at {shape}", file=sys.stderr)
        return [], False
    for name, (call, wanted) in arms(shape, problem, device).items():
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
        if args.out:  # after each shape, for a run that is cut short
            results.save_rows(args.out, FORMAT, args.device, args.commit or results.commit(ROOT), rows)
    show(rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
