# SPDX-License-Identifier: Apache-2.0
"""The torch form of the sampling hash: the same bits as the definition and as upstream's Triton kernel."""

import os
import subprocess
import sys

import torch

from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.kernels.ops.sampling.murmur_hash_torch import murmur_hash32_torch

SEEDS = [0, 1, 42, -1, -(2**63), 2**63 - 1, 2**32, 0x0123456789ABCDEF]
POSITIONS = [0, 1, 7, 4095, 131072, 2**31 - 1, 5, 6]
COLUMNS = list(range(40)) + [2047, 163839]


def murmur3_32(key: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for keys of whole 4-byte words."""
    mask, state = 0xFFFFFFFF, 0
    for at in range(0, len(key), 4):
        word = int.from_bytes(key[at : at + 4], "little") * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = state * 5 + 0xE6546B64 & mask
    state ^= len(key)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def inputs():
    return torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(COLUMNS)


def test_definition():
    assert murmur3_32(b"") == 0
    assert murmur3_32(b"test") == 0xBA6BD213  # a published value of MurmurHash3_x86_32
    expected = [
        [
            murmur3_32(
                (seed % 2**64).to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            )
            for column in COLUMNS
        ]
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]
    hashed = murmur_hash32_torch(*inputs())
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == expected


def test_the_sampler_passes_seeds_as_uint64():
    seeds, positions, columns = inputs()
    assert (
        murmur_hash32_torch(seeds.to(torch.uint64), positions, columns).tolist()
        == murmur_hash32_torch(seeds, positions, columns).tolist()
    )


def test_hash_needs_no_sgl_kernel():
    assert murmur_hash32(*inputs()).tolist() == murmur_hash32_torch(*inputs()).tolist()


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
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().splitlines()[-1] == str(murmur_hash32_torch(*inputs()).tolist())
