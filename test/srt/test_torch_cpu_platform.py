# SPDX-License-Identifier: Apache-2.0
"""Which machine and which command line get the torch CPU platform. Each case is a process of its own: the choice is
made once, while sglang is imported. More of it: test/registered/unit/platforms."""

import json
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.platforms.torch_cpu import TorchCpuPlatform, discover, refuse_expert_recorder, require_torch_cpu

# A GPU that reads CUDA_VISIBLE_DEVICES once, at the first question, as the CUDA driver does.
FAKE_GPU = """
import os, torch
class Driver:
    visible = None
    def is_available(self):
        if self.visible is None:
            self.visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") != ""
        return self.visible
driver = Driver()
torch.cuda.is_available = driver.is_available
torch.cuda.get_device_name = lambda *args: "NVIDIA Fake"
torch.version.cuda = "12.8"
"""
PROBE = """
import json, os, sys
sys.argv, sys.orig_argv = {argv}, {orig_argv}
{setup}
import sglang.srt.utils
from sglang.srt.platforms import current_platform
from sglang.srt.utils import is_cuda
child = 'import json, os; print(json.dumps(os.environ.get("CUDA_VISIBLE_DEVICES")))'
import subprocess
inherited = json.loads(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
print("RESULT" + json.dumps([type(current_platform).__name__, is_cuda(), inherited]))
"""
SERVER = ["python", "-m", "sglang.launch_server"]


@pytest.fixture
def probe(fresh_process):
    def run(arguments, *, program=SERVER, setup=FAKE_GPU):
        """-> (platform class, is_cuda(), CUDA_VISIBLE_DEVICES of a child process)"""
        # While sglang is imported for -m, argv[0] is still "-m".
        code = PROBE.format(argv=["-m", *arguments], orig_argv=[*program, *arguments], setup=setup)
        # Without a fake one there is to be no GPU, whatever this machine has.
        result = fresh_process(code, CUDA_VISIBLE_DEVICES=None if setup else "")
        lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
        assert lines, result.stderr[-3000:]
        return json.loads(lines[0].removeprefix("RESULT"))

    return run


def test_no_accelerator_means_torch_cpu(probe):
    assert probe([], setup="")[:2] == ["TorchCpuPlatform", False]


def test_device_cpu_hides_the_gpu_from_the_process_and_its_children(probe):
    assert probe(["--model-path", "x", "--device", "cpu"]) == ["TorchCpuPlatform", False, ""]


def test_a_gpu_is_used_without_the_flag(probe):
    assert probe(["--model-path", "x"]) == ["CudaSRTPlatform", True, None]


def test_another_program_keeps_its_gpu(probe):
    assert probe(["--device", "cpu"], program=["python", "train.py"]) == ["CudaSRTPlatform", True, None]


def test_a_gpu_that_is_open_already_cannot_be_hidden(probe):
    with pytest.raises(AssertionError, match="CUDA is already open in this process"):
        probe(["--device", "cpu"], setup=FAKE_GPU + "torch.cuda.is_available()")


def test_upstream_cpu_engine_goes_first(monkeypatch):
    assert discover() != {}
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert discover() == {}


def test_device_cpu_on_another_platform_is_refused(monkeypatch):
    from sglang.srt import platforms
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    monkeypatch.setattr(platforms, "_current_platform", CudaSRTPlatform())
    with pytest.raises(ValueError, match="kdtree_sm120 on device cpu needs the torch CPU platform.*CudaSRTPlatform"):
        require_torch_cpu("kdtree_sm120")
    monkeypatch.setattr(platforms, "_current_platform", TorchCpuPlatform())
    require_torch_cpu("kdtree_sm120")


def test_compiled_functions_run_eagerly(fresh_process):
    """A seeded request must not wait for a C++ compiler. Eager execution shows in side effects of every call."""
    code = (
        "import torch\n"
        "from sglang.srt.platforms.torch_cpu import TorchCpuPlatform\n"
        "TorchCpuPlatform().init_backend()\n"
        "calls = []\n"
        "@torch.compile\n"
        "def f(x):\n"
        "    calls.append(1)\n"
        "    return x + 1\n"
        "f(torch.ones(2)); f(torch.ones(2)); print(len(calls), torch._dynamo.utils.counters['frames'])\n"
    )
    result = fresh_process(code)
    assert result.stdout.startswith("2 Counter()"), result.stdout + result.stderr[-500:]


def test_the_expert_recorder_is_refused(monkeypatch):
    args = SimpleNamespace(expert_distribution_recorder_mode="stat")
    with pytest.raises(ValueError, match="--expert-distribution-recorder-mode does not run .* Leave it out, or serve"):
        refuse_expert_recorder(args)
    refuse_expert_recorder(SimpleNamespace(expert_distribution_recorder_mode=None))
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False, raising=False)
    refuse_expert_recorder(args)


def test_what_the_platform_serves():
    platform = TorchCpuPlatform()
    assert platform.device_type == "cpu" and platform.is_out_of_tree()
    assert platform.get_default_attention_backend() == "torch_reference"
    served = [name for name in ("DFLASH", "DDTREE", "EAGLE", "NGRAM") if platform.supports_speculative_algorithm(name)]
    assert served == ["DFLASH", "DDTREE"]
    assert platform.get_kv_pool_cls(kind="mla") is None
