# SPDX-License-Identifier: Apache-2.0
"""Request seeds on a CPU: the sampling hash has the bits of its definition, without sgl_kernel."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.model_executor import model_runner
from sglang.test.test_utils import CustomTestCase

SEEDS = [0, 1, 42, -1, -(2**63), 2**63 - 1, 2**32, 0x0123456789ABCDEF]
POSITIONS = [0, 1, 7, 4095, 131072, 2**31 - 1, 5, 6]
COLUMNS = [*range(40), 2047, 163839]


def murmur3_32(key):
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


class TestSeededSamplingOnCpu(CustomTestCase):
    def test_the_hash_has_the_bits_of_its_definition(self):
        # A published value of MurmurHash3_x86_32.
        self.assertEqual(murmur3_32(b"test"), 0xBA6BD213)
        expected = [
            [
                murmur3_32(
                    (seed % 2**64).to_bytes(8, "little")
                    + position.to_bytes(4, "little")
                    + column.to_bytes(4, "little")
                )
                for column in COLUMNS
            ]
            for seed, position in zip(SEEDS, POSITIONS)
        ]
        positions, columns = torch.tensor(POSITIONS), torch.tensor(COLUMNS)
        for dtype in (torch.int64, torch.uint64):  # the sampler passes uint64
            hashed = murmur_hash32(torch.tensor(SEEDS).to(dtype), positions, columns)
            self.assertEqual(hashed.dtype, torch.uint32)
            self.assertEqual(hashed.tolist(), expected)

    def test_deterministic_inference_starts(self):
        """Its batch-invariant operators are Triton and stay out where the platform is a CPU."""
        flags = SimpleNamespace(
            deterministic=SimpleNamespace(enable_deterministic_inference=True)
        )
        platform = SimpleNamespace(device_type="cpu")
        with (
            patch.object(model_runner, "get_exec", lambda: flags),
            patch.object(model_runner, "current_platform", platform),
        ):
            runner = SimpleNamespace()
            model_runner.ModelRunner.maybe_enable_batch_invariant_mode(runner)
        product = torch.mm(torch.eye(2), torch.eye(2))
        self.assertEqual(product.tolist(), [[1, 0], [0, 1]])


if __name__ == "__main__":
    unittest.main()
