# SPDX-License-Identifier: Apache-2.0
"""bench and probe commit-length against the real server on a CPU, with the small trained model and DDTREE."""

import os
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import requests
import yaml

pytestmark = pytest.mark.server  # a start as a user has it, without e2e/fork_server.py

MODELS = Path(__file__).parents[1] / "models"
ENTRY = Path(__file__).parents[2] / "docker" / "entry.sh"
KEY = "a-key-for-this-test-only"
START_WITHIN_S = 1200  # against what hangs, on a slow and busy machine too
TREE = 16
# The fork on a CPU: the small model in float32, a tree of 16.
RECIPE = {
    "model-path": str(MODELS / "target"),
    "served-model-name": "small",
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "kdtree_sm120",
    "speculative-algorithm": "DDTREE",
    "speculative-draft-model-path": str(MODELS / "drafter"),
    "speculative-num-draft-tokens": TREE,
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "enable-metrics": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for the module, started as container and systemd unit start it: by the entry script, with a key."""
    if "+kdtree" not in metadata.version("sglang"):
        pytest.skip("the fork is not installed: make test installs it")
    if not (MODELS / "target" / "model.safetensors").exists():
        pytest.skip("this checkout has no small model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "key").write_text(KEY)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "KDTREE_PYTHON": sys.executable,
        "KDTREE_RECIPE": str(folder / "recipe.yaml"),
        "KDTREE_PORT": str(port),
        "KDTREE_API_KEY_FILE": str(folder / "key"),
        "TMPDIR": str(folder),
    }
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen([ENTRY, "serve"], env=environment, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # where upstream's benchmark looks for it


def wait_until_ready(url, process, log):
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server stopped with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            if requests.get(url + "/health", timeout=60).status_code == 200:
                return
        except requests.exceptions.RequestException:
            pass
        time.sleep(0.2)
    pytest.fail(f"no answer from /health within {START_WITHIN_S} s:\n{log.read_text()[-3000:]}")


def longctx(cli, url, *extra):
    return cli(
        "bench", "longctx", "--url", url, "--contexts", "200,400", "--text", "code", "--output-tokens", 24,
        "--repeats", 2, *extra,
    )  # fmt: skip


def test_longctx_over_each_api_and_compare(server, cli, tmp_path):
    rows = {}
    for api in ("sglang", "completions", "chat"):
        code, document = longctx(
            cli, server, "--api", api, "--nonce", "same", "--label", api, "--output", tmp_path / f"{api}.json"
        )
        assert not document["skipped"]
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
    # The same prompt gives the same greedy answer, and so the same number of steps, over both plain APIs.
    for one, other in zip(rows["sglang"], rows["completions"], strict=True):
        assert one["prompt_tokens"] == other["prompt_tokens"]
        assert one["accept_length"]["p50"] == pytest.approx(other["accept_length"]["p50"], rel=0.15)
    _, compared = cli("bench", "compare", tmp_path / "sglang.json", tmp_path / "completions.json")
    assert len(compared["rows"]) == 2 and compared["differs"] == []


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
    code, document = cli("probe", "commit-length", "--url", server, "--contexts", "200,1k,64k", "--output-tokens", 64)
    assert document["skipped_contexts"] == [64_000]
    phrase = [point for point in document["points"] if point["text"] == "phrase"]
    assert code == 0 and document["verdict"]["name"] in ("healthy", "text-too-hard")
    for point in phrase:
        assert point["commit_length"] >= 5 and point["follows_phrase"] >= 0.8
        assert point["proposed_drafts"] == TREE - 1
        # 64 tokens: one from the prefill, the rest in verify steps of at most 8 (a block and its bonus token).
        assert 63 / 8 <= point["steps"] <= 63
        assert sum(point["histogram"]) == point["steps"]


def test_throughput_is_upstreams_benchmark(server, cli, tmp_path):
    pytest.importorskip("datasets")  # upstream's benchmark needs it; the CPU set leaves it out
    code, document = cli(
        "bench", "throughput", "--", "--backend", "sglang", "--base-url", server, "--dataset-name", "random-ids",
        "--model", MODELS / "target", "--served-model-name", "small", "--num-prompts", "2", "--random-input-len", "32",
        "--random-output-len", "8", "--output-file", tmp_path / "out.jsonl", "--disable-tqdm",
    )  # fmt: skip
    assert code == 0 and document["returncode"] == 0
    assert (tmp_path / "out.jsonl").stat().st_size > 100


def test_a_wrong_model_name(server, cli_error):
    error = cli_error("bench", "longctx", "--url", server, "--model", "large")
    assert "'small'" in error["expected"] and error["got"] == "'large'"


def test_verify_needs_validate_mode(server, cli_error):
    error = cli_error("probe", "verify", "--url", server)
    assert error["got"] == "'on'" and "--kdtree-verify validate" in error["remedy"]


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
