# SPDX-License-Identifier: Apache-2.0
"""Decode speed of one tensor-parallel rank of Kimi K2.6 against context, through the real Engine."""

import sys
from pathlib import Path

# verify_bench and the scripts, which share with this.
HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "kernels")]
