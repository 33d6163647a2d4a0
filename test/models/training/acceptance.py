# SPDX-License-Identifier: Apache-2.0
"""Compute acceptance.json: tokens per verify step of chain and trees, and what a wrong drafter contract costs.

    python -m training.acceptance

Greedy figures are sums over expected_steps.json. Temperature-1 figures walk answers sampled from the target:
a draft counts when it equals the sampled token, which is how a server samples each node and walks.
``before_loop`` counts only the verify steps that begin before an answer turns into a loop.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.architecture import PAD_ID, Drafter, Target
from training.checkpoint import load_drafter, load_target
from training.make_expected_steps import MODELS, TREE_NODES, walk_name
from training.offline_walk import (
    CHAIN,
    Continuation,
    Contract,
    StepCounter,
    greedy_continuation,
    loop_start,
    sampled_continuation,
)

WALKS = (CHAIN, *TREE_NODES)
SAMPLING_SEED = 11
CONTRACT_PROMPTS = 12  # code prompts that the contract errors are measured on

CONTRACT_ERRORS = {
    "as trained": Contract(),
    "block positions one too high": Contract(position_shift=1),
    "context ends one token early": Contract(context_shift=-1),
    "context shows the root's own features": Contract(context_shift=1),
    "feature layers swapped": Contract(swap_features=True),
    "another token (<pad>) as mask": Contract(mask_id=PAD_ID),
    "features zeroed": Contract(zero_features=True),
    "outputs read one position late": Contract(output_shift=1),
}


class Tally:
    """Committed tokens and verify steps, in total and before the loop of each answer."""

    def __init__(self) -> None:
        self.totals = {walk_name(nodes): [0, 0, 0, 0] for nodes in WALKS}

    def add(self, target: Target, drafter: Drafter, answer: Continuation) -> None:
        """Walk one answer in every way."""
        counter, loop = StepCounter(target, drafter, answer), loop_start(answer.tokens)
        for nodes in WALKS:
            walk = counter.walk(nodes)
            early = [length for length, start in zip(walk.lengths, walk.starts, strict=True) if start < loop]
            row = (len(answer.tokens), walk.steps, sum(early), len(early))
            total = self.totals[walk_name(nodes)]
            self.totals[walk_name(nodes)] = [a + b for a, b in zip(total, row, strict=True)]

    def as_dict(self) -> dict:
        """Tokens per verify step by walk; the first token comes from prefill and is counted, as servers do."""
        return {
            name: {
                "tokens": tokens,
                "steps": steps,
                "accept_length": round(tokens / steps, 3),
                "before_loop": round(early / early_steps, 3) if early_steps else None,
            }
            for name, (tokens, steps, early, early_steps) in self.totals.items()
        }


def answer_of(tokenizer: Tokenizer, entry: dict) -> Continuation:
    """The greedy answer that the file records."""
    return Continuation(tokenizer.encode(entry["prompt"]).ids, entry["tokens"])


def by_kind(entries: list[dict]) -> dict[str, list[dict]]:
    """Entries grouped by kind, in order."""
    kinds: dict[str, list[dict]] = {}
    for entry in entries:
        kinds.setdefault(entry["kind"], []).append(entry)
    return kinds


def contract_costs(target: Target, drafter: Drafter, answers: list[Continuation]) -> dict[str, float]:
    """Tokens per verify step of the chain under each contract error."""
    costs = {}
    for name, contract in CONTRACT_ERRORS.items():
        steps = sum(StepCounter(target, drafter, answer, contract).walk().steps for answer in answers)
        costs[name] = round(sum(len(answer.tokens) for answer in answers) / steps, 3)
    return costs


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODELS / "acceptance.json")
    args = parser.parse_args()
    target, drafter = load_target(MODELS / "target"), load_drafter(MODELS / "drafter")
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    document = json.loads((MODELS / "expected_steps.json").read_text())
    result: dict = {
        "num_tokens": document["num_tokens"],
        "target_sha256": document["target_sha256"],
        "drafter_sha256": document["drafter_sha256"],
        "greedy": {},
        "sampled": {},
    }
    torch.manual_seed(SAMPLING_SEED)
    for kind, entries in by_kind(document["entries"]).items():
        greedy, sampled = Tally(), Tally()
        for entry in entries:
            answer = answer_of(tokenizer, entry)
            greedy.add(target, drafter, answer)
            sampled.add(target, drafter, sampled_continuation(target, answer.prompt, document["num_tokens"]))
        looping = sum(document["num_tokens"] - entry["loop_start"] for entry in entries)
        result["greedy"][kind] = {
            "prompts": len(entries),
            "share_in_loops": round(looping / (len(entries) * document["num_tokens"]), 3),
            "walks": greedy.as_dict(),
        }
        result["sampled"][kind] = {"prompts": len(entries), "walks": sampled.as_dict()}
        print(kind, json.dumps(result["greedy"][kind]), json.dumps(result["sampled"][kind]), flush=True)
    cat = greedy_continuation(target, tokenizer.encode("The cat sat on the mat. " * 8).ids, document["num_tokens"])
    probe = Tally()
    probe.add(target, drafter, cat)
    result["commit_length_probe"] = {"prompt": "The cat sat on the mat. x 8", "walks": probe.as_dict()}
    code = by_kind(document["entries"])["code"][:CONTRACT_PROMPTS]
    result["contract_errors"] = contract_costs(target, drafter, [answer_of(tokenizer, entry) for entry in code])
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["contract_errors"], indent=1))


if __name__ == "__main__":
    main()
