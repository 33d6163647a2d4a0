# SPDX-License-Identifier: Apache-2.0
"""The model behind the 'arithmetic' columns: numbers by hand, monotone, and fitted back from its own output."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import arithmetic_sm120 as model
import pytest
from verify_bench import results
from verify_bench.shapes import Shape, parse_shape

SCHEDULE = Path(__file__).resolve().parents[2] / "sgl-kernel-sm120" / "csrc" / "mla_tree_verify" / "schedule.h"
# 132 SMs of 2,375 FLOP a clock at 1.98 GHz: 621 TFLOP/s, what mma.sync reaches on an H200.
H200 = model.Gpu("H200", 132, 1.98, 2375, 4390, 6000)
PRO6000, RTX5090 = model.ARITHMETIC_GPUS
FIT = model.Fit(fixed_us=5.0, stall_clocks=300.0)


def test_mma_clocks_by_hand():
    """40 rows: 5 blocks x (36 + 32) MMAs of 4096 FLOP. At 1024 FLOP a clock that is 4 clocks an MMA."""
    assert model.mma_clocks(5, PRO6000) == 5 * 68 * 4 == 1360
    assert model.mma_clocks(5, RTX5090) == 2 * 1360
    assert model.mma_clocks(5, H200) == pytest.approx(586, abs=1)


def test_shared_memory_clocks_by_hand():
    """bf16: 16 x 2 B x (576 + 576 + 512) of KV, 5 x 512 B x 4 of scores, 40 x 16 x 2 B x 5 of P, at 128 B a clock."""
    assert model.smem_clocks(5, "bf16") == (53248 + 10240 + 6400) / 128
    assert model.smem_clocks(5, "bf16") - model.smem_clocks(5, "fp8") == 53248 / 2 / 128


def test_floors_of_the_cards():
    """122 us of DRAM at 1.79 TB/s of the data sheet, so 137 at what is reached; 51 us of an H200's."""
    long = Shape((189440,))
    assert model.estimate(long, PRO6000, FIT).dram_us == pytest.approx(218.245e6 / (1792e3 * 0.89), rel=1e-4)
    assert model.estimate(long, dataclasses.replace(H200, dram_gbps=4260), FIT).dram_us == pytest.approx(51.2, abs=0.1)
    assert PRO6000.mma_tflops == pytest.approx(462, abs=1) and RTX5090.mma_tflops == pytest.approx(209, abs=1)


def test_a_call_by_hand():
    """189,449 tokens: 11,841 tiles over 66 columns of two blocks, 180 for the busiest, each 586.4 + 300 clocks."""
    e = model.estimate(Shape((189440,)), H200, FIT)
    assert e.tile_us == pytest.approx(180 * (5 * 68 * 4096 / 2375 + 300) / 1980, rel=1e-6)
    assert e.merge_us == pytest.approx(2 * 66 * 80 * 512 * 2 / 6000e3, rel=1e-6)
    assert e.total_us == pytest.approx(5 + e.tile_us + e.merge_us) and e.bound == "tiles"


@pytest.mark.parametrize("gpu", [H200, PRO6000, RTX5090], ids=lambda g: g.name)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_monotone(gpu, kv):
    def us(**change):
        return model.estimate(dataclasses.replace(Shape((65536,), kv_dtype=kv), **change), gpu, FIT).total_us

    def rising(values):
        return all(a <= b for a, b in zip(values, values[1:], strict=False)) and values[0] < values[-1]

    assert rising([us(prefixes=(p,)) for p in range(0, 200_000, 4096)])
    assert rising([us(prefixes=(65536,) * b) for b in range(1, 9)])
    assert rising([us(h_q=h) for h in (8, 16, 64, 128)])
    faster = dataclasses.replace(
        gpu, dram_gbps=gpu.dram_gbps * 2, mma_flop_per_clock=gpu.mma_flop_per_clock * 2, clock_ghz=3
    )
    assert model.estimate(Shape((65536,), kv_dtype=kv), faster, FIT).total_us < us()


def test_fp8_is_never_slower():
    for p in (1024, 65536, 189440):
        bf16, fp8 = (model.estimate(Shape((p,), kv_dtype=kv), PRO6000, FIT).total_us for kv in ("bf16", "fp8"))
        assert fp8 <= bf16


@pytest.mark.parametrize("truth", [model.Fit(5.0, 300.0), model.Fit(2.5, 700.0), model.Fit(9.0, 50.0)])
def test_fit_finds_the_numbers_that_made_the_rows(make_result, truth):
    texts = [f"prefix={p}" for p in (1024, 4096, 16384, 65536, 189440)] + ["prefix=65536,q=33", "prefix=65536,h=64"]
    blank = make_result({})
    gpu = model.measured_gpu(blank)
    data = make_result({("ours", t): model.estimate(parse_shape(t), gpu, truth).total_us for t in texts})
    found = model.fit(model.our_rows(data), gpu)
    assert found.fixed_us == pytest.approx(truth.fixed_us, rel=0.02) and found.stall_clocks == pytest.approx(
        truth.stall_clocks, rel=0.02
    )


def test_table_prints_the_error_of_every_row(make_result):
    gpu = model.measured_gpu(make_result({}))
    exact = {
        t: model.estimate(parse_shape(t), gpu, FIT).total_us for t in ("prefix=4096", "prefix=65536", "prefix=189440")
    }
    times = {("ours", t): us for t, us in exact.items()} | {
        ("ours", "prefix=65536,page=64"): 1.0,
        ("triton_extend", "prefix=4096"): 700.0,
    }
    columns, rows = model.report_table(make_result(times))
    assert len(rows) == 3 and columns.count("bound by") == 3 and "RTX PRO 6000: arithmetic us" in columns
    assert all(r[columns.index("error")] in ("+0 %", "-0 %") for r in rows)
    doubled = dict(times)
    doubled["ours", "prefix=4096"] *= 2
    assert model.report_table(make_result(doubled))[1][0][columns.index("error")] != "+0 %"


def test_program(make_result, tmp_path, capsys):
    times = {("ours", f"prefix={p}"): p / 2500 + 6 for p in (1024, 65536, 189440)}
    results.save(tmp_path / "r.json", make_result(times))
    assert model.main([str(tmp_path / "r.json")]) == 0
    text = capsys.readouterr().out
    assert (
        "Test GPU, measured: 100 SMs at 2.00 GHz" in text
        and "RTX PRO 6000, arithmetic: 188 SMs" in text
        and "fitted:" in text
    )


@pytest.mark.parametrize("what", ["no rates", "no row"])
def test_what_it_cannot_model_is_an_error(make_result, tmp_path, capsys, what):
    data = make_result({("triton_extend" if what == "no row" else "ours", "prefix=1024"): 7.0})
    if what == "no rates":
        data["header"]["ceilings"] = {}
    results.save(tmp_path / "r.json", data)
    with pytest.raises(SystemExit):
        model.main([str(tmp_path / "r.json")])
    assert what.split()[1] in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_work_distribution_is_the_kernels(tmp_path):
    """The mirrored functions against schedule.h itself, compiled."""
    source = tmp_path / "print.cpp"
    source.write_text(
        f'#include <cstdio>\n#include <initializer_list>\n#include "{SCHEDULE}"\n'
        "using namespace sgl_kernel_sm120::mla_tree_verify_op;\n"
        "int main() {\n"
        '  std::printf("%d %d %d\\n", kTileTokens, kMinTilesPerColumn, kValueWarps);\n'
        "  for (int most : {kMaxRowBlocksBf16, kMaxRowBlocksFp8}) {\n"
        '    std::printf("%d\\n", most);\n'
        "    for (int rows = 1; rows <= 16384; ++rows) {\n"
        "      const int n = row_blocks_per_tile(rows, most);\n"
        '      std::printf("%d %d\\n", n, num_row_tiles(rows, n));\n'
        "    }\n"
        "  }\n"
        "  for (int t = 1; t < 20000; t += 37)\n"
        "    for (int n : {1, 2, 7, 60, 200})\n"
        '      std::printf("%d %d\\n", num_columns(t, max_columns(n, 132)), num_columns(t, max_columns(n, 188)));\n'
        "}\n"
    )
    program = tmp_path / "print"
    subprocess.run(["g++", "-std=c++17", "-o", program, source], check=True, timeout=600)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    want = [f"{model.TILE_TOKENS} {model.MIN_TILES_PER_COLUMN} {model.VALUE_WARPS}"]
    for kv in ("bf16", "fp8"):
        want.append(str(model.MAX_ROW_BLOCKS[kv]))
        want += [f"{model.row_blocks_per_tile(r, kv)} {model.num_row_tiles(r, kv)}" for r in range(1, 16385)]
    for t in range(1, 20000, 37):
        want += [f"{model.num_columns(t, n, 132)} {model.num_columns(t, n, 188)}" for n in (1, 2, 7, 60, 200)]
    assert lines == want
