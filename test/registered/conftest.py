# SPDX-License-Identifier: Apache-2.0
"""These tests are upstream's kind, at upstream's paths; this file is ours and is not sent. It makes up for what upstream's
machines have and this one may lack.

Upstream's test base class imports its benchmarks, and they import `datasets`, which is in upstream's extra `test` and not
among the requirements here. And these tests run on trees without the change that lets torchvision's CUDA build import
beside a CPU torch.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TORCHVISION_OPS = (
    Path(__file__).resolve().parents[2]
    / "python/sglang/srt/platforms/torchvision_ops.py"
)


def stand_in_for_datasets() -> None:
    """Where `datasets` is missing, a module of that name whose one name is None: no test here loads a data set."""
    if importlib.util.find_spec("datasets") is None:
        module = ModuleType("datasets")
        module.load_dataset = None
        sys.modules["datasets"] = module


if "datasets" not in sys.modules:
    stand_in_for_datasets()


def declare_torchvision_operators() -> None:
    """As the fork's CPU platform does, by the file itself: importing it from sglang would be too late."""
    spec = importlib.util.spec_from_file_location(
        "declared_torchvision_ops", TORCHVISION_OPS
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a declaration lives as long as its module
    spec.loader.exec_module(module)
    module.declare_missing_operators()


if "declared_torchvision_ops" not in sys.modules:
    declare_torchvision_operators()
