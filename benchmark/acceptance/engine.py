# SPDX-License-Identifier: Apache-2.0
"""Real Engines on the small model: an Engine an arm, all of them started side by side, measured in turns.

A round asks every arm for the same cells (a kind of text, a temperature, a batch size); what drifts between rounds
drifts for all arms, so the ratio of two arms is taken within rounds. Before anything is timed every cell runs once.

Each answer is also walked in torch, in float32, with the drafter's scores: an arm of fixed shape has to take as many
steps as the walk of its own answer. In float32, on a CPU, that is exact. On a GPU the Engines compute in bfloat16,
where near-ties of the drafter fall either way: the rule, made before the first run, is that the steps of a cell differ
by at most WALK_TOLERANCE.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from . import results
from .arm import BLOCK, MAX_BATCH, MODELS

BENCHMARK = Path(__file__).resolve().parents[1]
ROOT = BENCHMARK.parent
# Prompts of each kind at most. "long": of about 3,000 tokens.
PROMPTS = {"code": 4, "prose": 2, "noise": 2, "long": 1}
BATCHES = (1, MAX_BATCH)
TOKENS = 128
START_TIMEOUT_S = {"cuda": 120, "cpu": 900}
# As test/e2e/servers.py: an Engine of a CPU has one thread.
ON_CPU = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
SAMPLED_ROUNDS = 1  # sampled answers differ from round to round: they are for acceptance, not for speed
WARM_TOKENS = 16
HEAD_START_S = {"cuda": 12, "cpu": 0}
MIN_ROUNDS, MAX_ROUNDS = 2, 9
WALK_TOLERANCE = {"cpu": 0.0, "cuda": 0.05}


class Arms:
    """The processes that hold the Engines."""

    def __init__(self, names: list[str], device: str, logs: Path, folder: Path):
        self.links: dict[str, Connection] = {}
        self.started: dict[str, dict[str, Any]] = {}
        self.device, self.logs, self.address = device, logs, str(folder / "arms")
        self.processes: dict[str, subprocess.Popen] = {}
        with Listener(self.address, family="AF_UNIX") as listener:
            self._start([name for name in names if name != "auto"])
            if "auto" in names:
                # It measures at the end of its start what a step costs: not while the others still capture graphs.
                time.sleep(HEAD_START_S[device])
                self._start(["auto"])
            self._accept(listener, names)

    def _start(self, names: list[str]) -> None:
        paths = [str(BENCHMARK), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (ON_CPU if self.device == "cpu" else {})
        for name in names:
            task = json.dumps({"arm": name, "device": self.device, "address": self.address})
            with open(self.logs / f"{name.replace(' ', '_')}.log", "w") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "acceptance.arm", task], stdout=log, stderr=subprocess.STDOUT,
                    env=environment,
                )  # fmt: skip

    def _accept(self, listener: Listener, names: list[str]) -> None:
        """Of those that start in time; the study goes on without the others."""
        deadline = time.monotonic() + START_TIMEOUT_S[self.device]
        listener._listener._socket.settimeout(1)  # or a child that fails would be waited for without an end
        while (waiting := [n for n in names if n not in self.links]) and time.monotonic() < deadline:
            try:
                link = listener.accept()
            except TimeoutError:
                if all(self.processes[n].poll() is not None for n in waiting):
                    break
                continue
            told = link.recv()
            self.links[told["arm"]], self.started[told["arm"]] = link, told
            print(f"acceptance: {told['arm']} started in {told['start_s']} s", flush=True)
        for name in names:
            if name not in self.links:
                print(f"acceptance: {name} did not start", file=sys.stderr, flush=True)

    def ask(self, name: str, **job: Any) -> dict[str, Any]:
        self.links[name].send(job)
        return self.links[name].recv()

    def close(self) -> None:
        for link in self.links.values():
            link.send(None)
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def chosen_prompts(entries: list[dict], most: int | None) -> dict[str, list[str]]:
    prompts: dict[str, list[str]] = {kind: [] for kind in PROMPTS}
    for entry in entries:
        found = prompts.get(entry["kind"])
        if found is not None and len(found) < min(PROMPTS[entry["kind"]], most or 99):
            found.append(entry["prompt"])
    return prompts


def batches_of(prompts: list[str], size: int) -> list[list[str]]:
    """Each prompt once, or as often as fills whole batches."""
    repeated = prompts * (-(-size // len(prompts)) if len(prompts) < size else 1)
    repeated = repeated[: len(repeated) // size * size]
    return [repeated[i : i + size] for i in range(0, len(repeated), size)]


def cells(prompts: dict[str, list[str]]) -> list[tuple[str, str, int]]:
    """Sampled answers, and those to long prompts, one at a time alone."""
    return [
        (t, kind, size) for t in results.TEMPERATURES for size in BATCHES for kind in prompts
        if size == 1 or (t == "0" and kind != "long")
    ]  # fmt: skip


def measure(arms: Arms, prompts: dict[str, list[str]], tokens: int, seconds: float, rounds: int) -> dict:
    """{(arm, temperature, kind, batch): what each round told}"""
    found: dict[tuple, list[dict]] = {}

    def run(wanted: list[tuple[str, str, int]], tokens: int = tokens) -> None:
        for temperature, kind, size in wanted:
            for name in list(arms.links):
                if temperature != "0" and not arms.started[name]["can_sample"]:
                    continue
                batches = batches_of(prompts[kind], size)
                try:
                    told = arms.ask(name, batches=batches, temperature=float(temperature), tokens=tokens)
                except (EOFError, OSError):  # its Engine has ended; the study goes on without it
                    print(f"acceptance: lost {name}", file=sys.stderr, flush=True)
                    del arms.links[name]
                    continue
                found.setdefault((name, temperature, kind, size), []).append(told)

    every = cells(prompts)
    greedy = [cell for cell in every if cell[0] == "0"]
    run(greedy, WARM_TOKENS)  # kernels are compiled and loaded
    found.clear()
    begin = last = time.monotonic()
    for number in range(rounds):
        run(every if number < SAMPLED_ROUNDS else greedy)
        now = time.monotonic()
        print(f"acceptance: round {number + 1} took {now - last:.1f} s", flush=True)
        took, last = now - last, now
        is_next_shorter = number + 1 >= SAMPLED_ROUNDS
        if number + 1 >= MIN_ROUNDS and is_next_shorter and now - begin + took > seconds:
            break
    return {key: rounds for key, rounds in found.items() if key[0] in arms.links}


def quantiles(values: list[float]) -> list[float]:
    """The lowest, the median and the highest."""
    return [min(values), statistics.median(values), max(values)]


def rows_of_file(found: dict) -> list[dict]:
    rows = []
    for (name, temperature, kind, size), rounds in found.items():
        total = {key: sum(told[key] for told in rounds) for key in ("tokens", "steps", "rows")}
        speeds = [told["tokens"] / told["seconds"] for told in rounds]
        step_ms = [1e3 * told["seconds"] / told["batch_steps"] for told in rounds]
        row = {
            "arm": name, "temperature": temperature, "kind": kind, "batch": size, "rounds": len(rounds), **total,
            "accept_length": round(total["tokens"] / total["steps"], 3),
            "rows_per_token": round(total["rows"] / total["tokens"], 3),
            "tok_s": [round(speed, 1) for speed in speeds],
            "step_ms": [round(ms, 4) for ms in quantiles(step_ms)],
        }  # fmt: skip
        for base in ("dflash", "chain"):
            if base != name and (others := found.get((base, temperature, kind, size))):
                ratios = [
                    speed * other["seconds"] / other["tokens"] for speed, other in zip(speeds, others, strict=True)
                ]
                row[f"over_{base}"] = [round(ratio, 4) for ratio in quantiles(ratios)]
        rows.append(row)
    return rows


def walk_of(found: dict, prompts: dict[str, list[str]]) -> list[dict]:
    """Steps of the arms of fixed shape, and those of the walk of the same answers: of the first round, one request at a
    time."""
    from .scores import Continuation, load_models, log_probs_of
    from .walk import Step

    target, drafter, tokenizer = load_models()
    steps_of: dict[tuple, dict[int, Step]] = {}  # arms share answers
    rows = []
    for (name, temperature, kind, size), rounds in found.items():
        if size != 1 or name == "auto" or (name == "dflash" and temperature != "0"):
            continue  # upstream's chain accepts a draft at random
        walked = 0
        for prompt, tokens in zip(prompts[kind], rounds[0]["answers"], strict=True):
            key = (prompt, tuple(tokens))
            if key not in steps_of:
                log_probs = log_probs_of(target, drafter, Continuation(tokenizer.encode(prompt).ids, tokens))
                starts = range(len(tokens) - 1)
                steps_of[key] = {s: Step(log_probs[s], tokens[s + 1 : s + BLOCK]) for s in starts}
            start = 0
            while start < len(tokens) - 1:
                step = steps_of[key][start]
                is_chain = name in ("dflash", "chain")
                start += 1 + (step.chain() if is_chain else step.tree(int(name.removeprefix("tree "))))
                walked += 1
        rows.append(
            {"arm": name, "temperature": temperature, "kind": kind, "steps": rounds[0]["steps"], "walk_steps": walked}
        )
    return rows


def problems_of(walks: list[dict], device: str) -> list[str]:
    tolerance = WALK_TOLERANCE[device]
    return [
        f"{row['arm']}, T = {row['temperature']}, {row['kind']}: {row['steps']} steps, {row['walk_steps']} in the walk"
        for row in walks if abs(row["steps"] - row["walk_steps"]) > tolerance * row["walk_steps"]
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    import torch
    from verify_bench.results import commit, gpu_info

    document = json.loads((MODELS / "expected_steps.json").read_text())
    prompts = chosen_prompts(document["entries"], args.prompts)
    with tempfile.TemporaryDirectory() as name:
        logs = args.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        arms = Arms(args.arms, args.device, logs, Path(name))
        try:
            found = measure(arms, prompts, args.tokens, args.seconds, args.rounds)
        finally:
            arms.close()
    data = {
        "header": {
            "format": results.ENGINE_FORMAT,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": args.commit or commit(ROOT),
            "device": args.device,
            "gpu": gpu_info() if args.device == "cuda" else None,
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
            "prompts": {kind: len(texts) for kind, texts in prompts.items()},
            "tokens": args.tokens,
            "started_s": {name: told["start_s"] for name, told in arms.started.items()},
            "not_measured": [name for name in args.arms if name not in arms.links],
            "walk_tolerance": WALK_TOLERANCE[args.device],
            "target_sha256": document["target_sha256"],
            "drafter_sha256": document["drafter_sha256"],
        },
        "rows": rows_of_file(found),
        "walks": [],
        "problems": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        args.out.write_text(json.dumps(data, indent=1) + "\n")

    write()
    data["walks"] = walk_of(found, prompts)
    data["problems"] = problems_of(data["walks"], args.device)
    write()
    results.load_engine(args.out)
    from . import plot, table

    print(table.engine_acceptance(data), table.engine_speeds(data), sep="\n\n")
    try:
        plot.draw_engine(data, args.out.with_suffix(".png"))
    except ImportError as error:  # python -m acceptance.plot FILE, elsewhere
        print(f"acceptance: no picture: {error}", file=sys.stderr)
    for problem in data["problems"]:
        print(f"acceptance: {problem}", file=sys.stderr)
    return 1 if data["problems"] or data["header"]["not_measured"] else 0
