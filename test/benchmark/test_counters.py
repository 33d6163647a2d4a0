# SPDX-License-Identifier: Apache-2.0
"""Counters against arithmetic done by hand: a rate in a table is only as right as these."""

import pytest
from verify_bench import counters
from verify_bench.shapes import Shape

LONG = Shape((189440,))  # 9 nodes, 8 heads, bf16: 189,449 rows of 1152 B


def test_bytes_are_unique_kv_rows():
    assert counters.kv_bytes(LONG) == 189449 * 1152 == 218_245_248
    assert counters.kv_bytes(Shape((189440,), kv_dtype="fp8")) == 218_245_248 // 2
    assert counters.kv_bytes(Shape((1000, 10), s_q=3)) == (1003 + 13) * 1152


def test_more_heads_and_nodes_add_flops_not_bytes_per_row():
    assert counters.flops(LONG) == 2 * 1088 * 72 * 189449 == 29_681_353_728
    assert counters.flops(Shape((189440,), h_q=64)) == 8 * counters.flops(LONG)
    assert counters.kv_bytes(Shape((189440,), h_q=64)) == counters.kv_bytes(LONG)


def test_rates_at_a_round_time():
    assert counters.gbps(LONG, 100.0) == pytest.approx(2182.45248)  # 218.2 MB in 100 us
    assert counters.tflops(LONG, 100.0) == pytest.approx(296.81353728)


def test_floors_match_the_published_ones():
    """51.2 us of HBM and 47.0 us of MMA at 189k, q=9, h=8, at 4.26 TB/s and 632 TFLOP/s."""
    memory, mma = counters.floors_us(LONG, 4260, 632)
    assert (round(memory, 1), round(mma, 1)) == (51.2, 47.0)
