# SPDX-License-Identifier: Apache-2.0
"""Experts on two ranks at batch 1, on a live server: which experts a step activates on each rank (probe moe, from
upstream's recorder), and the time that the ranks wait for each other (from a profile of both)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import backend_churn as churn
import backend_e2e as e2e
import requests
from one_rank.arm import PROFILED_STEPS, traces_by_rank, turn_of
from one_rank.breakdown import collective_times, kernel_times
from one_rank.shapes import KIMI_RANK

from .jobs import RANKS, TIMED, Job, Run, explained

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Layers of Kimi K2.6 with whole experts, 64 of them instead of 384, and the small model's tokenizer: a token reads 8
# experts of 88 MB in each layer, so that the rank that has more of them is the slower one.
WIDE = KIMI_RANK | {
    "num_hidden_layers": 6, "num_attention_heads": 8 * RANKS, "num_key_value_heads": 8 * RANKS,
    "intermediate_size": KIMI_RANK["intermediate_size"] * RANKS, "moe_intermediate_size": 2048,
    "n_routed_experts": 64, "vocab_size": 2048, "num_nextn_predict_layers": 0,
}  # fmt: skip
MODELS = ("trained", "wide")
RESULT = e2e.ROOT / "benchmark" / "results" / "h200" / "mla_tree_verify.json"
CONTEXT, TOKENS = 512, 64


def model_folder(name: str, folder: Path) -> Path:
    if name == "trained":
        return e2e.MODELS / "target"
    path = folder / "wide"
    path.mkdir(exist_ok=True)
    small = json.loads((e2e.MODELS / "target" / "config.json").read_text())
    ids = {key: small[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (path / "config.json").write_text(json.dumps(WIDE | ids))
    for file in TOKENIZER:
        shutil.copy(e2e.MODELS / "target" / file, path / file)
    return path


def server_arguments(name: str, model: Path) -> list[str]:
    values = {
        "model-path": model, "ep-size": RANKS, "attention-backend": "kdtree_sm120", "dtype": "bfloat16",
        "expert-distribution-recorder-mode": "per_pass", "max-total-tokens": 8192, "max-running-requests": 4,
        "context-length": 4096, "cuda-graph-max-bs-decode": 4, "mem-fraction-static": e2e.SHARED_GPU,
        "sampling-backend": "pytorch", "grammar-backend": "none", "random-seed": 1,
    }  # fmt: skip
    values |= {key.replace("_", "-"): value for key, value in e2e.several_ranks(RANKS, "cuda").items()}
    if name == "wide":
        values["load-format"] = "dummy"
    return churn.command_line(values)


def jobs(run: Run) -> list[Job]:
    if run.device != "cuda":
        return []  # upstream's recorder wants a GPU
    return [Job("moe", name, lambda name=name: work(name, run), TIMED) for name in MODELS]


def work(name: str, run: Run) -> dict:
    model = model_folder(name, run.folder)
    recordings = run.folder / f"recordings-{name}"
    recordings.mkdir()
    env = e2e.environment_of(RANKS, run.device) | {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(recordings)}
    arguments = server_arguments(name, model)
    log = run.logs / f"moe-{name}.log"
    start_timeout = min(run.args.start_timeout, run.left())
    with explained(log), churn.server(arguments, log, start_timeout=start_timeout, env=env) as (url, _):
        row = {"model": name, "shape": shape_of(model)}
        row |= probe(url, recordings, model, redundant="2,4" if name == "trained" else "16,32")
        with turn_of(str(run.turn(TIMED))):
            try:
                row |= profile(url, row["shape"])
            except Exception as error:
                row["profile_error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def shape_of(model: Path) -> dict[str, int]:
    config = json.loads((model / "config.json").read_text())
    names = (
        "num_hidden_layers", "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok", "hidden_size",
        "moe_intermediate_size",
    )  # fmt: skip
    return {name: config[name] for name in names}


def bandwidth() -> float:
    """GB/s at which this card was seen to read."""
    return json.loads(RESULT.read_text())["header"]["ceilings"]["read_gbps"]


def probe(url: str, recordings: Path, model: Path, *, redundant: str) -> dict:
    """The verb, and from the same recording the experts by layer and rank, means over steps."""
    from sglang.kdtree.probe import moe_model
    from sglang.kdtree.probe.moe_trace import divided, load_counts, trace_files

    command = [
        sys.executable, "-m", "sglang.kdtree", "probe", "moe", "--url", url, "--record-dir", str(recordings),
        "--ranks", str(RANKS), "--context", str(CONTEXT), "--output-tokens", str(TOKENS), "--redundant", redundant,
        "--model-config", str(model / "config.json"), "--bandwidth", str(bandwidth()), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode not in (0, 1):  # 1: a finding
        raise RuntimeError(f"probe moe: exit code {done.returncode}: {(done.stderr + done.stdout)[-500:]}")
    counts = divided(load_counts(trace_files(recordings), experts=None), copies=RANKS)
    layers, experts = counts.tokens.shape[1:]
    activated = moe_model.activated_per_rank(
        counts.tokens, moe_model.contiguous(layers=layers, experts=experts, ranks=RANKS)
    )
    return {
        "probe": json.loads(done.stdout),
        "layers": counts.layers,
        "activated": activated.mean(axis=0).round(3).tolist(),  # [layer][rank]
        "slowest": activated.max(axis=2).mean(axis=0).round(3).tolist(),  # [layer]
    }


def profile(url: str, shape: dict[str, int]) -> dict:
    """Of decode steps at batch 1, both ranks: see collective_times and waiting_by_layer."""
    with tempfile.TemporaryDirectory() as name:
        asked = {
            "output_dir": name, "activities": ["GPU"], "record_shapes": False, "profile_by_stage": True,
            "num_steps": PROFILED_STEPS,
        }  # fmt: skip
        post(url, "start_profile", asked)
        parameters = {"temperature": 0, "max_new_tokens": 4 * PROFILED_STEPS, "ignore_eos": True}
        post(url, "generate", {"text": "import os\n", "sampling_params": parameters})
        traces = traces_by_rank(Path(name))
        if sorted(traces) != list(range(RANKS)):
            raise ValueError(f"traces of decode steps of ranks {sorted(traces)}")
        found = collective_times([traces[rank] for rank in range(RANKS)], steps=PROFILED_STEPS)
        kernels = kernel_times(traces[0], steps=PROFILED_STEPS)
    return {"collectives": found, "kernels_us": kernels, "waiting": waiting_by_layer(found, shape)}


def post(url: str, path: str, body: dict[str, Any]) -> None:
    answer = requests.post(f"{url}/{path}", json=body, timeout=120)
    if answer.status_code != 200:
        raise RuntimeError(f"{path}: status {answer.status_code}: {answer.text[:200]}")


def waiting_by_layer(found: dict[str, Any], shape: dict[str, int]) -> dict[str, Any] | None:
    """What the first rank to arrive waits, microseconds a step: before the all-reduces behind attention, where both
    ranks have the same work, and before those behind the experts of each layer. None where a step's all-reduces are not
    one of the embedding and two a layer."""
    names, waits = found["order"], found["waiting_each_us"]
    if names is None:
        return None
    # A profile may begin in the middle of a step, which ends with the logits of all ranks.
    gathers = [i for i, name in enumerate(names) if not is_all_reduce(name)]
    if not gathers:
        return None
    last = gathers[-1] + 1
    if any(is_all_reduce(name) for name in names[last:]):
        names, waits = names[last:] + names[:last], waits[last:] + waits[:last]
    reduced = [wait for name, wait in zip(names, waits, strict=True) if is_all_reduce(name)]
    layers, dense = shape["num_hidden_layers"], shape["first_k_dense_replace"]
    if len(reduced) != 1 + 2 * layers:
        return None
    return {
        "attention_us": [round(us, 2) for us in reduced[1::2]],
        "experts_us": [round(us, 2) for us in reduced[2 + 2 * dense :: 2]],
        "lost_us_per_step": round(sum(reduced[2 + 2 * dense :: 2]), 2),
    }


def is_all_reduce(name: str) -> bool:
    return re.search(r"all_?reduce|one_?shot|two_?shot", name, re.IGNORECASE) is not None


def rows(outcomes: dict[str, dict], device: str) -> list[dict]:
    return [row_of(name, outcomes[name]) for name in MODELS if name in outcomes]


def row_of(name: str, outcome: dict) -> dict:
    if "error" in outcome:
        return {"model": name, "problems": [outcome["error"]]}
    row = {**outcome, "problems": []}
    if "profile_error" in outcome:
        row["problems"].append(f"no profile: {outcome['profile_error']}")
    top_k = outcome["shape"]["num_experts_per_tok"]
    for layer, activated in zip(outcome["layers"], outcome["activated"], strict=True):
        if abs(sum(activated) - top_k) > 0.01:
            row["problems"].append(f"layer {layer}: {sum(activated)} experts of a token, not {top_k}: not batch 1")
    return row
