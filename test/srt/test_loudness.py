# SPDX-License-Identifier: Apache-2.0
"""A module of ours that cannot be imported stops the process: nothing is logged and left out. And every module of ours
can be the first one that a process imports."""

import pytest

BROKEN = {
    "sglang.srt.arg_groups.fields.kdtree": "sglang.srt.server_args",
    "sglang.srt.layers.attention.kdtree_registry": "sglang.srt.server_args",
    "sglang.srt.speculative.ddtree_algo": "sglang.srt.server_args",
    "sglang.srt.platforms.torch_cpu": "sglang.srt.utils",
}
FIRST = [
    "sglang.srt.arg_groups.fields.kdtree",
    "sglang.srt.layers.attention.kdtree_backend",
    "sglang.srt.layers.attention.kdtree_registry",
    "sglang.srt.platforms.torch_cpu",
    "sglang.srt.speculative.ddtree_algo",
    "sglang.srt.speculative.ddtree_worker",
]


KNOWN = """
import sglang.srt.server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
print(SpeculativeAlgorithm.from_string("ddtree").name, {"kdtree_sm120", "torch_reference"} <= set(ATTENTION_BACKENDS))
"""


@pytest.mark.parametrize(("module", "entry"), BROKEN.items())
def test_a_broken_module_stops_the_process(fresh_process, module, entry):
    result = fresh_process(f"import sys; sys.modules['{module}'] = None; import {entry}")
    assert result.returncode != 0, "the process runs on"
    assert module in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", FIRST)
def test_every_module_can_be_imported_first(fresh_process, module):
    result = fresh_process(f"import {module}{KNOWN}")
    assert result.stdout.endswith("DDTREE True\n"), result.stderr[-1500:]
