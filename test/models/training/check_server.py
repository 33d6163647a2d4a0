# SPDX-License-Identifier: Apache-2.0
"""Compare SGLang with expected_steps.json: the same greedy tokens, the same number of verify steps.

    python -m training.check_server plain chain tree8 tree16 tree32 --engine attention_backend=kdtree_sm120

Runs ``sglang.Engine`` once per walk, on the CPU in float32 unless ``--engine`` says otherwise. ``plain``
decodes without a drafter, ``chain`` uses DFLASH, ``tree<N>`` uses DDTREE with N nodes. Exits with 1 and
names the prompts if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import zip_longest
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent
ENGINE_DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "disable_cuda_graph": True,
    "log_level": "error",
}


def engine_arguments(walk: str, overrides: dict) -> dict:
    """Arguments of the engine for one walk."""
    arguments = {"model_path": str(MODELS / "target")} | ENGINE_DEFAULTS | overrides
    if walk != "plain":
        arguments["speculative_draft_model_path"] = str(MODELS / "drafter")
        arguments["speculative_algorithm"] = "DFLASH" if walk == "chain" else "DDTREE"
    if walk.startswith("tree"):
        arguments["speculative_num_draft_tokens"] = int(walk.removeprefix("tree"))
    return arguments


def run(walk: str, entries: list[dict], num_tokens: int, overrides: dict) -> list[dict]:
    """Decode all prompts and return the engine's answers in order."""
    import sglang

    engine = sglang.Engine(**engine_arguments(walk, overrides))
    try:
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        return engine.generate([entry["prompt"] for entry in entries], sampling)
    finally:
        engine.shutdown()


def compare(walk: str, entries: list[dict], answers: list[dict]) -> list[str]:
    """One line for each prompt whose tokens or step count differ."""
    problems = []
    for number, (entry, answer) in enumerate(zip(entries, answers, strict=True)):
        where = f"{walk}: prompt {number} ({entry['kind']}, {entry['source']})"
        if answer["output_ids"] != entry["tokens"]:
            pairs = enumerate(zip_longest(answer["output_ids"], entry["tokens"]))
            first = next(number for number, (got, wanted) in pairs if got != wanted)
            problems.append(f"{where}: tokens differ from number {first} on")
        steps = answer["meta_info"].get("spec_verify_ct")
        if walk != "plain" and steps != entry["steps"][walk]:
            problems.append(f"{where}: {steps} verify steps, expected {entry['steps'][walk]}")
    return problems


def parse_override(text: str) -> tuple[str, object]:
    """``key=value`` with the value read as JSON where it is JSON."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="+", help="plain, chain, tree8, tree16, tree32, tree64")
    parser.add_argument("--engine", type=parse_override, nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kinds", nargs="*", help="only prompts of these kinds")
    args = parser.parse_args()
    document = json.loads((MODELS / "expected_steps.json").read_text())
    entries = [e for e in document["entries"] if not args.kinds or e["kind"] in args.kinds]
    failed = False
    for walk in args.walks:
        start = time.monotonic()
        answers = run(walk, entries, document["num_tokens"], dict(args.engine))
        problems = compare(walk, entries, answers)
        failed |= bool(problems)
        tokens = sum(len(answer["output_ids"]) for answer in answers)
        steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
        accept = f", {tokens / steps:.3f} tokens per verify step" if steps else ""
        print(
            f"{walk}: {len(entries)} prompts, {len(problems)} differences, {tokens} tokens{accept} "
            f"({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        for problem in problems:
            print(problem, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
