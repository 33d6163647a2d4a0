# SPDX-License-Identifier: Apache-2.0
"""A decode step of DFLASH does not ask torch for what a CPU tensor refuses."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.test.test_utils import CustomTestCase


class DraftBegins(Exception):
    """Raised by the worker's first step behind the one under test."""


class Worker:
    device = "cpu"

    def _validate_phase1_sampling_support(self, batch):
        pass

    @property
    def target_worker(self):
        raise DraftBegins


class TestDflashOnCpu(CustomTestCase):
    def begin_decode(self, seq_lens):
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            is_extend_in_batch=False,
            spec_info=object.__new__(DFlashDraftInputV2),
            seq_lens=seq_lens,
        )
        with self.assertRaises(DraftBegins):
            DFlashWorkerV2.forward_batch_generation(Worker(), batch)

    def test_no_stream_is_recorded_on_a_cpu_tensor(self):
        with self.assertRaises(RuntimeError):
            torch.ones(1).record_stream(torch.cpu.current_stream())
        self.begin_decode(torch.tensor([5]))

    def test_a_device_tensor_records_its_stream(self):
        recorded = []
        lens = MagicMock(spec=torch.Tensor, is_cpu=False, record_stream=recorded.append)
        lens.__len__.return_value = 1
        self.begin_decode(lens)
        self.assertEqual(len(recorded), 1)


if __name__ == "__main__":
    unittest.main()
