# SPDX-License-Identifier: Apache-2.0
"""Tier 1 on a GPU, in real servers: CUDA graphs, overlap scheduling, the drained boundary and pages, under churn.

Greedy tokens of two bf16 runs may part at a near-tie only, since a batch of another size rounds otherwise: the rule is
that of benchmark/backend_e2e.py, against a server without defragmentation.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from e2e.servers import MODELS, free_port, speculative

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

BENCHMARK = Path(__file__).parents[3] / "benchmark"
PLACE = {
    "cuda": ["--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--cuda-graph-max-bs-decode", "12"],
    "cpu": ["--device", "cpu", "--dtype", "float32"],
}
COMMON = [
    *("--model-path", str(MODELS / "target"), "--attention-backend", "kdtree_sm120", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "3072", "--max-running-requests", "12", "--enable-metrics"),
]
DDTREE = [*speculative("DDTREE"), "--speculative-num-draft-tokens", "16"]
TIER1 = ["--kv-defrag", "tier1", "--kv-defrag-copy-budget", "256K"]
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
GREEDY = {"temperature": 0.0, "max_new_tokens": 128, "ignore_eos": True}
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 300, 300


class Server:
    """A server process with its imports, and nothing of the tests' own in it."""

    def __init__(self, options, folder, device="cuda"):
        port = str(free_port())
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "server.log"
        command = [sys.executable, "-m", "sglang.launch_server", *COMMON, *PLACE[device], *options, "--port", port]
        environment = os.environ | STRICT | {"HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self):
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_until_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.3)
        raise TimeoutError(self.log.read_text()[-6000:])

    def __exit__(self, *error):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def answers(self, entries):
        """[[token, its log-probability, those of the two best], ...] of each entry, all asked for at once."""
        payload = {"text": [entry["prompt"] for entry in entries], "sampling_params": GREEDY}
        payload |= {"return_logprob": True, "top_logprobs_num": 2}
        response = requests.post(f"{self.url}/generate", json=payload, timeout=REQUEST_TIMEOUT_S)
        assert response.status_code == 200, response.text + self.log.read_text()[-6000:]
        metas = [output["meta_info"] for output in response.json()]
        return [
            [
                [token, value, *(top[0] for top in tops)]
                for (value, token, _), tops in zip(m["output_token_logprobs"], m["output_top_logprobs"], strict=True)
            ]
            for m in metas
        ]

    def metric(self, name):
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M))


def churn(server):
    """Twice all prompts, in two orders: the second wave reads, and evicts, what the first left in the cache."""
    entries = json.loads((MODELS / "expected_steps.json").read_text())["entries"][:24]
    return server.answers(entries) + server.answers(entries[::-1])[::-1]


@pytest.fixture(scope="module")
def undefragmented(tmp_path_factory):
    with Server([*DDTREE, "--kv-defrag", "off"], tmp_path_factory.mktemp("off")) as server:
        return churn(server)


def check(reference, answers):
    sys.path.insert(0, str(BENCHMARK))
    try:
        from backend_e2e import compare
    finally:
        sys.path.remove(str(BENCHMARK))
    found = compare({"logprobs": reference}, {"logprobs": answers}, "bf16")
    assert not found["problems"], found


@pytest.mark.parametrize(
    "options",
    [[], ["--disable-overlap-schedule"], ["--disable-cuda-graph"], ["--page-size", "64"]],
    ids=["graphs-overlap", "normal-loop", "eager", "pages"],
)
def test_moved_slots_change_no_answer(undefragmented, options, tmp_path):
    with Server([*DDTREE, *TIER1, *options], tmp_path) as server:
        answers = churn(server)
        log, moved = server.log.read_text(), server.metric("sglang:kv_defrag_bytes_moved_total")
    check(undefragmented, answers)
    assert "KV defragmentation: tier1 active" in log and "KV relocation failed" not in log
    assert "KV slots are counted after every step" in log
    assert moved > 0, "nothing was moved: the test shows nothing"


def test_two_ranks_hold_the_same_slots(undefragmented, tmp_path):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Server([*DDTREE, *TIER1, "--tp-size", "2"], tmp_path) as server:
        answers = churn(server)
        log, moved = server.log.read_text(), server.metric("sglang:kv_defrag_bytes_moved_total")
    check(undefragmented, answers)
    assert log.count("compared between the ranks") == 2 and moved > 0
