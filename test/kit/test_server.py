# SPDX-License-Identifier: Apache-2.0
"""Every verb that speaks to a server, against the real one on a CPU with the small trained model and DDTREE.

The server validates its kernel against the stock one, records its experts and exports metrics; a file that a test lays
down disturbs one layer of the kernel.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
import yaml
from docs.documents import documented
from e2e.servers import free_port
from kit.test_deploy import metric_names
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.server

MODELS = Path(__file__).parents[1] / "models"
ENTRY = Path(__file__).parents[2] / "docker" / "entry.sh"
KEY = "a-key-for-this-test-only"
TREE = 16
EXPERTS, TOP_K, LAYERS, MOE_LAYERS = 8, 2, 3, 2  # of test/models/target
REPORT_STEPS = 64  # verify steps between two reports of validate mode; by itself the server takes 256
# Loaded by the server's processes: the kernel goes wrong in layer 1 while a file is there. And what upstream's expert
# recorder asks of a device module and torch.cpu lacks, which is why it needs a GPU outside of this test.
DISTURBANCE = f"""
import os


def install():
    import torch

    torch.cpu.is_current_stream_capturing = lambda: False
    from sglang.srt.layers.attention import kdtree_report, kdtree_verify

    kdtree_report.REPORT_INTERVAL = {REPORT_STEPS}
    from sglang.srt.mem_cache.defrag import tier0

    tier0.SURVEY_INTERVAL = {REPORT_STEPS} // 4  # published an interval later
    real = kdtree_verify.TreeVerifier.run

    def disturbed(self, step, q, kv_cache, layer, **options):
        out = real(self, step, q, kv_cache, layer, **options)
        if layer.layer_id == 1 and os.path.exists(os.environ["KIT_DISTURB"]):
            out[:, 0] += 1.0
        return out

    kdtree_verify.TreeVerifier.run = disturbed
"""
# The fork on a CPU: the small model in float32, a tree of 16.
RECIPE = {
    "model-path": str(MODELS / "target"),
    "served-model-name": "small",
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "kdtree_sm120",
    "kdtree-verify": "validate",
    "kv-defrag": "tier0",
    "expert-distribution-recorder-mode": "per_pass",
    "speculative-algorithm": "DDTREE",
    "speculative-draft-model-path": str(MODELS / "drafter"),
    "speculative-num-draft-tokens": TREE,
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "enable-metrics": True,
    "sleep-on-idle": True,
}


class Running(NamedTuple):
    url: str
    folder: Path


def lay_plugin(folder):
    info = folder / "kit_disturb-1.dist-info"
    info.mkdir(parents=True)
    (folder / "kit_disturb.py").write_text(DISTURBANCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kit-disturb\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkit_disturb = kit_disturb:install\n")


@pytest.fixture(scope="module")
def running(servers, tmp_path_factory):
    """One server for the module, as container and systemd unit start it: by the entry script, with a key."""
    if "+kdtree" not in metadata.version("sglang"):
        pytest.skip("the fork is not installed: make test installs it")
    if not (MODELS / "target" / "model.safetensors").exists():
        pytest.skip("this checkout has no small model")
    folder = tmp_path_factory.mktemp("server")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"kdtree-dump-dir": str(folder / "mismatches")}))
    (folder / "key").write_text(KEY)
    lay_plugin(folder / "plugin")
    # A stand-in for Python tells what the script would start; that is then forked, which saves its imports.
    stand_in = folder / "python"
    stand_in.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stand_in.chmod(0o755)
    environment = os.environ | {
        "KDTREE_PYTHON": str(stand_in),
        "KDTREE_RECIPE": str(folder / "recipe.yaml"),
        "KDTREE_PORT": str(free_port()),
        "KDTREE_API_KEY_FILE": str(folder / "key"),
        "TMPDIR": str(folder),
    }
    started = subprocess.run([ENTRY, "serve"], env=environment, capture_output=True, text=True, check=True)
    option, module, *flags = started.stdout.splitlines()
    assert (option, module) == ("-m", "sglang.launch_server")
    its_own = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "plugin"), os.environ.get("PYTHONPATH")])),
        "KIT_DISTURB": str(folder / "disturb"),
        "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(folder / "experts"),
    }
    return Running(url=servers.get(flags, its_own, key=KEY).url, folder=folder)


@pytest.fixture
def server(running):
    return running.url


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # where upstream's benchmark looks for it


def arguments(words):
    """A document's line from its verb on. Of an option that comes again the last one counts."""
    return words[words.index("sglang.kdtree") + 1 :]


def longctx(cli, url, *extra):
    return cli("bench", "longctx", "--text", "code", *smaller(url), *extra)


def smaller(url):
    return "--url", url, "--contexts", "200,400", "--output-tokens", 24, "--repeats", 2


def test_longctx_over_each_api_and_compare(server, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = {
        "sglang": [
            *arguments(documented("docs/deploy-kimi-k2.6.md", "python -m sglang.kdtree bench longctx")),
            "--text",
            "code",
        ],
        "completions": ["bench", "longctx", "--api", "completions", "--text", "code", "--output", "other.json"],
        "chat": arguments(documented("docs/kit.md", "python -m sglang.kdtree bench longctx")),
    }
    rows = {}
    for api, line in lines.items():
        code, document = cli(*line, *smaller(server), "--nonce", "same", "--label", api)
        assert not document["skipped"] and document["server"]["api"] == api
        facts = document["server"]
        assert (facts["speculative_algorithm"], facts["num_draft_tokens"]) == ("DDTREE", TREE)
        assert (facts["attention_backend"], facts["model"]) == ("kdtree_sm120", "small")
        for row in document["rows"]:
            # The server's tokenizer is asked for the length; a chat template adds a few tokens.
            assert row["prompt_tokens"] == pytest.approx(row["context"], rel=0.03, abs=12)
            assert 1.0 <= row["accept_length"]["p50"] <= 8.0
            assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p90"]
            assert row["prefill_tok_s"]["p50"] > 0 and row["decode_tok_s"]["p50"] > 0
        rows[api] = document["rows"]
    # The same prompt gives the same greedy answer, and so the same number of steps, over both plain APIs. SGLang's own
    # says how many; OpenAI's has only its chunks, and a busy machine sends the tokens of several steps in one.
    for one, other in zip(rows["sglang"], rows["completions"], strict=True):
        assert one["prompt_tokens"] == other["prompt_tokens"]
        assert one["accept_length"]["p50"] <= other["accept_length"]["p50"] * 1.15
    _, compared = cli("bench", "compare", "ours.json", "other.json")
    assert len(compared["rows"]) == 2 and compared["differs"][:1] == ["api: sglang against completions"]
    assert {path.name for path in tmp_path.iterdir()} >= {"ours.png", "b.json", "b.png"}


def test_prompts_of_a_run_find_nothing_in_the_prefix_cache(server, cli):
    """Twice the same settings: only the beginning-of-text token may come from the cache."""
    for _ in range(2):
        _, document = longctx(cli, server)
        assert all(row["cached_tokens"] <= 8 for row in document["rows"])
        assert not any("from a cache" in text for text in document["warnings"])


def test_the_fixed_nonce_shows_what_the_cache_would_have_done(server, cli):
    longctx(cli, server, "--nonce", "again")
    code, document = longctx(cli, server, "--nonce", "again")
    assert code == 1 and any("from a cache" in text for text in document["warnings"])


def test_commit_length_of_the_trained_drafter(server, cli):
    """The phrase is guessed at every context that the small model was trained for."""
    line = arguments(documented("docs/deploy-kimi-k2.6.md", "python -m sglang.kdtree probe commit-length"))
    line += arguments(documented("docs/kit.md", "python -m sglang.kdtree probe commit-length"))[2:]
    code, document = cli(*line, "--url", server, "--contexts", "200,1k,64k", "--output-tokens", 64)
    assert document["skipped_contexts"] == [64_000]
    phrase = [point for point in document["points"] if point["text"] == "phrase"]
    assert code == 0 and document["verdict"]["name"] in ("healthy", "text-too-hard")
    for point in phrase:
        assert point["commit_length"] >= 5 and point["follows_phrase"] >= 0.8
        assert point["proposed_drafts"] == TREE - 1
        assert 1 <= point["chain_length"] <= point["commit_length"]
        # 64 tokens: one from the prefill, the rest in verify steps of at most 8 (a block and its bonus token).
        assert 63 / 8 <= point["steps"] <= 63
        assert sum(point["histogram"]) == point["steps"]


def test_throughput_is_upstreams_benchmark(server, cli, tmp_path):
    out = tmp_path / "out.jsonl"
    line = arguments(documented("docs/kit.md", "python -m sglang.kdtree bench throughput"))
    code, document = cli(
        *line, "--base-url", server, "--model", MODELS / "target", "--served-model-name", "small", "--num-prompts", "2",
        "--random-input-len", "32", "--random-output-len", "8", "--random-range-ratio", "1", "--output-file", out,
        "--disable-tqdm",
    )  # fmt: skip
    assert code == 0 and document["returncode"] == 0
    (line,) = out.read_text().splitlines()
    measured = json.loads(line)
    assert (measured["completed"], measured["total_output_tokens"]) == (2, 16)


def test_the_experts_that_decoding_chooses(running, cli, tmp_path):
    """Every verify step routes a tree of tokens to the best experts of every MoE layer; the prefill is left out."""
    record = arguments(documented("docs/kit.md", "python -m sglang.kdtree probe moe --record-dir"))
    trace = arguments(documented("docs/kit.md", "python -m sglang.kdtree probe moe --trace"))
    config = "--model-config", MODELS / "target"
    _, document = cli(
        *record, "--url", running.url, "--record-dir", running.folder / "experts", "--context", 300,
        "--output-tokens", 32, "--ranks", 4, "--redundant", 4, "--batches", "2", *config,
    )  # fmt: skip
    assert (document["experts"], len(document["layers"])) == (EXPERTS, MOE_LAYERS)
    assert document["tokens_per_step"] == TREE * TOP_K and 2 <= document["steps"] <= 32
    rows = {row["name"]: row for row in document["scenarios"]}
    base = rows["expert parallel, in order"]
    assert rows["tensor parallel"]["lost_share"] == 0 and TOP_K <= base["slowest_mean"] * 4
    assert sum(document["activated_per_rank"]) == pytest.approx(4 * base["activated_mean"])
    # The file alone gives the same.
    here = "--trace", document["source"], *config, "--plot", tmp_path / "moe.png"
    again = cli(*trace, *here, "--ranks", 4, "--redundant", "", "--batches", "")[1]
    assert (tmp_path / "moe.png").exists()
    assert again["activated_per_rank"] == document["activated_per_rank"]
    # Recording is over, and the server goes on serving.
    longctx(cli, running.url)


def verify(cli, url):
    line = arguments(documented("docs/kit.md", "python -m sglang.kdtree probe verify --url"))
    return cli(*line, "--url", url, "--contexts", "200", "--steps", REPORT_STEPS + 8)


def test_validate_mode_counts_a_sound_kernel(server, cli):
    code, document = verify(cli, server)
    assert code == 0 and document["mismatches"] == 0
    # A report of so many steps came meanwhile: a tree of rows in each layer of each.
    assert document["rows_compared"] >= REPORT_STEPS * TREE * LAYERS
    assert document["rows_over_ulp"] == 0 and document["max_abs_error"] < 1e-4


def test_a_kernel_gone_wrong_is_counted_dumped_and_found_offline(running, cli, monkeypatch):
    monkeypatch.chdir(running.folder)
    disturb = running.folder / "disturb"
    disturb.touch()
    try:
        code, document = verify(cli, running.url)
    finally:
        disturb.unlink()
    assert code == 1 and document["mismatches"] > 0 and document["max_abs_error"] == pytest.approx(1.0, abs=1e-3)
    code, offline = cli(*arguments(documented("docs/kit.md", "python -m sglang.kdtree probe verify --dump")))
    again = arguments(documented("docs/validate.md", "python -m sglang.kdtree probe verify --dump"))
    assert cli(*(word.replace("DIR", "mismatches") for word in again)) == (code, offline)
    (row,) = offline["reproducers"]
    assert code == 1 and (row["verdict"], row["layer"], row["s_q"]) == ("kdtree-wrong", 1, TREE)
    assert row["upstream"]["relative"] < 1e-4 < row["kdtree"]["relative"]
    assert row["kdtree"]["max_abs"] == pytest.approx(1.0, abs=1e-3)


def test_the_dashboard_asks_for_metrics_that_are_exported(server):
    """By name, and by the label of its one variable.

    Calls handed to Triton have no sample before the first one, and on a CPU there is none. The name is looked up in the
    sources (test_deploy.py).
    """
    requests.post(
        server + "/generate",
        json={
            "text": "The cat sat on",
            # A step commits at most 8 tokens, so that validate mode reports once at least.
            "sampling_params": {"max_new_tokens": 8 * REPORT_STEPS, "temperature": 0, "ignore_eos": True},
        },
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=600,
    ).raise_for_status()
    families = text_string_to_metric_families(requests.get(server + "/metrics", timeout=600).text)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("sglang:")]
    assert samples
    named = {sample.name for sample in samples if sample.labels.get("model_name") == "small"}
    assert set(metric_names()) - named == {"sglang:kdtree_fallback_calls_total"}


def test_a_wrong_model_name(server, cli_error):
    error = cli_error("bench", "longctx", "--url", server, "--model", "large")
    assert "'small'" in error["expected"] and error["got"] == "'large'"


def test_the_entry_scripts_health_check(server):
    environment = os.environ | {"KDTREE_PYTHON": sys.executable, "KDTREE_PORT": server.rsplit(":", 1)[1]}
    assert subprocess.run([ENTRY, "health"], env=environment, timeout=600, check=False).returncode == 0


def test_the_key_guards_all_but_health_and_metrics(server, cli_error, monkeypatch):
    """What docs/deploy-kimi-k2.6.md says must not be exposed: /metrics answers without a key."""
    monkeypatch.delenv("SGLANG_API_KEY")
    assert "--api-key" in cli_error("bench", "longctx", "--url", server)["remedy"]
    codes = {
        path: requests.get(server + path, timeout=600).status_code for path in ("/health", "/metrics", "/server_info")
    }
    assert codes == {"/health": 200, "/metrics": 200, "/server_info": 401}
    assert requests.post(server + "/generate", json={"text": "x"}, timeout=600).status_code == 401


def test_the_key_is_not_to_be_seen_in_the_process_list(server):
    port = server.rsplit(":", 1)[1]
    lines = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    texts = []
    for line in lines:
        try:
            texts.append(line.read_text(errors="replace"))
        except OSError:
            continue  # ended meanwhile
    assert any(port in text and "launch_server" in text for text in texts)
    assert not any(KEY in text for text in texts)
