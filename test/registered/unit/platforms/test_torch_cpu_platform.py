# SPDX-License-Identifier: Apache-2.0
"""The platform in plain torch: who gets it, and that its pool moves KV without a kernel."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

import unittest
from unittest.mock import patch

import torch

from sglang.srt import platforms
from sglang.srt.mem_cache.torch_kv_pool import TorchMHATokenToKVPool
from sglang.srt.platforms.torch_cpu import TorchCpuPlatform, cpu_is_chosen
from sglang.srt.utils.common import get_device
from sglang.test.test_utils import CustomTestCase

SERVER = ["python", "-m", "sglang.launch_server"]
CLI = ["python", "/venv/bin/sglang", "serve"]
OTHER = ["python", "-m", "sglang_extra.run", "--device", "cpu"]


class TestTorchCpuPlatform(CustomTestCase):
    def test_only_a_servers_own_command_line_chooses_it(self):
        for argv, orig_argv, chosen in (
            (["-m", "--device", "cpu"], SERVER, True),
            (["-m", "--device=cpu"], SERVER, True),
            (["/venv/bin/sglang", "serve", "--device", "cpu"], CLI, True),
            (["-m", "--device", "cuda"], SERVER, False),
            (["-m", "--device", "cpu", "--device", "cuda"], SERVER, False),
            (["-m", "--model-path", "cpu"], SERVER, False),
            (["-m", "--device"], SERVER, False),
            (["-m", "--device", "cpu"], OTHER, False),
            ([], [], False),
        ):
            with self.subTest(argv=argv):
                self.assertEqual(cpu_is_chosen(argv, orig_argv), chosen)

    def test_it_is_resolved_where_no_accelerator_is(self):
        nothing = {
            name: lambda: False
            for name in vars(platforms)
            if name.startswith("_is_") and name.endswith("_available")
        }
        self.assertGreater(len(nothing), 5)
        with (
            patch.multiple(platforms, **nothing),
            patch.dict("os.environ", SGLANG_PLATFORM=""),
        ):
            self.assertIsInstance(platforms._resolve_platform(), TorchCpuPlatform)

    def test_a_server_without_a_device_gets_its_name(self):
        with (
            patch("sglang.srt.utils.common.current_platform", TorchCpuPlatform()),
            patch("torch.cuda.is_available", return_value=False),
        ):
            self.assertEqual(get_device(), "cpu")

    def test_kv_rows_move_by_indexing(self):
        pool = TorchMHATokenToKVPool(
            size=16,
            page_size=1,
            dtype=torch.float32,
            head_num=2,
            head_dim=4,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
            enable_kv_cache_copy=True,
        )
        buffers = [*pool.k_buffer, *pool.v_buffer]
        for buffer in buffers:
            buffer.copy_(torch.randn_like(buffer))
        before = [buffer.clone() for buffer in buffers]
        target, source = torch.tensor([3, 4, 5]), torch.tensor([4, 5, 9])
        pool.move_kv_cache(target, source)
        for buffer, old in zip(buffers, before):
            self.assertTrue(torch.equal(buffer[target], old[source]))


if __name__ == "__main__":
    unittest.main()
