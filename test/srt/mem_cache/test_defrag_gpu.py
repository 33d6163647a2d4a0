# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of defragmentation: no call of the allocator waits for the device; and tier 1 in real
servers, with CUDA graphs, overlap scheduling and pages, under churn.

The servers run at once, since most of a run is their start. Each is compared with one that has the same options and no
defragmentation: its batches are the same ones, and so every token and every log-probability has to be the same, to the
last bit. (Servers whose batches differ round differently: with overlap and without, log-probabilities were up to 0.2
apart on an H200.)
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import requests
from e2e.servers import MODELS, free_port, speculative

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

PLACE = {
    "cuda": ["--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--cuda-graph-max-bs-decode", "12"],
    "cpu": ["--device", "cpu", "--dtype", "bfloat16"],
}
COMMON = [
    *("--model-path", str(MODELS / "target"), "--attention-backend", "kdtree_sm120", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "3072", "--max-running-requests", "4", "--enable-metrics", "--random-seed", "1"),
    *speculative("DDTREE"),
    *("--speculative-num-draft-tokens", "16"),
]
OFF = ("--kv-defrag", "off")
TIER1 = ("--kv-defrag", "tier1", "--kv-defrag-copy-budget", "256K")
# Every slot is counted, and its KV compared, after every step. That waits for the device, so one run goes without.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
GREEDY = {"temperature": 0.0, "max_new_tokens": 128, "ignore_eos": True}
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 150, 120


class Case(NamedTuple):
    options: tuple[str, ...] = ()
    checked: bool = True
    ranks: int = 1
    env: dict[str, str] = {}


CASES = {
    "unchecked": Case(checked=False),
    "graphs-overlap": Case(),
    "normal-loop": Case(("--disable-overlap-schedule",)),
    "eager": Case(("--disable-cuda-graph",)),
    # Of 64 tokens a page is a block by itself, and nothing has to move.
    "pages": Case(("--page-size", "16")),
    "two-ranks": Case(("--tp-size", "2"), ranks=2, env={"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}),
}


class Server:
    """A server process with its imports, and nothing of the tests' own in it."""

    def __init__(self, case, defrag, log, device="cuda"):
        port = str(free_port())
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "sglang.launch_server", *COMMON, *PLACE[device], *case.options, *defrag]
        command += ["--port", port]
        # Upstream's tree core in Rust does not run with every torch that a GPU host may have.
        core = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
        environment = core | os.environ | {"HF_HUB_OFFLINE": "1"} | case.env | (STRICT if case.checked else {})
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
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # It ended by itself, and all its processes with it.
        self.process.wait()

    def answers(self, entries):
        """[(log-probability, token), ...] of each entry, all asked for at once."""
        payload = {"text": [entry["prompt"] for entry in entries], "sampling_params": GREEDY, "return_logprob": True}
        response = requests.post(f"{self.url}/generate", json=payload, timeout=REQUEST_TIMEOUT_S)
        assert response.status_code == 200, response.text + self.log.read_text()[-6000:]
        return [
            [(value, token) for value, token, _ in output["meta_info"]["output_token_logprobs"]]
            for output in response.json()
        ]

    def metric(self, name):
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M))


def churn(server):
    """Twice all prompts, in two orders: the second wave reads, and evicts, what the first left in the cache."""
    entries = json.loads((MODELS / "expected_steps.json").read_text())["entries"][:24]
    return server.answers(entries) + server.answers(entries[::-1])[::-1]


class Outcome(NamedTuple):
    answers: list
    log: str
    moved: float


def run(case, defrag, log, device="cuda"):
    with Server(case, defrag, log, device) as server:
        answers = churn(server)
        return Outcome(answers, log.read_text(), server.metric("sglang:kv_defrag_bytes_moved_total"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(options, defragmentation, whether slots are checked) -> future of the outcome. All of them are started."""
    import torch

    folder = tmp_path_factory.mktemp("defrag")
    cases = [case for case in CASES.values() if case.ranks <= torch.cuda.device_count()]
    runs = {key(case, TIER1): (case, TIER1) for case in cases}
    runs |= {key(case, OFF): (case._replace(checked=False), OFF) for case in cases}
    with ThreadPoolExecutor(len(runs)) as pool:
        yield {
            name: pool.submit(run, *arguments, folder / f"{i}.log") for i, (name, arguments) in enumerate(runs.items())
        }


def key(case, defrag):
    return case.options, defrag, defrag is TIER1 and case.checked


@pytest.mark.parametrize("name", CASES)
def test_moved_slots_change_no_answer(outcomes, name):
    case = CASES[name]
    if key(case, TIER1) not in outcomes:
        pytest.skip(f"needs {case.ranks} GPUs")
    expected = outcomes[key(case, OFF)].result()
    answers, log, moved = outcomes[key(case, TIER1)].result()
    assert log.count("KV defragmentation: tier1 active") == case.ranks and "KV relocation failed" not in log
    assert log.count("KV slots are counted after every step") == (case.ranks if case.checked else 0)
    assert log.count("The KV of running requests is compared after every step") == (case.ranks if case.checked else 0)
    assert log.count("compared between the ranks") == (case.ranks if case.ranks > 1 else 0)
    assert moved > 0 and expected.moved == 0, "nothing was moved: the test shows nothing"
    assert len(answers) == 48 and all(len(answer) == GREEDY["max_new_tokens"] for answer in answers)
    other = [i for i, (a, b) in enumerate(zip(expected.answers, answers, strict=True)) if a != b]
    assert not other, f"answers {other} differ from those without defragmentation"


def test_no_call_of_the_allocator_waits_for_the_device():
    import torch
    from srt.mem_cache.test_contiguous_allocator import decode, prefill

    from sglang.srt.mem_cache.allocator.contiguous import STRIPE_STEPS, ContiguousTokenAllocator

    size, rows = 20_000, list(range(16))
    allocator = ContiguousTokenAllocator(size, torch.int64, "cuda", None)
    held = [prefill(allocator, 64) for _ in range(200)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            held[0].max().item()  # or the mode finds nothing
        for step in range(3 * STRIPE_STEPS):
            held.append(decode(allocator, rows if step % 5 else rows[:-1]))
            allocator.free(held.pop(step % 7))
            if step % 4 == 0:
                held.append(prefill(allocator, 100))
            allocator.runs.age()
        runs = allocator.runs
        runs.rearrange(aged_only=True)
        longest = runs.longest(8)
        assert runs.lend([(3, 50), (100, 20)], arrangement=runs.arrangement) is not None
        runs.take_lent(10)
        runs.end_loan()
        runs.rearrange()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert longest.shape == (3, 8) and int(longest[2, 0]) > 0
    slots = torch.cat([allocator.get_all_free_pages(), *held])
    assert slots.unique().numel() == slots.numel() == size - 10, "ten went to a relocation"
