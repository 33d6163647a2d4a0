# SPDX-License-Identifier: Apache-2.0
"""The small model through the real Engine: kdtree_sm120 against upstream's Triton backend in the same call.

    python benchmark/backend_e2e.py --out benchmark/results/h200/backend_e2e.json     # on a GPU
    python benchmark/backend_e2e.py --device cpu --only 'DDTREE bf16' --out r.json     # against the torch reference
    python benchmark/backend_e2e.py --list

A run is an Engine with an algorithm (plain decoding, a DFLASH chain, a DDTREE tree, EAGLE and EAGLE3 with trees and
with chains, a STANDALONE chain, an NGRAM tree), a KV dtype, a page size, CUDA graphs or none, and a backend:
upstream's, or ours in one of its modes. Two kinds of run differ in more: "mixed" prefills in chunks, together with the
decode steps of other requests, and "split" names a backend for prefill and one for decoding. Each run of ours is
compared with upstream's of the same algorithm, KV dtype and page size.

The rule. Greedy tokens of two bf16 runs may part, at a near-tie only: where they part, upstream's two best tokens are
at most TIE nats apart and ours is one of them, and up to there the log-probabilities of the chosen tokens agree to
DRIFT. So do the answers to the same batch once more, from cached prefixes or in mixed chunks, and to one request alone.
All log-probabilities are finite. A drafter that was trained for the target, or is the target, has at least KEPT of the
tokens accepted that it has with upstream. In the modes on and validate no decode or verify call of the target goes to
the stock backend. Plain decoding runs batches of every size from RUNNING to 1.
With fp8 KV both numbers are those of fp8: upstream reads draft tokens before they are rounded, ours after. In validate
mode every row is also compared in the kernels' own precision, and no mismatch is allowed; with fp8 KV both then read
rounded draft tokens.

It was made before any run, but for these. That validate reads rounded draft tokens with fp8 KV is newer than the first
run, which had 12 mismatches in 13,536 rows without it; and a mismatch with fp8 KV is 2^-2 of a row's largest element
since a run in which 2 of 56,592 rows were beyond 2^-3. Newer than the run of 2026-12-01 04:24 are: that ours is one of
the two best, finite log-probabilities, no call to the stock backend, batches of every size.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODELS = ROOT / "test" / "models"
sys.path.insert(0, str(HERE / "kernels"))

FORMAT = "backend_e2e-1"
TIE = {"bf16": 0.2, "fp8": 0.6}
DRIFT = {"bf16": 0.15, "fp8": 0.5}
KEPT = 0.9
# Capturing prefill takes most of a start, and is not what is looked at where many Engines start at once.
START_SOON = {"disable_prefill_cuda_graph": True}
# Pools have a size of their own. The fraction only ends an Engine where less of the GPU than the rest is free once it
# has its weights, and others may have taken theirs meanwhile.
SHARED_GPU = 0.95
SAMPLES = 400
PROMPTS = 12
RUNNING = 16  # requests at once, of which plain decoding loses one after another
NODES = 16
EAGLE_TYPE = ("EAGLE", "EAGLE-chain", "EAGLE3", "EAGLE3-chain", "STANDALONE")  # their drafts are extended
TRAINED = ("DFLASH", "DDTREE", "STANDALONE")
CHUNK = 64  # tokens of a prefill, of a mixed run
AGAIN = "backend_e2e: the batch again"
REPORT = re.compile(
    r"kdtree_sm120 validate(?P<part>, [^:]+)?: (?P<rows>\d+) rows compared, (?P<over>\d+) over the limit, "
    r"max abs error (?P<max_abs>\S+), relative error mean (?P<mean_rel>\S+) max (?P<max_rel>\S+), "
    r"(?P<mismatches>\d+) mismatches"
)
MISMATCH = re.compile(r"kdtree_sm120 validate[^:]*: (mismatch, .*)")
FALLBACK = re.compile(r"kdtree_sm120(?P<part> [\w ]+)?: to the stock backend: (?P<reason>.*)")
DECODED = re.compile(r"Decode batch\b.*?#running-req: (\d+)")
START = re.compile(r"kdtree_sm120 (?:[\w ]+ )?(?:over Triton|in torch), tp rank (\d+): verify (\w+)")


@dataclasses.dataclass(frozen=True)
class Run:
    algorithm: str  # plain, DFLASH, DDTREE, NGRAM, one of EAGLE_TYPE
    kv: str = "bf16"
    page: int = 1
    graphs: bool = True
    backend: str = "triton"  # or kdtree_sm120
    mode: str = ""  # of kdtree_sm120
    ranks: int = 1  # of tensor parallelism
    kind: str = ""  # or mixed, split

    @property
    def name(self) -> str:
        graphs = "graphs" if self.graphs else "eager"
        parts = (self.algorithm, self.kv, f"page{self.page}", graphs, self.backend, self.mode, self.kind)
        name = " ".join(part for part in parts if part)
        return name if self.ranks == 1 else f"{name} tp{self.ranks}"

    @property
    def captures_prefill(self) -> bool:
        """As upstream does by default. It takes most of a start, and prefill is not what is looked at: these alone."""
        return self.mode != "off" and self.partner in (Run("plain"), Run("DDTREE")) and self.graphs and not self.kind

    @property
    def stock(self) -> Run:
        return Run(self.algorithm, self.kv, self.page)

    @property
    def partner(self) -> Run:
        """What it is compared with: of several ranks one, of one rank upstream's. Upstream's is its own."""
        if self.ranks == 1:
            return self.stock
        return dataclasses.replace(self, ranks=1, mode="on" if self.mode else "")


def all_runs() -> list[Run]:
    runs = []
    for algorithm in ("plain", "DFLASH", "DDTREE", "EAGLE"):
        for kv, page in (("bf16", 1), ("bf16", 64), ("fp8", 1)):
            runs.append(Run(algorithm, kv, page))
            modes = ("on", "validate") if page == 1 else ("on",)
            runs += [Run(algorithm, kv, page, True, "kdtree_sm120", mode) for mode in modes]
        runs.append(Run(algorithm, graphs=False, backend="kdtree_sm120", mode="on"))
        runs.append(Run(algorithm, graphs=False, backend="kdtree_sm120", mode="validate"))
        runs.append(Run(algorithm, backend="kdtree_sm120", mode="off"))
    # Masks, lists and drafters of their own, but no code of ours besides: once.
    for algorithm in ("EAGLE-chain", "EAGLE3", "EAGLE3-chain", "STANDALONE", "NGRAM"):
        runs.append(Run(algorithm))
        runs += [Run(algorithm, backend="kdtree_sm120", mode=mode) for mode in ("on", "validate")]
    runs += [Run("STANDALONE", page=64), Run("STANDALONE", page=64, backend="kdtree_sm120", mode="on")]
    for algorithm in ("plain", "DFLASH", "DDTREE", "EAGLE-chain"):  # upstream mixes none with STANDALONE and NGRAM
        runs.append(Run(algorithm, backend="kdtree_sm120", mode="on", kind="mixed"))
    runs += [Run(algorithm, backend="kdtree_sm120", mode="on", kind="split") for algorithm in ("plain", "DDTREE")]
    return runs


def unavailable(run: Run, device: str) -> str | None:
    if device == "cpu":
        if run.algorithm in (*EAGLE_TYPE, "NGRAM"):
            return f"{run.algorithm} has no CPU form"
        if run.kv == "fp8":
            return "KV is float32 on a CPU"
        if not run.graphs:
            return "a CPU has no CUDA graphs, so this is the run with graphs again"
    return None


def arguments_of(run: Run, device: str, folder: Path) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": str(MODELS / "target"), "page_size": run.page, "max_running_requests": RUNNING,
        "random_seed": run.ranks,  # samples that are compared are independent
        "max_total_tokens": 32768, "context_length": 4096, "sampling_backend": "pytorch", "grammar_backend": "none",
        "watchdog_timeout": 300, "log_level": "info", "decode_log_interval": 1, "attention_backend": run.backend,
    }  # fmt: skip
    if device == "cpu":
        arguments |= {"device": "cpu", "dtype": "float32"}
        if run.backend == "triton":
            arguments["attention_backend"] = "torch_reference"
    else:
        if not run.captures_prefill:
            arguments |= START_SOON
        arguments |= {"dtype": "bfloat16", "mem_fraction_static": SHARED_GPU, "cuda_graph_max_bs_decode": RUNNING}
        if not run.graphs:
            arguments["disable_cuda_graph"] = True
    if run.kind == "mixed":
        arguments |= {"enable_mixed_chunk": True, "chunked_prefill_size": CHUNK}
    if run.kind == "split":
        del arguments["attention_backend"]
        arguments |= {
            "prefill_attention_backend": "torch_reference" if device == "cpu" else "triton",
            "decode_attention_backend": run.backend,
        }  # fmt: skip
        if run.algorithm != "plain":
            arguments["speculative_attention_mode"] = "decode"
    if run.mode:
        arguments["kdtree_verify"] = run.mode
    if run.ranks > 1:
        arguments |= several_ranks(run.ranks, device)
    if run.kv == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    if run.algorithm in ("DFLASH", "DDTREE"):
        arguments |= {
            "speculative_algorithm": run.algorithm, "speculative_draft_model_path": str(MODELS / "drafter"),
            "speculative_num_draft_tokens": NODES if run.algorithm == "DDTREE" else 8,
        }  # fmt: skip
    if run.algorithm in EAGLE_TYPE:
        is_tree = run.algorithm in ("EAGLE", "EAGLE3")
        arguments |= {
            "speculative_algorithm": run.algorithm.removesuffix("-chain"),
            "speculative_draft_model_path": drafter(run.algorithm, folder), "speculative_num_steps": 4,
            "speculative_eagle_topk": 4 if is_tree else 1, "speculative_num_draft_tokens": NODES if is_tree else 5,
        }  # fmt: skip
        if run.algorithm not in TRAINED:
            arguments["speculative_draft_load_format"] = "dummy"
    if run.algorithm == "NGRAM":
        arguments |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": NODES}
    return arguments


def several_ranks(ranks: int, device: str, *, custom_all_reduce: bool = False) -> dict[str, Any]:
    """Of an Engine. NCCL by default: it is there on every host. FlashInfer's fused all-reduce is upstream's default on
    some cards, and would make two runs differ by what is installed."""
    arguments: dict[str, Any] = {"tp_size": ranks, "enforce_disable_flashinfer_allreduce_fusion": True}
    if device == "cuda":
        arguments |= START_SOON
        if not custom_all_reduce:
            arguments["disable_custom_all_reduce"] = True
    return arguments


def environment_of(ranks: int, device: str) -> dict[str, str]:
    """What the processes of several ranks need besides. Engines that share GPUs see unequal free memory, which
    upstream takes for a fault."""
    if ranks == 1:
        return {}
    if device == "cpu":
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(ranks))}
    return {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}


def drafter(algorithm: str, folder: Path) -> str:
    """The checkpoint of an MLA drafter. EAGLE's and EAGLE3's have no weights of their own: they are as wrong as they
    can be, and their draft extend runs all the same. STANDALONE's is the target, which is as right as it can be."""
    config = json.loads((MODELS / "target" / "config.json").read_text())
    layers = config.pop("num_nextn_predict_layers")
    path = folder / algorithm
    path.mkdir(exist_ok=True)
    if algorithm.startswith("EAGLE3"):
        config |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1,
            "draft_vocab_size": config["vocab_size"],
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        }  # fmt: skip
    elif algorithm.startswith("EAGLE"):
        config["num_nextn_predict_layers"] = layers + 1  # upstream takes the NextN layer of such a model for a drafter
    else:
        # Upstream takes any drafter that calls itself DeepseekV3ForCausalLM for a NextN layer; this is the same code.
        config["architectures"] = ["DeepseekV2ForCausalLM"]
        (path / "model.safetensors").symlink_to(MODELS / "target" / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def use_plugin(module: Path, folder: Path) -> None:
    """In the processes of Engines that start from here on. folder: does not exist yet."""
    sys.path.append(str(ROOT / "test"))
    from e2e.plugins import plugin_environment

    folder.mkdir()
    os.environ.update(plugin_environment(folder, module))
    sys.path.insert(0, str(folder))  # the Engine loads plugins in this process too


def prompts() -> tuple[list[str], list[dict]]:
    """Texts of 1 to 300 tokens and answers of 24 to 114, each longer than those before it: the batch shrinks by one
    request at a time, in whatever steps they came in."""
    entries = json.loads((MODELS / "expected_steps.json").read_text())["entries"]
    texts = [entry["prompt"] for entry in entries[:: max(1, len(entries) // PROMPTS)]][:PROMPTS]
    texts += ["def f(x):\n", "import os\n", "class A:\n", "#"]
    lengths = [24 + 6 * i for i in range(len(texts))]
    return texts, [{"temperature": 0, "ignore_eos": True, "max_new_tokens": n} for n in lengths]


def child(argv: list[str]) -> int:
    """One Engine: greedy answers of one ragged batch, of the same batch again (with a cached prefix; in mixed chunks
    with none), of one request alone; log-probabilities of the first."""
    spec = json.loads(argv[0])
    with tempfile.TemporaryDirectory() as name:
        run = Run(**spec["run"])
        arguments = arguments_of(run, spec["device"], Path(name)) | spec["more"]
        if spec["sampling"] is not None and spec["device"] == "cpu":
            arguments["enable_deterministic_inference"] = True  # seeds of requests need it; on a GPU it changes kernels
        if run.algorithm in ("EAGLE", "EAGLE-chain"):
            use_plugin(HERE / "eagle_norm.py", Path(name) / "plugins")
        print(f"backend_e2e: {json.dumps(arguments)}", flush=True)
        import sglang

        start = time.monotonic()
        engine = sglang.Engine(**arguments)
        started = time.monotonic() - start
        texts, parameters = prompts()
        result: dict[str, Any] = {"start_s": round(started, 1)}
        asked = {"return_logprob": True, "top_logprobs_num": 2}
        outputs = engine.generate(texts, parameters, **asked)
        result["tokens"] = [o["output_ids"] for o in outputs]
        result["logprobs"] = [logprob_entries(o["meta_info"]) for o in outputs]
        result["accept_length"] = [round(o["meta_info"].get("spec_accept_length") or 1.0, 3) for o in outputs]
        if run.kind == "mixed":  # upstream mixes no chunks where log-probabilities are asked for
            engine.flush_cache()
        print(AGAIN, flush=True)
        result["again"] = [o["output_ids"] for o in engine.generate(texts, parameters)]
        result["alone"] = engine.generate(texts[:1], parameters[:1])[0]["output_ids"]
        if spec["sampling"] is not None:
            result |= sampled_answers(engine, spec["sampling"], seeded=spec["device"] == "cpu")
        Path(spec["out"]).write_text(json.dumps(result))
        time.sleep(1)  # for the reports of validate mode
        engine.shutdown()
    return 0


def logprob_entries(meta: dict) -> list[list]:
    """meta: of an answer -> of each token its id, its log-probability, those of the best two, and the best two."""
    pairs = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    return [[token, value, *(top[0] for top in tops), *(top[1] for top in tops)] for (value, token, _), tops in pairs]


def sampled_answers(engine: Any, first_seed: int, *, seeded: bool) -> dict[str, list[list[int]]]:
    sys.path.append(str(ROOT / "test"))
    from e2e import workloads

    batches = {"sampled": workloads.sampled_batch(SAMPLES, first_seed=first_seed)}
    if seeded:
        batches["seeded"] = workloads.seeded_batch()
    return {name: [o["output_ids"] for o in engine.generate(*batch)] for name, batch in batches.items()}


def log_of_rank(log: str, rank: int, ranks: int) -> str:
    """The lines that a rank wrote; of one rank they do not say so."""
    if ranks == 1:
        return log
    return "\n".join(line for line in log.splitlines() if re.match(rf"\[\S+ \S+ TP{rank}\b", line))


def started_ranks(log: str, mode: str) -> list[int]:
    """The ranks whose start-up line says this mode, each once."""
    return sorted({int(rank) for rank, said in START.findall(log) if said == mode})


def mixed_steps(log: str) -> int:
    """Prefill steps of the second batch that requests took part in which were decoding."""
    return len(re.findall(r"Prefill batch.*#running-req: [1-9]", log.partition(AGAIN)[2]))


def validate_reports(log: str) -> list[dict]:
    """The last report of the target and of the drafter."""
    found = {}
    for match in REPORT.finditer(log):
        part = (match["part"] or "").removeprefix(", ")
        found[part] = {
            "part": part or "target", "rows": int(match["rows"]), "rows_over_ulp": int(match["over"]),
            "max_abs": float(match["max_abs"]), "mean_rel": float(match["mean_rel"]),
            "max_rel": float(match["max_rel"]), "mismatches": int(match["mismatches"]),
        }  # fmt: skip
    return list(found.values())


def reports_by_rank(log: str, ranks: int) -> list[dict]:
    return [{"rank": n, **report} for n in range(ranks) for report in validate_reports(log_of_rank(log, n, ranks))]


def fallbacks(log: str) -> list[dict]:
    """Calls that a part of ours would have served and left to the stock backend, each reason once; prefill is no such
    call."""
    found = {((match["part"] or "").strip() or "target", match["reason"].strip()) for match in FALLBACK.finditer(log)}
    return [{"part": part, "reason": reason} for part, reason in sorted(found)]


def decode_sizes(log: str) -> list[int]:
    """Requests in the decode steps, each number once. The server says so of every step: decode_log_interval is 1."""
    return sorted({int(size) for size in DECODED.findall(log)})


def execute(
    run: Run, args: argparse.Namespace, folder: Path, *, sampling: int | None = None, more: dict[str, Any] | None = None
) -> dict:
    """One Engine in a process of its own. args: device, logs, timeout. sampling: also sample, from this seed on. more:
    arguments of the Engine."""
    out, log = folder / f"{run.name}.json", (args.logs or folder) / f"{run.name}.log"
    spec = {
        "run": dataclasses.asdict(run), "device": args.device, "out": str(out), "sampling": sampling, "more": more or {}
    }  # fmt: skip
    with open(log, "w") as file:
        try:
            code = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(spec)],
                stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout,
                env=os.environ | environment_of(run.ranks, args.device),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    text = log.read_text(errors="replace")
    result = json.loads(out.read_text()) if out.exists() else None
    error = None
    if result is None:
        lines = [line for line in text.splitlines() if "Error" in line] or text.splitlines()[-1:] or ["no output"]
        error = (f"not done after {args.timeout} s" if code is None else f"exit code {code}: {lines[-1]}")[:400]
    print(f"{run.name}: {error or 'ran'}", flush=True)
    return {
        "run": run, "result": result, "error": error, "reports": reports_by_rank(text, run.ranks),
        "mismatches": MISMATCH.findall(text), "started": started_ranks(text, run.mode),
        "mixed_steps": mixed_steps(text), "fallbacks": fallbacks(text), "decode_sizes": decode_sizes(text),
    }  # fmt: skip


def worst(values: list[float]) -> float:
    """The largest; NaN where one is, which max() would drop."""
    return next((value for value in values if math.isnan(value)), max(values, default=0.0))


def parting(expected: list, token: int, kv: str) -> tuple[float, str | None]:
    """expected: upstream's entry where another token stands in ours -> nats between its best two, and what is wrong."""
    gap, best = expected[2] - expected[3], expected[4:]
    if not 0 <= gap <= TIE[kv]:  # NaN too
        return gap, f"where the best two are {gap:.3f} nats apart"
    return gap, None if token in best else f"with {token}, and the best two are {best}"


def not_finite(answers: list[list[list]], whose: str) -> list[str]:
    """Problems: of each answer the first."""
    found = {}
    for i, answer in enumerate(answers):
        for n, entry in enumerate(answer):
            if not all(map(math.isfinite, entry[1:4])):
                found.setdefault(i, f"answer {i}, token {n}: {whose} log-probabilities are {entry[1:4]}")
    return list(found.values())


def compare(stock: dict, ours: dict, kv: str) -> dict:
    """Of the batch with log-probabilities. ``problems`` is empty where the rule holds."""
    problems, parted, drifts = [], [], []
    for whose, of in (("upstream's", stock), ("our", ours)):
        problems += not_finite(of["logprobs"], whose)
    for i, (a, b) in enumerate(zip(stock["logprobs"], ours["logprobs"], strict=True)):
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x[0] != y[0]), min(len(a), len(b)))
        drifts += [abs(x[1] - y[1]) for x, y in zip(a[:same], b[:same], strict=True)]
        if len(a) != len(b):
            problems.append(f"answer {i}: {len(b)} tokens, {len(a)} expected")
        elif same < len(a):
            gap, problem = parting(a[same], b[same][0], kv)
            parted.append({"answer": i, "token": same, "gap": round(gap, 4)})
            if problem:
                problems.append(f"answer {i} parts at token {same}, {problem}")
    drift = worst(drifts)
    if not drift <= DRIFT[kv]:
        problems.append(f"log-probabilities differ by up to {drift:.3f}")
    return {"parted": parted, "max_logprob_difference": round(drift, 5), "problems": problems}


def compare_tokens(stock: dict, answers: list[list[int]], kv: str, what: str) -> dict:
    """Answers without log-probabilities, of the first prompts of upstream's batch: they may part from it at its
    near-ties only."""
    problems, gaps = [], []
    for i, (expected, tokens) in enumerate(zip(stock["logprobs"], answers, strict=False)):
        if len(tokens) != len(expected):
            problems.append(f"{what}, answer {i}: {len(tokens)} tokens, {len(expected)} expected")
        same = next((n for n, (x, y) in enumerate(zip(expected, tokens, strict=False)) if x[0] != y), None)
        if same is not None:
            gap, problem = parting(expected[same], tokens[same], kv)
            gaps.append(gap)
            if problem:
                problems.append(f"{what}, answer {i} parts at token {same}, {problem}")
    return {"parted": len(gaps), "worst_gap": round(worst(gaps), 4), "problems": problems}


def compare_accepted(stock: dict, ours: dict) -> list[str]:
    """Problems of the tokens a step that trained drafts have accepted."""
    expected, got = (sum(lengths) / len(lengths) for lengths in (stock["accept_length"], ours["accept_length"]))
    return [] if got >= KEPT * expected else [f"{got:.2f} tokens accepted a step, {expected:.2f} with {stock['name']}"]


def fallback_problems(found: list[dict]) -> list[str]:
    """Where ours is to serve: of the target, whose decode and verify calls are all served here."""
    return [f"calls of the target went to the stock backend: {f['reason']}" for f in found if f["part"] == "target"]


def validate_problems(reports: list[dict], ranks: int, parts: list[str]) -> list[str]:
    compared = {(report["rank"], report["part"]) for report in reports if report["rows"]}

    def of(rank: int) -> str:
        return f" on rank {rank}" if ranks > 1 else ""

    return [
        f"validate mode compared nothing of the {part}{of(rank)}"
        for rank in range(ranks) for part in parts if (rank, part) not in compared
    ] + [
        f"{report['mismatches']} mismatches of the {report['part']}{of(report['rank'])}"
        for report in reports if report["mismatches"]
    ]  # fmt: skip


def judge(done: dict[Run, dict], run: Run, *, reference: bool = False) -> dict:
    """A row of the result file. reference: of a run that others are compared with, and it with none."""
    own = done[run]
    row = {
        **dataclasses.asdict(run),
        "name": run.name,
        "error": own["error"],
        "reports": own["reports"],
        "problems": [],
    }
    if own["result"] is None:
        row["problems"] = [own["error"]]
        return row
    row["start_s"], row["accept_length"] = own["result"]["start_s"], own["result"]["accept_length"]
    row["fallbacks"], row["decode_sizes"] = own["fallbacks"], own["decode_sizes"]
    if run.kind == "mixed":
        row["mixed_steps"] = own["mixed_steps"]
        if not own["mixed_steps"]:
            row["problems"].append("no chunk of a prefill was mixed with decoding requests")
    if run.mode and own["started"] != list(range(run.ranks)):
        row["problems"].append(f"verify {run.mode} is in the start-up lines of ranks {own['started']}")
    if run.mode in ("on", "validate"):
        row["problems"] += fallback_problems(own["fallbacks"])
    if run.algorithm == "plain" and run.kind != "mixed":  # whose first answers may end before the last begin
        missing = sorted(set(range(1, RUNNING + 1)) - set(own["decode_sizes"]))
        if missing:
            row["problems"].append(f"no decode step had {', '.join(map(str, missing))} requests")
    partner = own if reference else done.get(run.partner)
    if partner is None or partner["result"] is None:
        row["problems"].append(f"{run.partner.name}, to compare with, did not run")
        return row
    for what, answers in (("again", own["result"]["again"]), ("alone", [own["result"]["alone"]])):
        row[what] = compare_tokens(partner["result"], answers, run.kv, what)
        row["problems"] += row[what].pop("problems")
    if reference or run.partner == run:
        return row
    found = compare(partner["result"], own["result"], run.kv)
    row |= found | {"problems": row["problems"] + found["problems"]}
    if run.algorithm in TRAINED:
        row["problems"] += compare_accepted(partner["result"] | {"name": run.partner.name}, own["result"])
    if run.mode == "validate":
        parts = ["target"] + (["draft extend"] if run.algorithm in EAGLE_TYPE else [])
        row["problems"] += validate_problems(own["reports"], run.ranks, parts)
        row["problems"] += own["mismatches"]
    return row


def judge_all(done: dict[Run, dict], runs: list[Run]) -> tuple[list[dict], list[dict]]:
    """-> rows of the runs that can be judged, and those that have not ended, or whose partner has not, with why"""
    rows, unfinished = [], []
    for run in runs:
        waits_for = next((r for r in (run, run.partner) if r not in done), None)
        if waits_for is None:
            rows.append(judge(done, run))
        else:
            what = "it" if waits_for is run else waits_for.name
            unfinished.append({"name": run.name, "reason": f"{what} had not ended when this file was written"})
    return rows, unfinished


def verdict(row: dict) -> str:
    facts = f"parted {len(row['parted'])}, |dlogprob| {row['max_logprob_difference']}" if "parted" in row else "ran"
    return f"{'FAIL' if row['problems'] else 'ok  '} {row['name']}: {'; '.join(row['problems']) or facts}"


def save(path: Path, data: dict) -> None:
    """At once or not at all: the process may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        return child(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="patterns of names; upstream's runs that they need follow"
    )
    parser.add_argument("--parallel", type=int, default=6, help="Engines at once")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one run")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the logs")
    parser.add_argument("--commit", help="what the header says, where there is no git checkout")
    parser.add_argument("--list", action="store_true", help="the names of the runs")
    args = parser.parse_args(argv)
    runs = [r for r in all_runs() if any(fnmatch.fnmatch(r.name, f"*{p}*") for p in args.only)]
    # Upstream's first: then a file that is cut short can judge most of the others that it has.
    stocks = dict.fromkeys(r.stock for r in runs)
    runs = [*stocks, *(r for r in runs if r not in stocks)]
    if args.list:
        print("\n".join(r.name for r in runs))
        return 0
    if args.out is None:
        parser.error("--out is needed")
    skipped = [{"name": r.name, "reason": reason} for r in runs if (reason := unavailable(r, args.device))]
    runs = [r for r in runs if not unavailable(r, args.device)]
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    top, done, rows = {}, {}, []

    def write() -> None:
        nonlocal rows
        told = {row["name"] for row in rows}
        rows, unfinished = judge_all(done, runs)
        save(args.out, {"header": top, "rows": rows, "not_run": skipped + unfinished})
        for row in rows:
            if row["name"] not in told:
                print(verdict(row), flush=True)

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.parallel) as pool:
        futures = {pool.submit(execute, run, args, Path(name)): run for run in runs}
        for future in as_completed(futures):
            done[futures[future]] = future.result()
            top = top or header(args, argv)  # it asks the GPU: not while all Engines start
            write()
    if not runs:
        top = header(args, argv)
        write()
    failed = [row for row in rows if row["problems"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} runs hold; {args.out}")
    return 1 if failed else 0


def commit_of_checkout() -> str:
    from verify_bench.results import commit

    return commit(ROOT)


def header(args: argparse.Namespace, options: list[str]) -> dict:
    import torch
    from verify_bench.results import gpu_info, without_folders

    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": args.commit or commit_of_checkout(),
        "device": args.device,
        "gpu": gpu_info() if args.device == "cuda" else None,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "rule": {"tie": TIE, "drift": DRIFT, "kept": KEPT},
        "options": without_folders(options),
    }


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
