# SPDX-License-Identifier: Apache-2.0
"""The arms without a GPU: upstream's kernels are called rightly, and what is missing has a reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verify_bench import inputs, table
from verify_bench.arms import ARMS, Context, Unavailable, sglang_triton
from verify_bench.shapes import Shape, parse_shape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def test_upstream_kernels_give_the_oracles_answer(tmp_path):
    """The real Triton kernels in Triton's interpreter: extend honours the tree mask, decode sees every row."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "benchmark" / "kernels")}
    script = [sys.executable, str(HERE / "interpret_arms.py"), str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    if "Unavailable" in done.stderr and "sglang is not installed" in done.stderr:
        pytest.skip("sglang is not installed")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("triton_")]
    assert [line[0] for line in lines] == ["triton_extend", "triton_decode"] * 2
    for name, shape, error, other in lines:
        assert float(error) < 1e-5, f"{name} at {shape}"
        assert float(other) > 0.05, f"{name} at {shape}: both masks give the same, so the check sees nothing"


@pytest.mark.parametrize("arm", ["ladder_32bit_s16", "flashinfer_full"])
def test_a_missing_library_is_named(tmp_path, monkeypatch, arm):
    monkeypatch.setattr(sys.modules[ARMS[arm].__mro__[1].__module__], "need_cuda", lambda problem: None)
    problem = inputs.build(Shape((5,)), layers=2)
    with pytest.raises(Unavailable, match=r"no lib\w+\.so in .*: run build_native.py"):
        ARMS[arm](Context(tmp_path, tmp_path)).prepare(problem)


def test_a_library_that_does_not_load_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[ARMS["ladder_32bit_s16"].__mro__[1].__module__], "need_cuda", lambda problem: None)
    (tmp_path / "libladder.so").write_bytes(b"no ELF")
    with pytest.raises(Unavailable, match="libladder.so does not load"):
        ARMS["ladder_32bit_s16"](Context(tmp_path, tmp_path)).prepare(inputs.build(Shape((5,)), layers=2))


def test_missing_sglang_has_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sglang_triton.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no sglang"))
    )
    with pytest.raises(Unavailable, match="sglang is not installed .no sglang. and there are no packed kernel files"):
        sglang_triton.load_ops(Context(tmp_path, tmp_path), "extend_attention")


def test_kv_splits_cap_is_upstreams():
    """132 SMs round up to 256; a short context caps it; never under the default of 8."""
    assert [sglang_triton.max_kv_splits(132, n) for n in (189449, 4105, 1033, 40)] == [256, 256, 64, 8]


def test_fp8_is_outside_the_ladder():
    arm = ARMS["ladder_128bit_s64"](Context(Path(), Path()))
    assert arm.unsupported(parse_shape("kv=fp8")) == "bf16 KV only" and arm.unsupported(parse_shape("kv=bf16")) is None


def test_every_arm_has_a_name_of_its_own_and_a_note():
    assert all(name == arm.name and arm.note for name, arm in ARMS.items())
    assert all(arm.label.endswith("*") != arm.tree_mask for arm in ARMS.values())
    assert [n for n, arm in ARMS.items() if not arm.tree_mask] == [
        "triton_decode",
        "flashinfer_full",
        "flashinfer_100k",
    ]


def test_table_ratios(make_result, capsys):
    data = make_result(
        {
            ("ours", "prefix=4096"): 8.0,
            ("triton_extend", "prefix=4096"): 720.0,
            ("ours", "prefix=189440"): 80.0,
            ("triton_extend", "prefix=189440"): 36000.0,
        }
    )
    assert table.geomeans(data["rows"])["triton_extend"] == (pytest.approx((90 * 450) ** 0.5), 2)
    rows = table.cells(data)
    assert [r[-1] for r in rows] == ["1.00x", "90.00x", "1.00x", "450.00x"]
    assert rows[2][5:9] == (
        "2,728",
        "68.2",
        "371.0",
        "61.8",
    )  # 218.2 MB and 29.68 GFLOP in 80 us, of 4000 GB/s and 600 TFLOP/s
    table.show(data)
    assert "geomean triton_extend / ours: 201.25x over 2 shapes" in capsys.readouterr().out
