# SPDX-License-Identifier: Apache-2.0
"""The benchmark is a set of scripts: their folders go on the path, and made-up result files come from here."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmark" / "kernels"), str(ROOT / "benchmark")]


def timing(us: float):
    from verify_bench.timing import Timing

    return Timing(us * 0.98, us, us * 1.05, 61, 20, True)


@pytest.fixture
def make_result():
    """make_result({(arm, shape text): us, ...}) gives a valid result file of an invented card with round rates."""
    from verify_bench import results
    from verify_bench.shapes import parse_shape

    def make(times: dict[tuple[str, str], float]) -> dict:
        header = {
            "format": results.FORMAT,
            "date": "2026-01-02T03:04:05Z",
            "commit": "0123456789abcdef",
            "device": "cuda",
            "gpu": {
                "name": "Test GPU",
                "sms": 100,
                "clocks_sm": "2000 MHz",
                "driver_version": "1.2",
                "power_limit": "500.00 W",
            },
            "versions": {"python": "3.12", "torch": "2.11", "sglang": None},
            "ceilings": {
                "copy_gbps": 4000.0,
                "read_gbps": 4000.0,
                "l2_read_gbps": 8000.0,
                "mma_tflops": 600.0,
                "note": None,
            },
        }
        rows = [results.row(arm, parse_shape(text), timing(us), (2e-3, 3e-3)) for (arm, text), us in times.items()]
        return {"header": header, "rows": rows, "not_available": []}

    return make
