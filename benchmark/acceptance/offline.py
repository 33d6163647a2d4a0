# SPDX-License-Identifier: Apache-2.0
"""The walk alone: every way over the same answers, the result file and the picture, the tables. And a record of what
the adaptive budget would be told at every place of some answers, for test/srt/speculative/test_ddtree_recorded.py."""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch
from training.architecture import NUM_DRAFTS
from training.offline_walk import sampled_continuation
from verify_bench.results import commit

from sglang.srt.speculative.ddtree_budget import options_up_to

from . import WIDTHS, plot, results, table
from .arm import MODELS
from .engine import ROOT
from .scores import Continuation, load_models, log_probs_of
from .walk import Step, Study, Tally

# Answers of each kind of text; "noise" are prompts of random tokens.
PROMPTS = {"code": 16, "prose": 4, "noise": 4}
SEED = 11
RECORDED = {"repeat": 2, "code": 3, "prose": 3, "noise": 2, "long": 1}


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


def record(path: Path) -> int:
    """Of each answer, at each place, for each option of the budget: drafts promised, in hundredths, and accepted."""
    target, drafter, tokenizer = load_models()
    document = json.loads((MODELS / "expected_steps.json").read_text())
    options = options_up_to(max(WIDTHS), NUM_DRAFTS + 1)
    torch.manual_seed(SEED)
    answers = []
    for entry in chosen_entries(document, RECORDED):
        prompt = tokenizer.encode(entry["prompt"]).ids
        told = {"0": Continuation(prompt, entry["tokens"])}
        if entry["kind"] != "repeat":
            told["1"] = sampled_continuation(target, prompt, len(entry["tokens"]))
        for temperature, answer in told.items():
            log_probs = log_probs_of(target, drafter, answer)
            steps = [
                Step(log_probs[i], answer.tokens[i + 1 : i + 1 + NUM_DRAFTS]) for i in range(len(answer.tokens) - 1)
            ]
            answers.append({
                "temperature": temperature, "kind": entry["kind"],
                "promised": [[round(100 * step.promised(option)) for option in options] for step in steps],
                "accepted": ["".join(str(step.accepted_of(option)) for option in options) for step in steps],
            })  # fmt: skip
    header = {
        "made_by": "python -m acceptance --record FILE, in benchmark/",
        "block_size": NUM_DRAFTS + 1,
        "widths": [0 if option.is_chain else option.width for option in options],
        "target_sha256": document["target_sha256"],
        "drafter_sha256": document["drafter_sha256"],
    }
    path.write_text(
        json.dumps(header | {"answers": answers}, separators=(",", ":")).replace('{"temp', '\n{"temp') + "\n"
    )
    return 0
