# SPDX-License-Identifier: Apache-2.0
"""The verbs that need a GPU, on one: against servers of the small model as `make serve` starts them there.

Every document is written to the folder that KIT_OUT names, for who reads them afterwards. KIT_DEVICE=cpu runs what can
run without a GPU, to try this file.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

pytestmark = [pytest.mark.server, pytest.mark.gpu]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "test" / "models" / "target"
DEVICE = os.environ.get("KIT_DEVICE", "cuda")
START_WITHIN_S = 300
TREE = 16
EXPERTS, TOP_K, MOE_LAYERS = 8, 2, 2  # of the small model
MODES = ("on", "validate")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = Path(os.environ.get("KIT_OUT") or tmp_path_factory.mktemp("kit"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def urls(out):
    """Mode -> URL. All start at once, since a start takes longer than everything else here."""
    started = {mode: start(mode, out) for mode in MODES}
    try:
        yield {mode: wait_until_ready(*server, log=out / f"server-{mode}.log") for mode, server in started.items()}
    finally:
        for process, _ in started.values():
            process.send_signal(signal.SIGTERM)  # serve.py ends the processes of its server
        for process, _ in started.values():
            process.wait(timeout=60)


def start(mode, out):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--kdtree-verify {mode} --speculative-num-draft-tokens {TREE} --max-running-requests 4 --enable-metrics"
    if DEVICE == "cuda":
        flags += " --mem-fraction-static 0.3 --cuda-graph-max-bs-decode 4"
    flags += {
        "on": " --expert-distribution-recorder-mode per_pass",
        "validate": f" --kdtree-dump-dir {out / 'mismatches'}",
    }[mode]
    environment = os.environ | {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(out / "experts")}
    command = [sys.executable, ROOT / "scripts" / "serve.py", "--device", DEVICE, "--port", str(port), "--args", flags]
    with (out / f"server-{mode}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    return process, f"http://127.0.0.1:{port}"


def wait_until_ready(process, url, log):
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(url + "/health", timeout=60).status_code == 200:
                return url
        except requests.exceptions.RequestException:
            time.sleep(0.2)
    pytest.fail(f"{process.args}: no answer; exit code {process.poll()}:\n{log.read_text()[-3000:]}")


@pytest.fixture
def verb(cli, out):
    """As cli, and the document is kept."""

    def call(name, *arguments):
        path = out / f"{name.replace(' ', '-')}.json"
        code, document = cli(*name.split(), *arguments, "--output", path)
        assert code != 2, document["error"]
        assert json.loads(path.read_text()) == document
        return code, document

    return call


def test_doctor_knows_the_gpu(verb):
    """What is of this machine and not of the installation: a tree that is laid out by hand has no fork's metadata."""
    _, document = verb("doctor", "--port", 0)
    status = {check["name"]: check["status"] for check in document["checks"]}
    wanted = [
        "kernel package",
        "GPU",
        "tree core",
        "verify op",
        "shared memory, GPU 0",
        "torch",
        "backend",
        "algorithm",
    ]
    assert {name: status.get(name) for name in wanted} == dict.fromkeys(wanted, "OK"), document["checks"]
    (detail,) = [check["detail"] for check in document["checks"] if check["name"] == "verify op"]
    assert "GPU 0" in detail


def test_longctx(urls, verb, out):
    _, document = verb(
        "bench longctx", "--url", urls["on"], "--contexts", "1k,3k", "--text", "code", "--text", "phrase",
        "--output-tokens", 256, "--repeats", 2, "--plot", out / "longctx.png",
    )  # fmt: skip
    assert not document["skipped"] and document["server"]["attention_backend"] == "kdtree_sm120"
    for row in document["rows"]:
        assert row["prompt_tokens"] == pytest.approx(row["context"], rel=0.03, abs=12)
        assert 1 <= row["accept_length"]["p50"] <= 8 and 0 < row["step_ms"]["p50"] <= row["step_ms"]["p90"]
    # The phrase is guessed, or the drafts are not what the target sees.
    assert all(row["accept_length"]["p50"] >= 4 for row in document["rows"] if row["text"] == "phrase")


def test_probe_gpu(urls, verb, out):
    _, document = verb(
        "probe gpu", "--url", urls["on"], "--context", "3k", "--output-tokens", 900, "--interval", 0.01, "--text",
        "prose", "--csv", out / "gpu.csv", "--plot", out / "gpu.png",
    )  # fmt: skip
    means = document["phases"]["decode"]["means"]
    assert means["samples"] >= 3 and 0 < means["sm_pct"] <= 100 and 0 <= means["memory_pct"] <= 100
    assert 0 < means["power_w"] <= 1.1 * means["power_limit_w"]
    decode = document["decode"]
    assert decode["context"] == pytest.approx(3000, rel=0.03) and decode["step_ms"] > 0
    # By the served model's own config.json, which lies here. One request's KV of 3 layers in less than a memory's
    # speed: the arithmetic is of the right order.
    assert 0 < decode["effective_kv_gb_s"] < decode["peak_gb_s"]
    assert len((out / "gpu.csv").read_text().splitlines()) > means["samples"] and 0 < means["used_gb"] < 200


def test_probe_gpu_watches_what_runs_anyway(urls, verb):
    _, document = verb("probe gpu", "--url", urls["on"], "--watch", 1)
    assert document["decode"] is None and document["phases"]["watch"]["means"]["samples"] >= 3


def test_probe_moe_records_a_live_server(urls, verb, out):
    _, document = verb(
        "probe moe", "--url", urls["on"], "--record-dir", out / "experts", "--context", 300, "--output-tokens", 64,
        "--ranks", 4, "--redundant", 4, "--batches", "2", "--model-config", CONFIG, "--plot", out / "moe.png",
    )  # fmt: skip
    assert (document["experts"], len(document["layers"])) == (EXPERTS, MOE_LAYERS)
    assert document["tokens_per_step"] == TREE * TOP_K and 8 <= document["steps"] <= 64


def test_probe_commit_length(urls, verb):
    code, document = verb("probe commit-length", "--url", urls["on"], "--contexts", "200,1k,3k", "--output-tokens", 64)
    assert code == 0 and document["verdict"]["name"] in ("healthy", "text-too-hard")


def test_probe_verify_in_validate_mode(urls, verb):
    code, document = verb("probe verify", "--url", urls["validate"], "--contexts", "200,2k", "--steps", 280)
    assert code == 0 and document["mismatches"] == 0 and document["rows_compared"] >= 256 * TREE
