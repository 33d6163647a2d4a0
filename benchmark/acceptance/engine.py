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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
SAMPLED_ROUND = 1  # one of all: sampled answers differ, so they are for acceptance, not for speed
WARM_TOKENS = 16
HEAD_START_S = {"cuda": 6, "cpu": 0}
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


def measure(
    arms: Arms, prompts: dict[str, list[str]], tokens: int, seconds: float, rounds: int, keep: Callable[[dict], None]
) -> dict:
    """{(arm, temperature, kind, batch): what each round told}. keep is given it whenever all arms have told as much."""
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
    sampled = [cell for cell in every if cell[0] != "0"]
    run(greedy, WARM_TOKENS)  # kernels are compiled and loaded
    found.clear()
    begin = last = time.monotonic()
    for number in range(rounds):
        for cells_of_round in (greedy, sampled if number == SAMPLED_ROUND else []):
            run(cells_of_round)
            keep({key: told for key, told in found.items() if key[0] in arms.links})
        now = time.monotonic()
        print(f"acceptance: round {number + 1} took {now - last:.1f} s", flush=True)
        took, last = now - last, now
        if number + 1 >= MIN_ROUNDS and now - begin + took > seconds:
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


def walk_of(told: list[dict], prompts: dict[str, list[str]]) -> list[dict]:
    """Beside the steps of first_answers those of the walk of the same answers."""
    from .scores import Continuation, load_models, log_probs_of
    from .walk import Step

    target, drafter, tokenizer = load_models()
    steps_of: dict[tuple, dict[int, Step]] = {}  # arms share answers
    rows = []
    for cell in told:
        name, walked = cell["arm"], 0
        for prompt, tokens in zip(prompts[cell["kind"]], cell["answers"], strict=True):
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
        rows.append({key: cell[key] for key in ("arm", "temperature", "kind", "steps")} | {"walk_steps": walked})
    return rows


def problems_of(walks: list[dict], device: str) -> list[str]:
    tolerance = WALK_TOLERANCE[device]
    return [
        f"{row['arm']}, T = {row['temperature']}, {row['kind']}: {row['steps']} steps, {row['walk_steps']} in the walk"
        for row in walks if abs(row["steps"] - row["walk_steps"]) > tolerance * row["walk_steps"]
    ]  # fmt: skip


def header_of(args: argparse.Namespace, prompts: dict[str, list[str]], document: dict) -> dict:
    import torch
    from verify_bench.results import commit, gpu_info

    return {
        "format": results.ENGINE_FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": args.commit or commit(ROOT),
        "device": args.device,
        "gpu": gpu_info() if args.device == "cuda" else None,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "prompts": {kind: len(texts) for kind, texts in prompts.items()},
        "tokens": args.tokens,
        "walk_tolerance": WALK_TOLERANCE[args.device],
        "target_sha256": document["target_sha256"],
        "drafter_sha256": document["drafter_sha256"],
    }


def run(args: argparse.Namespace) -> int:
    document = json.loads((MODELS / "expected_steps.json").read_text())
    prompts = chosen_prompts(document["entries"], args.prompts)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"header": {}, "rows": [], "walks": [], "problems": []}

    def keep(found: dict) -> None:
        """A run that is cut short leaves this, for --walk."""
        data["rows"], data["first_answers"] = rows_of_file(found), first_answers(found)
        part = args.out.with_name(f"{args.out.name}.part")
        part.write_text(json.dumps(data, indent=1) + "\n")
        part.replace(args.out)

    with tempfile.TemporaryDirectory() as name:
        logs = args.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(1) as pool:  # imports torch while the Engines do
            header = pool.submit(header_of, args, prompts, document)
            arms = Arms(args.arms, args.device, logs, Path(name))
        try:
            data["header"] = header.result() | {
                "started_s": {name: told["start_s"] for name, told in arms.started.items()},
                "not_measured": [name for name in args.arms if name not in arms.links],
            }
            found = measure(arms, prompts, args.tokens, args.seconds, args.rounds, keep)
            data["header"]["not_measured"] = [name for name in args.arms if name not in arms.links]
        finally:
            arms.close()
    keep(found)
    return finish(data, prompts, args.out)


def finish(data: dict, prompts: dict[str, list[str]], out: Path) -> int:
    """The walk, the tables and the picture of what was measured."""
    from . import plot, table

    data["walks"] = walk_of(data.pop("first_answers"), prompts)
    data["problems"] = problems_of(data["walks"], data["header"]["device"])
    out.write_text(json.dumps(data, indent=1) + "\n")
    results.load_engine(out)
    print(table.engine_acceptance(data), table.engine_speeds(data), sep="\n\n")
    try:
        plot.draw_engine(data, out.with_suffix(".png"))
    except ImportError as error:  # python -m acceptance.plot FILE, elsewhere
        print(f"acceptance: no picture: {error}", file=sys.stderr)
    for problem in data["problems"]:
        print(f"acceptance: {problem}", file=sys.stderr)
    return 1 if data["problems"] or data["header"]["not_measured"] else 0


def walk_file(path: Path, out: Path) -> int:
    """Finish a file that a run left which was cut short."""
    data = json.loads(path.read_text())
    counts = data["header"]["prompts"]
    document = json.loads((MODELS / "expected_steps.json").read_text())
    prompts = {k: texts[: counts[k]] for k, texts in chosen_prompts(document["entries"], None).items()}
    return finish(data, prompts, out)


def first_answers(found: dict) -> list[dict]:
    """Of the first round, one request at a time, and of arms whose steps a walk can foretell."""
    return [
        {"arm": name, "temperature": t, "kind": kind, "steps": rounds[0]["steps"], "answers": rounds[0]["answers"]}
        for (name, t, kind, size), rounds in found.items()
        # Upstream's chain accepts a sampled draft at random.
        if size == 1 and name != "auto" and not (name == "dflash" and t != "0")
    ]  # fmt: skip
