# SPDX-License-Identifier: Apache-2.0
"""Imports that only some verbs need; a missing one names the package to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from sglang.kdtree.errors import KitError

PIP_NAME = {
    "jsonschema": "jsonschema",
    "matplotlib": "matplotlib",
    "prometheus_client.parser": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "rich.console": "rich",
    "sgl_kernel_sm120": "sgl-kernel-sm120",
    "torch": "torch",
    "safetensors": "safetensors",
}


def require(module: str, *, needed_for: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = PIP_NAME[module]
        raise KitError(
            what=f"Python module {module}",
            expected=f"an importable {package} (needed for {needed_for})",
            got=str(error),
            remedy=f"Run: python -m pip install {package}",
        ) from error


def figure_module() -> ModuleType:
    """matplotlib.pyplot on the file-only Agg canvas: no display is needed."""
    require("matplotlib", needed_for="--plot").use("Agg")
    return importlib.import_module("matplotlib.pyplot")
