# SPDX-License-Identifier: Apache-2.0
"""Real Engines on the small model: an Engine an arm, all of them started side by side, measured in turns.

A round asks every arm for the same cells (a kind of text, a temperature, a batch size); what drifts between rounds
drifts for all arms, so the ratio of two arms is taken within rounds. Before anything is timed every cell runs once.

Each answer is also walked in torch, in float32, with the drafter's scores: an arm of fixed shape has to take as many
steps as the walk of its own answer. In float32, on a CPU, that is exact. On a GPU the Engines compute in bfloat16,
where near-ties of the drafter fall either way: the rule, made before the first run, is that the steps of a cell differ
by at most WALK_TOLERANCE.

--paired asks for one ratio instead, as sharply as time allows: few arms, each on CPU cores of its own, prompt after
prompt in turns, one more kind of text where branching can bring nothing, sampled answers in every round. What
else a machine does only ever adds to a time. So beside the median of the rounds' ratios, with its bootstrap interval,
there is the quotient of tokens a step (mean of all rounds) and milliseconds a step (of each prompt the least of all
rounds). --walk FILE adds the walk elsewhere.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from random import Random
from typing import Any

from . import results, table
from .arm import BLOCK, MAX_BATCH, MODELS
from .deeper import make_deeper

BENCHMARK = Path(__file__).resolve().parents[1]
ROOT = BENCHMARK.parent
# Prompts of each kind at most. "long": of about 3,000 tokens.
PROMPTS = {"code": 4, "prose": 2, "noise": 2, "long": 1}
PAIRED_PROMPTS = {"repeat": 2, "code": 3, "prose": 3, "noise": 2, "long": 1}
PAIRED_ARMS = ("dflash", "auto")
BATCHES = (1, MAX_BATCH)
TOKENS = 128
START_TIMEOUT_S = {"cuda": 120, "cpu": 900}
# As test/e2e/servers.py: an Engine of a CPU has one thread.
ON_CPU = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
# Sampled answers differ from round to round: one round of them is enough for acceptance, more for a speed.
SAMPLED_ROUNDS, PAIRED_SAMPLED_ROUNDS = (1,), (0, 1, 5)
COUNTS = ("tokens", "steps", "rows", "tree_tokens", "chain_tokens")
WARM_TOKENS = 16
HEAD_START_S = {"cuda": 8, "cpu": 0}
MIN_ROUNDS, MAX_ROUNDS = 2, 9
WALK_TOLERANCE = {"cpu": 0.0, "cuda": 0.05}


class Arms:
    """The processes that hold the Engines. task: what all are told beside their names."""

    def __init__(self, names: list[str], device: str, logs: Path, folder: Path, is_paired: bool = False, **task: Any):
        self.links: dict[str, Connection] = {}
        self.started: dict[str, dict[str, Any]] = {}
        self.device, self.logs, self.address, self.task = device, logs, str(folder / "arms"), task
        self.cores = cores_of(names) if is_paired else {}
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
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        environment |= ON_CPU if self.device == "cpu" else {"OMP_NUM_THREADS": "2"} if self.cores else {}
        for name in names:
            task = {"arm": name, "device": self.device, "address": self.address, "cores": self.cores.get(name)}
            task = json.dumps(task | self.task)
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


def cores_of(names: list[str]) -> dict[str, list[int]]:
    """Of each arm its own, as long as each can have two."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // (len(names) + 1)  # some are left to this process
    return {name: cores[i * share : (i + 1) * share] for i, name in enumerate(names)} if share > 1 else {}


def chosen_prompts(entries: list[dict], most: int | None, wanted: dict[str, int] = PROMPTS) -> dict[str, list[str]]:
    prompts: dict[str, list[str]] = {kind: [] for kind in wanted}
    for entry in entries:
        found = prompts.get(entry["kind"])
        if found is not None and len(found) < min(wanted[entry["kind"]], most or 99):
            found.append(entry["prompt"])
    return prompts


def batches_of(prompts: list[str], size: int) -> list[list[str]]:
    """Each prompt once, or as often as fills whole batches."""
    repeated = prompts * (-(-size // len(prompts)) if len(prompts) < size else 1)
    repeated = repeated[: len(repeated) // size * size]
    return [repeated[i : i + size] for i in range(0, len(repeated), size)]


def cells(prompts: dict[str, list[str]], temperatures: Sequence[str]) -> list[tuple[str, str, int]]:
    """Sampled answers, and those to long prompts, one at a time alone. None that repeats its prompt is sampled."""
    return [
        (t, kind, size) for t in temperatures for size in BATCHES for kind in prompts
        if (size == 1 or (t == "0" and kind != "long")) and (t == "0" or kind != "repeat")
    ]  # fmt: skip


def measure(
    arms: Arms, prompts: dict[str, list[str]], tokens: int, seconds: float, rounds: int, keep: Callable[[dict], None],
    is_paired: bool = False, temperatures: Sequence[str] = results.TEMPERATURES,
) -> dict:  # fmt: skip
    """{(arm, temperature, kind, batch): what each round told}. keep is given it whenever all arms have told as much."""
    found: dict[tuple, list[dict]] = {}

    def run(wanted: list[tuple[str, str, int]], turn: int, tokens: int = tokens) -> None:
        for temperature, kind, size in wanted:
            batches = batches_of(prompts[kind], size)
            told: dict[str, list[dict]] = {}
            for piece in ([batch] for batch in batches) if is_paired else (batches,):
                for name in in_turn(list(arms.links), turn if is_paired else 0):
                    if temperature != "0" and not arms.started[name]["can_sample"]:
                        continue
                    try:
                        part = arms.ask(name, batches=piece, temperature=float(temperature), tokens=tokens)
                    except (EOFError, OSError):  # its Engine has ended; the study goes on without it
                        print(f"acceptance: lost {name}", file=sys.stderr, flush=True)
                        del arms.links[name]
                        continue
                    told.setdefault(name, []).append(part)
            for name, parts in told.items():
                if name in arms.links:
                    found.setdefault((name, temperature, kind, size), []).append(added(parts))

    every = cells(prompts, temperatures)
    greedy = [cell for cell in every if cell[0] == "0"]
    sampled = [cell for cell in every if cell[0] != "0"]
    sampled_rounds = PAIRED_SAMPLED_ROUNDS if is_paired else SAMPLED_ROUNDS
    if not greedy:
        sampled_rounds = range(rounds)
    run(every if is_paired else greedy, 0, WARM_TOKENS)  # kernels are compiled and loaded
    found.clear()
    begin = last = time.monotonic()
    for number in range(rounds):
        for cells_of_round in (greedy, sampled if number in sampled_rounds else []):
            run(cells_of_round, number)
            keep({key: told for key, told in found.items() if key[0] in arms.links})
        now = time.monotonic()
        print(f"acceptance: round {number + 1} took {now - last:.1f} s", flush=True)
        took, last = now - last, now
        if number + 1 >= MIN_ROUNDS and now - begin + took > seconds:
            break
    return {key: rounds for key, rounds in found.items() if key[0] in arms.links}


def in_turn(names: list[str], turn: int) -> list[str]:
    """Each is the first one in some rounds."""
    turn %= max(len(names), 1)
    return names[turn:] + names[:turn]


def added(parts: list[dict]) -> dict:
    """What several batches told, as one."""
    return {key: sum((part[key] for part in parts[1:]), parts[0][key]) for key in parts[0]}


def quantiles(values: list[float]) -> list[float]:
    """The lowest, the median and the highest."""
    return [min(values), statistics.median(values), max(values)]


def least_step_ms(rounds: list[dict]) -> float:
    """The mean of the batches, of each the least of all rounds."""
    times = [
        [seconds / steps for seconds, steps in zip(told["batch_seconds"], told["batch_steps"], strict=True)]
        for told in rounds
    ]
    return 1e3 * statistics.mean(min(batch) for batch in zip(*times, strict=True))


def interval_of_median(values: list[float], draws: int = 2000) -> list[float]:
    """95 %, by bootstrap; always the same for the same values."""
    random = Random(0)
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(draws))
    return [medians[int(draws * 0.025)], medians[int(draws * 0.975) - 1]]


def rows_of_file(found: dict) -> list[dict]:
    rows = []
    for (name, temperature, kind, size), rounds in found.items():
        total = {key: sum(told[key] for told in rounds) for key in COUNTS}
        speeds = [told["tokens"] / told["seconds"] for told in rounds]
        step_ms = [1e3 * told["seconds"] / sum(told["batch_steps"]) for told in rounds]
        row = {
            "arm": name, "temperature": temperature, "kind": kind, "batch": size, "rounds": len(rounds), **total,
            "accept_length": round(total["tokens"] / total["steps"], 3),
            "rows_per_token": round(total["rows"] / total["tokens"], 3),
            "tok_s": [round(speed, 1) for speed in speeds],
            "step_ms": [round(ms, 4) for ms in quantiles(step_ms)],
            "least_step_ms": round(least_step_ms(rounds), 4),
            "batch_step_ms": [
                [round(1e3 * s / n, 3) for s, n in zip(told["batch_seconds"], told["batch_steps"], strict=True)]
                for told in rounds
            ],
        }  # fmt: skip
        for base in ("dflash", "chain"):
            if base != name and (others := found.get((base, temperature, kind, size))):
                ratios = [
                    speed * other["seconds"] / other["tokens"] for speed, other in zip(speeds, others, strict=True)
                ]
                row[f"over_{base}"] = [round(ratio, 4) for ratio in quantiles(ratios)]
                row[f"over_{base}_interval"] = [round(ratio, 4) for ratio in interval_of_median(ratios)]
                length = sum(other["tokens"] for other in others) / sum(other["steps"] for other in others)
                least = total["tokens"] / total["steps"] / length * least_step_ms(others) / least_step_ms(rounds)
                row[f"over_{base}_least"] = round(least, 4)
                # Sampled answers differ from arm to arm, so that a length is luck; the chain on this arm's own is not.
                least = total["tree_tokens"] / total["chain_tokens"] * least_step_ms(others) / least_step_ms(rounds)
                row[f"over_{base}_same_text"] = round(least, 4)
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
        # Nothing foretells the adaptive budget; upstream's chain accepts a sampled draft at random.
        if name == "auto" or (name == "dflash" and cell["temperature"] != "0"):
            continue
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


def ways_of(told: list[dict], prompts: dict[str, list[str]]) -> dict[str, dict[str, dict]]:
    """{temperature: {kind: {way: its counts}}}: the answers of one Engine walked in every way that there is, the
    chain-seeded trees and the adaptive budget at several costs of a row among them."""
    from .scores import Continuation, load_models, log_probs_of
    from .walk import Study, Tally

    target, drafter, tokenizer = load_models()
    source = next((cell["arm"] for cell in told if cell["arm"].startswith("tree ")), "auto")
    found: dict[str, dict[str, dict]] = {}
    for cell in told:
        if cell["arm"] != source:
            continue
        study = Study(BLOCK)
        tallies = {way: Tally() for way in study.ways()}
        for prompt, tokens in zip(prompts[cell["kind"]], cell["answers"], strict=True):
            log_probs = log_probs_of(target, drafter, Continuation(tokenizer.encode(prompt).ids, tokens))
            study.add(tokens, log_probs, BLOCK, tallies)
        entries = {way: results.entry(tally) for way, tally in tallies.items()}
        found.setdefault(cell["temperature"], {})[cell["kind"]] = entries
    return found


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
        "paired": args.paired,
        "layers": args.layers,
        "walk_tolerance": WALK_TOLERANCE[args.device],
        "target_sha256": document["target_sha256"],
        "drafter_sha256": document["drafter_sha256"],
    }


def run(args: argparse.Namespace) -> int:
    document = json.loads((MODELS / "expected_steps.json").read_text())
    prompts = chosen_prompts(document["entries"], args.prompts, PAIRED_PROMPTS if args.paired else PROMPTS)
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
            task = {"batches": BATCHES} if args.paired else {}
            if args.layers:
                make_deeper(MODELS, args.layers, Path(name) / "models")
                task["models"] = str(Path(name) / "models")
            arms = Arms(args.arms, args.device, logs, Path(name), args.paired, **task)
        try:
            data["header"] = header.result() | {
                "started_s": {name: told["start_s"] for name, told in arms.started.items()},
                "not_measured": [name for name in args.arms if name not in arms.links],
            }
            found = measure(arms, prompts, args.tokens, args.seconds, args.rounds, keep, args.paired, args.temperatures)
            data["header"]["not_measured"] = [name for name in args.arms if name not in arms.links]
        finally:
            arms.close()
    keep(found)
    if args.paired:  # --walk finishes it, where a minute costs less
        print(table.engine_paired(data))
        return 1 if data["header"]["not_measured"] else 0
    return finish(data, prompts, args.out)


def finish(data: dict, prompts: dict[str, list[str]], out: Path) -> int:
    """The walk, the tables and the picture of what was measured."""
    from . import plot

    answers = data.pop("first_answers")
    data["walks"], data["ways"] = walk_of(answers, prompts), ways_of(answers, prompts)
    data["problems"] = problems_of(data["walks"], data["header"]["device"])
    out.write_text(json.dumps(data, indent=1) + "\n")
    results.load_engine(out)
    print(table.engine_acceptance(data), table.engine_speeds(data), table.engine_ways(data), sep="\n\n")
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
    prompts = chosen_prompts(document["entries"], None, counts)
    return finish(data, prompts, out)


def first_answers(found: dict) -> list[dict]:
    """Of the first round, one request at a time."""
    return [
        {"arm": name, "temperature": t, "kind": kind, "steps": rounds[0]["steps"], "answers": rounds[0]["answers"]}
        for (name, t, kind, size), rounds in found.items() if size == 1
    ]  # fmt: skip
