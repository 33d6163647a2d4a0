# SPDX-License-Identifier: Apache-2.0
"""Build kernel sources for the CPU, as a library that a test loads."""

import ctypes
import subprocess
from pathlib import Path

CSRC = Path(__file__).parents[2] / "sgl-kernel-sm120" / "csrc"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
# Or the inline variables of all these libraries would be one in a process that loads two of them.
FLAGS.append("-fno-gnu-unique")


def load_host_build(source: Path, library: Path, *flags: str) -> ctypes.CDLL:
    """``source`` with the stand-ins beside it in place of the headers of csrc/ that have the same name."""
    command = ["g++", *FLAGS, *flags, f"-I{source.parent}", f"-I{CSRC}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
