# SPDX-License-Identifier: Apache-2.0
"""What is declared so that torchvision imports beside a CPU torch, and what is left alone."""

import subprocess
import sys

import pytest

FAKE = """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets
@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold):
    return dets
"""


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, **options)


@pytest.fixture
def stub(tmp_path):
    """A torchvision whose compiled operators do not load, as the CUDA build beside a CPU torch."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(FAKE)
    (tmp_path / "torchvision/_C.so").write_bytes(b"not a library")
    return tmp_path


HEAD = "import sys; sys.path.insert(0, {0!r}); import torch; torch._C._has_cuda = {1!r}; import importlib.util as u; "
LOAD = (
    "s = u.spec_from_file_location('ops', {2!r}); m = u.module_from_spec(s); s.loader.exec_module(m); "
    "print(m.declare_missing_operators()); print(m.declare_missing_operators()); import torchvision"
)


def load(stub, cuda=False, tail=""):
    from sglang.srt.platforms import torchvision_ops as ops

    return python((HEAD + LOAD).format(str(stub), cuda, ops.__file__) + tail)


def test_the_declaration_lets_it_import_once(stub):
    result = load(stub)
    assert result.returncode == 0 and result.stdout == "['nms', 'qnms']\n[]\n", result.stderr


def test_a_declared_operator_has_no_kernel(stub):
    result = load(stub, tail="; torch.ops.torchvision.nms(torch.ones(1, 4), torch.ones(1), 0.5)")
    assert "NotImplementedError" in result.stderr


def test_a_gpu_build_of_torch_is_left_alone(stub):
    assert "operator torchvision::nms does not exist" in load(stub, cuda=True).stderr
