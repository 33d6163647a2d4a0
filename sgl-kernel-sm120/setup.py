# SPDX-License-Identifier: Apache-2.0
"""One wheel for Python 3.10+ and torch 2.11 to 2.14: py3-none-manylinux with CUDA code, py3-none-any without.

SGL_KERNEL_SM120_ARCHS  architectures to compile, default "80 89 90a 120a"
SGL_KERNEL_SM120_CUDA   0 = CPU ops only, no compiler needed
MAX_JOBS                compilers to run at once, default the number of CPUs
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import kernel_build


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname):  # no CPython tag: the library has no Python symbol
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        kernel_build.build_library(Path(self.get_ext_fullpath(ext.name)))


class Wheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not kernel_build.cuda_requested()

    def get_tag(self):
        return ("py3", "none", kernel_build.PLATFORM if kernel_build.cuda_requested() else "any")


sources = [str(p.relative_to(kernel_build.ROOT)) for p in kernel_build.units()]
library = Extension("sgl_kernel_sm120.libsgl_kernel_sm120", sources)
setup(
    ext_modules=[library] if kernel_build.cuda_requested() else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
