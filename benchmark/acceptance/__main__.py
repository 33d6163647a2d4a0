# SPDX-License-Identifier: Apache-2.0
"""python -m acceptance, in benchmark/: the walk in torch, or with --engine real Engines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test" / "models"), str(ROOT / "benchmark" / "kernels")]

from . import arm, engine, results  # noqa: E402


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: results/cpu/acceptance.json, of a GPU results/h200/")
    parser.add_argument("--prompts", type=int, help="of each kind at most")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--commit", help="what the header says (default: git's HEAD)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="only what the adaptive budget would be told")
    parser.add_argument("--engine", action="store_true", help="real Engines instead of the walk alone")
    group = parser.add_argument_group("of --engine")
    group.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    group.add_argument("--paired", action="store_true", help="few arms, prompt by prompt in turns: is auto slower?")
    group.add_argument("--layers", type=int, help="of the target; those beyond the trained ones add nothing but time")
    group.add_argument("--arms", nargs="+", choices=arm.ARMS, metavar="ARM")
    group.add_argument("--temperatures", nargs="+", choices=results.TEMPERATURES, default=results.TEMPERATURES)
    group.add_argument("--seconds", type=float, default=75, help="no round begins that would end later")
    group.add_argument("--rounds", type=int, default=engine.MAX_ROUNDS, help="at most")
    group.add_argument("--walk", type=Path, metavar="FILE", help="only finish FILE, of a paired run or one cut short")
    group.add_argument("--logs", type=Path, help="a folder that keeps the Engines' logs")
    args = parser.parse_args(argv)
    args.arms = args.arms or list(engine.PAIRED_ARMS if args.paired else arm.ARMS)
    if args.out is None:
        folder = "h200" if args.engine and args.device == "cuda" else "cpu"
        if args.engine and args.device == "cpu":
            parser.error("--engine --device cpu is for trying it out: say with --out where to")
        name = "acceptance_auto.json" if args.paired else "acceptance.json"
        if args.paired and "0" not in args.temperatures:
            name = "acceptance_auto_sampled.json"
        args.out = ROOT / "benchmark" / "results" / folder / name
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.walk:
        return engine.walk_file(args.walk, args.out)
    if args.engine:
        return engine.run(args)
    from .offline import (  # not for --engine: they import sglang, which takes as long as an Engine's start
        record,
        walk_all,
    )

    return record(args.record) if args.record else walk_all(args)


if __name__ == "__main__":
    sys.exit(main())
