# SPDX-License-Identifier: Apache-2.0
"""The walk alone: every way over the same answers, the result file and the picture, the tables."""

from __future__ import annotations

import argparse
import datetime
import json

import torch
from training.architecture import NUM_DRAFTS
from training.offline_walk import sampled_continuation
from verify_bench.results import commit

from . import plot, results, table
from .arm import MODELS
from .engine import ROOT
from .scores import Continuation, load_models, log_probs_of
from .walk import Study, Tally

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
