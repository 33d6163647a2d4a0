# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on two GPUs of one host: the same answers, the same slots, and what it costs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# verify_bench and the scripts, which share with this; the requests of the tests; the operator's kit, where it is not
# installed.
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "benchmark" / "kernels")]
sys.path.append(str(ROOT / "test"))
