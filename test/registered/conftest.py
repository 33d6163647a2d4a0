# SPDX-License-Identifier: Apache-2.0
"""These tests are upstream's kind, at upstream's paths; this file is ours and is not sent.

Upstream's test base class imports its benchmarks, and they import `datasets`, which is in upstream's extra `test` and not
among the requirements here.
"""

import importlib.util
import sys
from types import ModuleType


def stand_in_for_datasets() -> None:
    """Where `datasets` is missing, a module of that name whose one name is None: no test here loads a data set."""
    if importlib.util.find_spec("datasets") is None:
        module = ModuleType("datasets")
        module.load_dataset = None
        sys.modules["datasets"] = module


if "datasets" not in sys.modules:
    stand_in_for_datasets()
