# SPDX-License-Identifier: Apache-2.0
"""One Engine in a process of its own. engine.py tells it over a socket what to generate.

python -m acceptance.arm '{"arm": "tree 16", "device": "cuda", ...}'     # what engine.py calls
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from . import WIDTHS

MODELS = Path(__file__).resolve().parents[2] / "test" / "models"
BLOCK = 8  # of the small model's drafter
WIDEST = max(WIDTHS)
# dflash is upstream's chain; chain the same drafts verified by DDTREE, which can also sample where upstream cannot.
ARMS = ("dflash", "chain", *(f"tree {width}" for width in WIDTHS), "auto")
MAX_BATCH = 8


def speculation_of(arm: str) -> dict[str, Any]:
    """Arguments of an Engine."""
    if arm not in ARMS:
        raise ValueError(f"arm: expected one of {', '.join(ARMS)}; got {arm!r}")
    if arm == "dflash":
        return {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": BLOCK}
    if arm == "chain":
        return {
            "speculative_algorithm": "DDTREE",
            "speculative_num_draft_tokens": BLOCK,
            "speculative_ddtree_topk": 1,
        }
    if arm == "auto":
        return {
            "speculative_algorithm": "DDTREE",
            "speculative_num_draft_tokens": WIDEST,
            "speculative_ddtree_budget": "auto",
        }
    return {"speculative_algorithm": "DDTREE", "speculative_num_draft_tokens": int(arm.removeprefix("tree "))}


def arguments_of(arm: str, device: str, models: Path = MODELS, batches: tuple[int, ...] = ()) -> dict[str, Any]:
    """models: a folder of target and drafter. batches: sizes that graphs are captured for; all if empty."""
    arguments: dict[str, Any] = {
        "model_path": str(models / "target"),
        "speculative_draft_model_path": str(models / "drafter"),
        "attention_backend": "kdtree_sm120",
        "max_running_requests": MAX_BATCH,
        "max_total_tokens": 32768,
        "context_length": 4096,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "random_seed": 1,
        "watchdog_timeout": 300,
        "log_level": "info",
        "sleep_on_idle": True,  # the others, while one has its turn
    }
    if device == "cpu":
        arguments |= {"device": "cpu", "dtype": "float32"}
    else:
        # All Engines share the GPU. Graphs of a prefill take most of a start, and no part in a decode step.
        arguments |= {
            "dtype": "bfloat16",
            "mem_fraction_static": 0.3,
            "cuda_graph_max_bs_decode": MAX_BATCH,
            "disable_prefill_cuda_graph": True,
        }
        if batches:
            arguments["cuda_graph_bs_decode"] = list(batches)
    return arguments | speculation_of(arm)


def rows_of(arm: str, meta: dict[str, Any]) -> int:
    """Rows that the target verified for an answer."""
    if arm == "dflash":
        return BLOCK * meta["spec_verify_ct"]
    return meta["ddtree"][-1]["nodes_verified"]


def on_the_same_text(arm: str, meta: dict[str, Any]) -> dict[str, int]:
    """What the steps of an answer committed, and what a chain would have from where each of them began."""
    if arm == "dflash":
        return dict.fromkeys(("tree_tokens", "chain_tokens"), meta["completion_tokens"] - 1)
    return {key: meta["ddtree"][-1][key] for key in ("tree_tokens", "chain_tokens")}


def generate(engine, arm: str, batches: list[list[str]], temperature: float, tokens: int) -> dict[str, Any]:
    """Batches one after another. batch_seconds: of each, from when all its requests had their first token."""
    # A request is told of its first token and of its end, and of nothing between that would take the host's time.
    parameters = {
        "temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, "stream_interval": tokens + 1
    }  # fmt: skip
    outputs, batch_seconds = [], []
    for batch in batches:
        latest: dict[int, dict[str, Any]] = {}
        begin = end = 0.0
        for chunk in engine.generate(batch, parameters, stream=True):
            end = time.perf_counter()
            if len(latest) < len(batch):
                begin = end
            latest[chunk["index"]] = chunk
        batch_seconds.append(end - begin)
        outputs += [latest[i] for i in range(len(batch))]
    metas = [output["meta_info"] for output in outputs]
    steps = [meta["spec_verify_ct"] for meta in metas]
    committed = [on_the_same_text(arm, meta) for meta in metas]
    size = len(batches[0])
    # A batch takes as many steps as its longest request.
    batch_steps = [max(steps[i : i + size]) for i in range(0, len(steps), size)]
    return {
        "seconds": sum(batch_seconds),
        "batch_seconds": batch_seconds,
        "answers": [output["output_ids"] for output in outputs],
        "tokens": sum(meta["completion_tokens"] - 1 for meta in metas),
        "steps": sum(steps),
        "batch_steps": batch_steps,
        "rows": sum(rows_of(arm, meta) for meta in metas),
        **{key: sum(counts[key] for counts in committed) for key in committed[0]},
    }


def main(argv: list[str]) -> int:
    task = json.loads(argv[0])
    arm = task["arm"]
    if cores := task.get("cores"):
        os.sched_setaffinity(0, cores)  # of the Engine's processes, too
    arguments = arguments_of(arm, task["device"], Path(task.get("models", MODELS)), tuple(task.get("batches", ())))
    print(f"acceptance: {arm}: {json.dumps(arguments)}", flush=True)
    import sglang

    start = time.monotonic()
    engine = sglang.Engine(**arguments)
    with Client(task["address"], family="AF_UNIX") as parent:
        parent.send({"arm": arm, "start_s": round(time.monotonic() - start, 1), "can_sample": can_sample(arm)})
        while (job := parent.recv()) is not None:
            parent.send(generate(engine, arm, **job))
    engine.shutdown()
    return 0


def can_sample(arm: str) -> bool:
    """Upstream's chain decodes greedily at any temperature where its sampling kernel is missing."""
    if arm != "dflash":
        return True
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    return bool(is_dflash_sampling_verify_available())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
