# SPDX-License-Identifier: Apache-2.0
"""One arm in a process of its own: start the Engine, wait for the turn, measure every context, print rows.

python -m one_rank.arm '{"arm": "tree_kdtree", "s_q": 9, ...}'     # what __main__ calls
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from .breakdown import collective_times, kernel_times, whole_steps
from .experts import VARIABLE as TILES_VARIABLE
from .experts import write_tiles
from .seed import TOKENS_VARIABLE, path_ids, plugin_folder
from .shapes import ACCEPT_LENGTHS, ARMS, SCALES, Run, engine_arguments

TAIL = 8  # tokens of a prompt behind the seeded path
WARM_STEPS = 4
MIN_STEPS = 6
PROBE_TOKENS = 6  # about as many steps: dummy weights accept next to nothing
# A step that takes longer varies by little, and is measured a few times only.
SLOW_STEP_MS = 300.0
SLOW_WARM_STEPS, SLOW_STEPS = 1, 3
PROFILED_STEPS = 5
LOGGED_KERNELS = 40
PROFILED_ARMS = ("plain_triton", "tree_kdtree")


@dataclasses.dataclass(frozen=True)
class Task:
    arm: str
    s_q: int
    scale: str
    contexts: list[int]
    kv_dtype: str
    page_size: int
    steps: int  # measured at each context, if limit_s allows
    limit_s: float  # of one context
    profile: bool
    turn: str  # a file; whoever has its lock measures
    rows: str  # a file; one JSON object a line
    ranks: int = 1
    custom_all_reduce: bool = False
    first_gpu: int = 0
    draft_window: int = 0  # tokens that a DFLASH drafter sees; 0 = the whole context

    @property
    def run(self) -> Run:
        return Run(self.arm, self.s_q, self.ranks, self.custom_all_reduce)


def quantile(values: list[float], share: float) -> float:
    """Linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What had arrived at one moment of a stream."""

    seconds: float
    steps: int  # verify steps, or decode steps
    tokens: int
    cached: int


def stream(engine, prompt: list[int], new_tokens: int) -> tuple[float, list[Chunk]]:
    """-> seconds to the first chunk, and all chunks"""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    start, chunks = time.perf_counter(), []
    for output in engine.generate(input_ids=prompt, sampling_params=parameters, stream=True):
        meta = output["meta_info"]
        tokens = meta["completion_tokens"]
        steps = meta.get("spec_verify_ct") or tokens - 1
        chunks.append(Chunk(time.perf_counter(), steps, tokens, meta.get("cached_tokens", 0)))
    return chunks[0].seconds - start, chunks


def step_times_ms(chunks: list[Chunk], warm_steps: int = WARM_STEPS) -> list[float]:
    """Of every interval between chunks behind the warm-up, a step's time."""
    times = []
    for before, after in zip(chunks[warm_steps:], chunks[warm_steps + 1 :], strict=False):
        if after.steps > before.steps:
            times.append(1e3 * (after.seconds - before.seconds) / (after.steps - before.steps))
    return times


def steps_within(limit_s: float, step_ms: float, wanted: int) -> tuple[int, int]:
    """-> steps of warm-up, steps that are measured; step_ms is a bound"""
    if step_ms > SLOW_STEP_MS:
        return SLOW_WARM_STEPS, min(wanted, SLOW_STEPS)
    return WARM_STEPS, max(MIN_STEPS, min(wanted, int(limit_s * 1e3 / step_ms) - WARM_STEPS))


def row_of(task: Task, context: int, first_s: float, chunks: list[Chunk], warm_steps: int) -> dict:
    times = step_times_ms(chunks, warm_steps)
    if not times:
        raise ValueError(f"no step behind {warm_steps} of warm-up in {len(chunks)} chunks at a context of {context}")
    warm, last = chunks[warm_steps], chunks[-1]
    steps = last.steps - warm.steps
    p50 = quantile(times, 0.5)
    return {
        "arm": task.arm,
        "context": context,
        "s_q": task.s_q,
        "kv_dtype": task.kv_dtype,
        "page_size": task.page_size,
        "graphs": ARMS[task.arm].graphs and task.scale == "full",
        "ms_per_step_p20": round(quantile(times, 0.2), 4),
        "ms_per_step_p50": round(p50, 4),
        "ms_per_step_p80": round(quantile(times, 0.8), 4),
        "steps": steps,
        "accept_length": round((last.tokens - warm.tokens) / steps, 3),
        "cached_tokens": last.cached,
        "first_chunk_s": round(first_s, 3),
        "tok_s": {str(a): round(1e3 * a / p50, 2) for a in ACCEPT_LENGTHS},
        **({"draft_window": task.draft_window} if ARMS[task.arm].has_window else {}),
        **({"ranks": task.ranks, "custom_all_reduce": task.custom_all_reduce} if task.ranks > 1 else {}),
    }


def write_models(task: Task, folder: Path) -> dict[str, str]:
    """-> the Engine's arguments that name them"""
    scale, named = SCALES[task.scale].times(task.ranks), {}
    parts = {"model_path": scale.model}
    if ARMS[task.arm].algorithm in ("DFLASH", "DDTREE"):
        parts["speculative_draft_model_path"] = scale.drafter
    for argument, config in parts.items():
        path = folder / argument
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config))
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (path / "generation_config.json").write_text(json.dumps(ids))
        named[argument] = str(path)
    return named


@contextlib.contextmanager
def turn_of(path: str):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(engine, task: Task, context: int, path: list[int], vocab: int, before: dict | None = None) -> dict:
    """before: the row of a shorter context"""

    def prompt(salt: int) -> list[int]:
        # Leaves the path at its own place, so that no prompt finds another's tail in the cache.
        return path[: context - TAIL] + path_ids(TAIL, vocab, seed=1000 * context + salt)

    # Steps may be 300 times longer at one end of the table than at the other, at most in proportion to the context. A
    # probe costs a prefill of the tail, which upstream's kernel takes as long for as for a slow step.
    if before is None:
        _, probe = stream(engine, prompt(1), PROBE_TOKENS)
        bound_ms = 1e3 * (probe[-1].seconds - probe[0].seconds) / max(1, probe[-1].steps - probe[0].steps)
    else:
        bound_ms = before["ms_per_step_p50"] * context / before["context"]
    warm_steps, steps = steps_within(task.limit_s, max(bound_ms, 0.01), task.steps)
    # The prefill gives one token. What is accepted all the same makes the stream shorter than asked for.
    first_s, chunks = stream(engine, prompt(2), 1 + warm_steps + steps)
    expected = context - TAIL - max(task.page_size, 2)  # EAGLE matches pairs
    if chunks[-1].cached < expected:
        raise SystemExit(
            f"{task.arm}: {chunks[-1].cached} tokens of {context} were cached: the seeded path is not found"
        )
    row = row_of(task, context, first_s, chunks, warm_steps)
    if task.profile and task.arm in PROFILED_ARMS:
        # A failure here must not cost the times: __main__ reports it.
        try:
            row |= profile(engine, prompt(3), task.ranks)
        except Exception as error:
            row["profile_error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def profile(engine, prompt: list[int], ranks: int) -> dict[str, dict]:
    """kernels_us: microseconds a step by kind of kernel, of PROFILED_STEPS on their own, on rank 0; profiling slows
    what it watches. profiled_steps: whole steps that were seen, 0 = the trace was not cut. Of several ranks also
    collectives: see collective_times."""
    with tempfile.TemporaryDirectory() as folder:
        # By stage: the prefill of the prompt's tail would be most of what is seen. It stops by itself.
        engine.start_profile(
            output_dir=folder, activities=["GPU"], record_shapes=False, profile_by_stage=True, num_steps=PROFILED_STEPS
        )
        stream(engine, prompt, 4 * PROFILED_STEPS)
        traces = traces_by_rank(Path(folder))
        if sorted(traces) != list(range(ranks)):
            raise ValueError(f"traces of decode steps of ranks {sorted(traces)}, expected of {ranks}")
        by_name = kernel_times(traces[0], steps=PROFILED_STEPS, label=lambda name: name[:90])
        for name, us in sorted(by_name.items(), key=lambda item: -item[1])[:LOGGED_KERNELS]:
            print(f"one_rank: {us:9.1f} us a step: {name}", flush=True)
        found = {"kernels_us": kernel_times(traces[0], steps=PROFILED_STEPS), "profiled_steps": whole_steps(traces[0])}
        if ranks > 1:
            found["collectives"] = collective_times([traces[r] for r in range(ranks)], steps=PROFILED_STEPS)
        return found


def traces_by_rank(folder: Path) -> dict[int, Path]:
    """Upstream's profile of the decode stage, a file a rank."""
    return {int(re.search(r"TP-(\d+)", path.name)[1]): path for path in folder.glob("*TP-*DECODE*.trace.json.gz")}


def main(argv: list[str]) -> int:
    task = Task(**json.loads(argv[0]))
    scale = SCALES[task.scale].times(task.ranks)
    longest = max(task.contexts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugins = plugin_folder(folder / "plugins")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(plugins), os.environ.get("PYTHONPATH")]))
        os.environ[TOKENS_VARIABLE] = str(longest)
        sys.path.insert(0, str(plugins))  # the Engine loads plugins in this process too
        arguments = engine_arguments(
            task.run, scale, kv_dtype=task.kv_dtype, page_size=task.page_size,
            total_tokens=(longest + 4096) // task.page_size * task.page_size, draft_window=task.draft_window,
        )  # fmt: skip
        arguments |= write_models(task, folder)
        if scale.name == "full":
            import torch
            import triton

            device_name = torch.cuda.get_device_name(task.first_gpu)
            tiles = write_tiles(folder / "moe", SCALES[task.scale].model, device_name, triton.__version__)
            os.environ[TILES_VARIABLE] = str(tiles)
        if task.first_gpu:
            arguments["base_gpu_id"] = task.first_gpu
        print(f"one_rank: {task.run.name}: {json.dumps(arguments)}", flush=True)
        import sglang

        start = time.monotonic()
        engine = sglang.Engine(**arguments)
        print(f"one_rank: {task.run.name}: started in {time.monotonic() - start:.1f} s", flush=True)
        vocab = scale.model["vocab_size"]
        path = path_ids(longest + 1, vocab)
        with turn_of(task.turn), open(task.rows, "a") as rows:
            stream(engine, path[:32] + path_ids(TAIL, vocab, seed=7), 8)  # kernels load
            row = None
            for context in sorted(task.contexts):
                row = measure(engine, task, context, path, vocab, before=row)
                print(f"one_rank: {task.run.name}: {context:,}: {row['ms_per_step_p50']} ms a step", flush=True)
                rows.write(json.dumps(row) + "\n")
                rows.flush()
        engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
