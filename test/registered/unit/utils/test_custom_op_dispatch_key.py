# SPDX-License-Identifier: Apache-2.0
"""A custom op runs on the tensors of the platform that it is registered for."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.utils import common
from sglang.test.test_utils import CustomTestCase


def times_two(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class TestCustomOpDispatchKey(CustomTestCase):
    def register(self, name, device_type):
        """-> the dispatch keys that have a kernel of the op"""
        platform = SimpleNamespace(is_out_of_tree=lambda: True, device_type=device_type)
        library = torch.library.Library("dispatch_key_test", "FRAGMENT")
        self.addCleanup(library._destroy)
        with patch.object(common, "current_platform", platform):
            common.direct_register_custom_op(name, times_two, [], target_lib=library)
        return [
            key
            for key in ("CPU", "CUDA", "PrivateUse1")
            if torch._C._dispatch_has_kernel_for_dispatch_key(
                f"dispatch_key_test::{name}", key
            )
        ]

    def test_an_out_of_tree_platform_on_the_cpu(self):
        self.assertIn("CPU", self.register("on_cpu", "cpu"))
        result = torch.ops.dispatch_key_test.on_cpu(torch.ones(2))
        self.assertEqual(result.tolist(), [2, 2])

    def test_another_out_of_tree_platform_keeps_its_key(self):
        self.assertEqual(self.register("elsewhere", "npu"), ["PrivateUse1"])


if __name__ == "__main__":
    unittest.main()
