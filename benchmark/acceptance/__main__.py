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
MODELS = ROOT / "test" / "models"
sys.path[:0] = [str(MODELS), str(ROOT / "benchmark" / "kernels")]

from tokenizers import Tokenizer  # noqa: E402
from training.architecture import NUM_DRAFTS  # noqa: E402
from training.checkpoint import load_drafter, load_target  # noqa: E402
from training.offline_walk import Continuation, draft_log_probs, sampled_continuation  # noqa: E402
from verify_bench.results import commit  # noqa: E402

from . import plot, results, table  # noqa: E402
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


def log_probs_of(target, drafter, answer: Continuation) -> torch.Tensor:
    """[a, D, V]: of the block at each token of the answer but the last."""
    first = len(answer.prompt)
    anchors = list(range(first, first + len(answer.tokens) - 1))
    return draft_log_probs(target, drafter, answer.ids, anchors)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "results" / "cpu" / "acceptance.json")
    parser.add_argument("--prompts", type=int, help="of each kind at most (default: 16 of code, 4 of the others)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--commit", help="what the header says (default: git's HEAD)")
    args = parser.parse_args(argv)
    quota = {kind: min(n, args.prompts or n) for kind, n in PROMPTS.items()}
    target, drafter = load_target(MODELS / "target"), load_drafter(MODELS / "drafter")
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
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
