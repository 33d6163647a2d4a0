# SPDX-License-Identifier: Apache-2.0
"""PEP 517 backend: setuptools, which needs the CUDA compiler's wheels only when there is CUDA code to compile."""

import sys
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import get_requires_for_build_wheel as _base_requires

sys.path.insert(0, str(Path(__file__).parent))
from kernel_build import TOOLCHAIN, cuda_requested


def get_requires_for_build_wheel(config_settings=None):
    return _base_requires(config_settings) + (TOOLCHAIN if cuda_requested() else [])


get_requires_for_build_editable = get_requires_for_build_wheel
