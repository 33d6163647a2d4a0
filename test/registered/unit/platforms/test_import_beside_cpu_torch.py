# SPDX-License-Identifier: Apache-2.0
"""The package imports beside a CPU torch and a torchvision whose compiled operators do not load."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from sglang.test.test_utils import CustomTestCase

# What torchvision does at its import: a fake kernel for an operator of its extension.
FAKE_TORCHVISION = """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets
"""
# What can reach torchvision comes after the platform is known: stop there.
IMPORT = """
import os, sys
sys.path.insert(0, {0!r})
import torch
torch._C._has_cuda = False
class Torchvision:
    def find_spec(self, name, path, target=None):
        if name == "sglang.srt.utils.hf_transformers_patches":
            import torchvision
            print("imported", flush=True)
            os._exit(0)
sys.meta_path.insert(0, Torchvision())
import {1}
"""


class TestImportBesideCpuTorch(CustomTestCase):
    def import_torchvision(self, package):
        with tempfile.TemporaryDirectory() as folder:
            fake = Path(folder) / "torchvision"
            fake.mkdir()
            (fake / "__init__.py").write_text(FAKE_TORCHVISION)
            (fake / "_C.so").write_bytes(b"not a library")
            code = IMPORT.format(folder, package)
            return subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True
            )

    def test_torchvision_alone_does_not_import(self):
        result = self.import_torchvision("torchvision")
        self.assertIn("operator torchvision::nms does not exist", result.stderr)

    def test_after_sglang_it_imports(self):
        result = self.import_torchvision("sglang")
        self.assertEqual(result.stdout, "imported\n", result.stderr)


if __name__ == "__main__":
    unittest.main()
