# SPDX-License-Identifier: Apache-2.0
"""Embeddings given as input take the dtype of the model's first layer."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

import unittest
from types import SimpleNamespace

import torch

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.test_utils import CustomTestCase


class TestInputEmbedsDtype(CustomTestCase):
    def test_a_linear_layer_of_the_model_takes_them(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with self.subTest(dtype=dtype):
                runner = SimpleNamespace(
                    dtype=dtype, _pp_kwargs=lambda _: {}, is_generation=True
                )
                batch = SimpleNamespace(
                    input_embeds=torch.ones(2, 3),
                    replace_embeds=None,
                    replace_positions=None,
                )
                kwargs = ModelRunner._extend_forward_kwargs(runner, batch, None)
                layer = torch.nn.Linear(3, 1, bias=False, dtype=dtype)
                self.assertEqual(layer(kwargs["input_embeds"]).dtype, dtype)


if __name__ == "__main__":
    unittest.main()
