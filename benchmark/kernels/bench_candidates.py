# SPDX-License-Identifier: Apache-2.0
"""Time what the draft head adds after its product: the K best tokens of each draft position, and the log-sum-exp.

    python benchmark/kernels/bench_candidates.py --out benchmark/results/h200/candidates.json      # 10 s on an H200
    python benchmark/kernels/bench_candidates.py --device cpu --vocab 2048 --batch 1               # to try the program

ours    what a DDTREE step calls: torch's selection for few logits, chunks of the vocabulary for many
torch   topk and logsumexp over all logits, at every size
argmax  the best token alone, which is all that DFLASH takes

bf16 logits of a normal distribution; 7 positions a request. Before it is timed ours has to give torch's values, at
places that hold them, and its log-sum-exp to 1e-5. CUDA graphs, timed as bench_ddtree.py does. Needs sglang.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from verify_bench import results, timing

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "candidates-1"
POSITIONS, RANKS = 7, 31
VOCABULARIES = (2048, 20480, 131072, 163840)  # the third and fourth as large models have, the second a shard of them
BATCHES = (1, 8, 64)
INPUTS = 4  # to rotate over
ARMS = ("ours", "torch", "argmax")


def torch_best(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.float()
    return *logits.topk(k, dim=-1), logits.logsumexp(dim=-1, keepdim=True)


def is_right(logits: torch.Tensor, k: int, best_of: Callable) -> bool:
    values, places, norm = best_of(logits, k)
    wanted, _, wanted_norm = torch_best(logits, k)
    at_places = logits.gather(-1, places).float()
    distinct = places.sort(-1).values.diff(dim=-1).gt(0).all()
    is_near = (norm - wanted_norm).abs().max() < 1e-5 * wanted_norm.abs().max()
    return bool(torch.equal(values, wanted) and torch.equal(at_places, wanted) and distinct and is_near)


def measure(vocabulary: int, batch: int, device: torch.device, budget_ms: float) -> list[dict] | None:
    """Rows of the result file; None if ours is wrong."""
    from sglang.srt.speculative.ddtree_draft import best_of

    generator = torch.Generator(device).manual_seed(vocabulary + batch)
    shape = INPUTS, batch * POSITIONS, vocabulary
    logits = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 2.5, generator=generator)
    if not all(is_right(sheet, RANKS, best_of) for sheet in logits):
        return None
    calls = (
        lambda i: best_of(logits[i], RANKS),
        lambda i: torch_best(logits[i], RANKS),
        lambda i: logits[i].argmax(dim=-1),
    )
    rows = []
    for arm, call in zip(ARMS, calls, strict=True):
        took = timing.measure(call, INPUTS, device, budget_ms=budget_ms)
        rows.append({
            "arm": arm, "bs": batch, "vocab": vocabulary, "k": RANKS, "us_p20": round(took.p20, 2),
            "us_p50": round(took.p50, 2), "us_p80": round(took.p80, 2), "calls": took.calls, "samples": took.samples,
            "graph": took.graph,
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    parser.add_argument("--vocab", nargs="+", type=int, default=VOCABULARIES, help="entries of the vocabulary")
    parser.add_argument("--batch", nargs="+", type=int, default=BATCHES, help="requests")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    parser.add_argument("--budget-ms", type=float, default=100.0, help="timing budget of an arm and shape")
    parser.add_argument("--commit", help="what the file says (default: git's HEAD)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu tries the program")
    torch.set_grad_enabled(False)
    rows, wrong = [], []
    for vocabulary in args.vocab:
        for batch in args.batch:
            more = measure(vocabulary, batch, torch.device(args.device), args.budget_ms)
            if more is None:
                wrong.append(f"{vocabulary} x {batch}")
                print(f"WRONG: {wrong[-1]}", file=sys.stderr)
            for row in more or []:
                print(f"{row['arm']:7} bs {row['bs']:3} vocabulary {row['vocab']:7,} {row['us_p50']:9.2f} us")
                rows.append(row)
    if args.out:
        results.save_rows(args.out, FORMAT, args.device, args.commit or results.commit(ROOT), rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
