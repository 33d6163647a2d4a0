# SPDX-License-Identifier: Apache-2.0
"""Slots are read and written on a platform that launches no Triton kernel."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

import unittest
from unittest.mock import patch

import torch

from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocation import get_last_loc_torch
from sglang.test.test_utils import CustomTestCase

try:
    from sglang.srt.mem_cache import torch_slots
except ImportError:  # without the torch forms: the launch is what fails
    torch_slots = allocation


class TestAllocationWithoutTriton(CustomTestCase):
    def setUp(self):
        """A backend of another name than torch_native, on a platform without Triton."""
        for module in (allocation, torch_slots):
            for name, value in (
                ("attention_backends", lambda: ("a_backend", "a_backend")),
                ("support_triton", lambda backend: False),
            ):
                patcher = patch.object(module, name, value)
                patcher.start()
                self.addCleanup(patcher.stop)

    def test_slot_ranges_are_written(self):
        table = torch.zeros(3, 8, dtype=torch.int32)
        allocation.assign_req_to_token_pool_func(
            torch.tensor([2, 0]),
            table,
            torch.tensor([1, 0]),
            torch.tensor([3, 1]),
            torch.tensor([7, 8, 9]),
            2,
        )
        self.assertEqual(
            table.tolist(), [[9] + [0] * 7, [0] * 8, [0, 7, 8, 0, 0, 0, 0, 0]]
        )

    def test_the_last_slot_is_found(self):
        table = torch.arange(12, dtype=torch.int32).view(3, 4)
        rows, lens = torch.tensor([1, 2, 0]), torch.tensor([3, 0, 4])
        last = allocation.get_last_loc(table, rows, lens)
        self.assertEqual(last.tolist(), [6, -1, 3])
        self.assertEqual(last.tolist(), get_last_loc_torch(table, rows, lens).tolist())


if __name__ == "__main__":
    unittest.main()
