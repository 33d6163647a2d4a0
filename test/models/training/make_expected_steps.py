# SPDX-License-Identifier: Apache-2.0
"""Write expected_steps.json: greedy tokens and verify-step counts of each prompt, computed in torch alone.

    python -m training.make_expected_steps HELDOUT_JSON [--out expected_steps.json]

The server's counts are compared with this file, never the other way round. A prompt is left out when any
decision on its way is nearly a tie, so that another machine's rounding cannot change a count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from training.architecture import Drafter, Target
from training.checkpoint import WEIGHTS, load_drafter, load_target
from training.offline_walk import CHAIN, Continuation, StepCounter, greedy_continuation, loop_start
from training.prompts import Prompt, candidates

MODELS = Path(__file__).resolve().parent.parent
NUM_TOKENS = 128
TREE_NODES = (8, 16, 32, 64)  # root included
SMALLEST_MARGIN = 1e-3  # of a logit, a log-probability or the weight of a path
SMALLEST_ROUTER_MARGIN = 1e-5  # of a router score, which is between 0 and 1
WANTED = {"code": 40, "prose": 4, "repeat": 4, "noise": 4, "long": 2}


def walk_name(nodes: int) -> str:
    """Key of a walk in the file."""
    return "chain" if nodes == CHAIN else f"tree{nodes}"


def count_steps(target: Target, drafter: Drafter, answer: Continuation) -> tuple[dict[str, int], float]:
    """Verify steps by kind of walk, and the smallest margin of all walks."""
    counter = StepCounter(target, drafter, answer)
    walks = {walk_name(nodes): counter.walk(nodes) for nodes in (CHAIN, *TREE_NODES)}
    steps = {"plain": len(answer.tokens) - 1} | {name: walk.steps for name, walk in walks.items()}
    return steps, min(walk.margin for walk in walks.values())


def examine(target: Target, drafter: Drafter, tokenizer: Tokenizer, prompt: Prompt) -> tuple[dict | None, str]:
    """The entry of a prompt, or None and why it was left out."""
    answer = greedy_continuation(target, tokenizer.encode(prompt.text).ids, NUM_TOKENS)
    if answer.margin < SMALLEST_MARGIN:
        return None, "near tie of two tokens"
    if answer.router_margin < SMALLEST_ROUTER_MARGIN:
        return None, "near tie of two experts"
    steps, margin = count_steps(target, drafter, answer)
    if margin < SMALLEST_MARGIN:
        return None, "near tie of two drafts"
    return {
        "kind": prompt.kind,
        "source": prompt.source,
        "prompt": prompt.text,
        "prompt_tokens": len(answer.prompt),
        "tokens": answer.tokens,
        "loop_start": loop_start(answer.tokens),
        "steps": steps,
        "margin": round(min(margin, answer.margin), 5),
        "router_margin": round(answer.router_margin, 7),
    }, ""


def sha256(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("held_out", type=Path, help="heldout.json written by training.corpus")
    parser.add_argument("--out", type=Path, default=MODELS / "expected_steps.json")
    args = parser.parse_args()
    target, drafter = load_target(MODELS / "target"), load_drafter(MODELS / "drafter")
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    entries: list[dict] = []
    left_out: dict[str, int] = {}
    for kind, prompts in candidates(json.loads(args.held_out.read_text())).items():
        taken = 0
        for prompt in prompts:
            if taken == WANTED[kind]:
                break
            entry, reason = examine(target, drafter, tokenizer, prompt)
            if entry is None:
                left_out[reason] = left_out.get(reason, 0) + 1
                print(f"left out: {kind} {prompt.source}: {reason}", flush=True)
                continue
            entries.append(entry)
            taken += 1
            print(f"{kind} {prompt.source}: {entry['steps']}", flush=True)
    document = {
        "about": "greedy, float32; counts by training.offline_walk, not by a server; tree nodes include the root",
        "num_tokens": NUM_TOKENS,
        "smallest_margin": SMALLEST_MARGIN,
        "smallest_router_margin": SMALLEST_ROUTER_MARGIN,
        "left_out": left_out,
        "target_sha256": sha256(MODELS / "target" / WEIGHTS),
        "drafter_sha256": sha256(MODELS / "drafter" / WEIGHTS),
        "entries": entries,
    }
    lines = json.dumps(document | {"entries": []}, indent=1).removesuffix("[]\n}")
    body = ",\n".join("  " + json.dumps(entry) for entry in entries)
    args.out.write_text(f"{lines}[\n{body}\n ]\n}}\n")


if __name__ == "__main__":
    main()
