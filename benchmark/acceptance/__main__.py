# SPDX-License-Identifier: Apache-2.0
"""python -m acceptance, in benchmark/: walk, write the result file and the picture, print the tables."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test" / "models"), str(ROOT / "benchmark" / "kernels")]

from training.architecture import NUM_DRAFTS  # noqa: E402
from training.offline_walk import Continuation, sampled_continuation  # noqa: E402
from verify_bench.results import commit  # noqa: E402

from . import arm, engine, plot, results, table  # noqa: E402
from .arm import MODELS  # noqa: E402
from .scores import load_models, log_probs_of  # noqa: E402
from .walk import Study, Tally  # noqa: E402

# Answers of each kind of text; "noise" are prompts of random tokens.
PROMPTS = {"code": 16, "prose": 4, "noise": 4}
SEED = 11


def chosen_entries(document: dict, quota: dict[str, int]) -> list[dict]:
    left, chosen = dict(quota), []
    for entry in document["entries"]:
        if left.get(entry["kind"], 0):
            left[entry["kind"]] -= 1
            chosen.append(entry)
    return chosen


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: results/cpu/acceptance.json, of a GPU results/h200/")
    parser.add_argument("--prompts", type=int, help="of each kind at most")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--commit", help="what the header says (default: git's HEAD)")
    parser.add_argument("--engine", action="store_true", help="real Engines instead of the walk alone")
    group = parser.add_argument_group("of --engine")
    group.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    group.add_argument("--arms", nargs="+", choices=arm.ARMS, default=list(arm.ARMS), metavar="ARM")
    group.add_argument("--seconds", type=float, default=75, help="no round begins that would end later")
    group.add_argument("--rounds", type=int, default=engine.MAX_ROUNDS, help="at most")
    group.add_argument("--logs", type=Path, help="a folder that keeps the Engines' logs")
    args = parser.parse_args(argv)
    if args.out is None:
        folder = "h200" if args.engine and args.device == "cuda" else "cpu"
        if args.engine and args.device == "cpu":
            parser.error("--engine --device cpu is for trying it out: say with --out where to")
        args.out = ROOT / "benchmark" / "results" / folder / "acceptance.json"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return engine.run(args) if args.engine else walk_all(args)


def walk_all(args: argparse.Namespace) -> int:
    quota = {kind: min(n, args.prompts or n) for kind, n in PROMPTS.items()}
    target, drafter, tokenizer = load_models()
    document = json.loads((MODELS / "expected_steps.json").read_text())
    entries = chosen_entries(document, quota)
    block_size = NUM_DRAFTS + 1
    torch.manual_seed(SEED)
    walks = {}
    for temperature in results.TEMPERATURES:
        walks[temperature] = {}
        for kind in quota:
            study = Study(block_size)
            tallies = {way: Tally() for way in study.ways()}
            for entry in entries:
                if entry["kind"] != kind:
                    continue
                prompt = tokenizer.encode(entry["prompt"]).ids
                if temperature == "0":
                    answer = Continuation(prompt, entry["tokens"][: args.tokens])
                else:
                    answer = sampled_continuation(target, prompt, args.tokens)
                study.add(answer.tokens, log_probs_of(target, drafter, answer), block_size, tallies)
            walks[temperature][kind] = {way: results.entry(tally) for way, tally in tallies.items()}
    data = {
        "header": {
            "format": results.FORMAT,
            "date": datetime.date.today().isoformat(),
            "commit": args.commit or commit(ROOT),
            "torch": torch.__version__,
            "prompts": quota,
            "tokens": args.tokens,
            "block_size": block_size,
            "target_sha256": document["target_sha256"],
            "drafter_sha256": document["drafter_sha256"],
        },
        "walks": walks,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(data, indent=1) + "\n")
    results.load(args.out)
    print(table.acceptance_lengths(data), table.acceptance_adaptive(data), sep="\n\n")
    plot.draw(data, args.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
