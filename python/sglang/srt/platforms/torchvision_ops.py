# SPDX-License-Identifier: Apache-2.0
"""Let torchvision import beside a CPU build of torch.

The package index carries torchvision's CUDA build only. Its compiled operators do not load without CUDA's libraries, and
then its import stops, because it registers fake kernels for operators that nobody declared. Several model configurations
import its pure-Python parts, so the text server needs the import and none of the operators: they are declared here
without a kernel, and calling one still fails. A CPU build of torchvision, or any CUDA or ROCm machine, is left alone.
"""

import importlib.util
from pathlib import Path

import torch

# The schemas are torchvision's own.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library = None  # a declaration lives as long as its library


def declare_missing_operators() -> list[str]:
    """-> the operators declared. Has to run before the first import of torchvision."""
    global _library
    spec = importlib.util.find_spec("torchvision")
    if torch.backends.cuda.is_built() or spec is None or spec.origin is None:
        return []
    for extension in sorted(Path(spec.origin).parent.glob("_C*.so")):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            pass  # the CUDA build: its libraries are not here
    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            _library.define(_SCHEMAS[name])
    return missing
