# SPDX-License-Identifier: Apache-2.0
"""Decode speed of one tensor-parallel rank of Kimi K2.6 against context, through the real Engine."""

import sys
from pathlib import Path

# verify_bench, which the benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))
