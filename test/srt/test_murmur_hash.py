# SPDX-License-Identifier: Apache-2.0
"""The torch form of the sampling hash has the bits of upstream's Triton kernel; those of its definition:
test/registered/unit/sampling/test_seeded_sampling_on_cpu.py."""

import os
import subprocess
import sys

import torch

from sglang.kernels.ops.sampling.murmur_hash_torch import murmur_hash32_torch

SEEDS = [0, 1, 42, -1, -(2**63), 2**63 - 1, 2**32, 0x0123456789ABCDEF]
POSITIONS = [0, 1, 7, 4095, 131072, 2**31 - 1, 5, 6]
COLUMNS = list(range(40)) + [2047, 163839]


INTERPRETED = """
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
seeds, positions, columns = (torch.tensor(x) for x in {arguments})
out = torch.empty(len(seeds), len(columns), dtype=torch.uint32)
murmur_hash32_kernel[(len(seeds), 1)](seeds.to(torch.uint64), positions, columns, out, *out.shape, BLOCK_SIZE=64)
print(out.tolist())
"""


def test_same_bits_as_the_triton_kernel():
    """A seeded request draws the same tokens on a CPU and on a GPU only if the two hashes agree."""
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(arguments=[SEEDS, POSITIONS, COLUMNS])],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().splitlines()[-1] == str(
        murmur_hash32_torch(*map(torch.tensor, (SEEDS, POSITIONS, COLUMNS))).tolist()
    )
