# SPDX-License-Identifier: Apache-2.0
"""Run by test_arms.py in a process of its own, under TRITON_INTERPRET=1: upstream's Triton kernels on the CPU.

Prints one line an arm and shape: name, relative error to the fp64 answer, and the same to the answer with the other
mask.
"""

import dataclasses
import sys
from pathlib import Path

from verify_bench import inputs
from verify_bench.arms import ARMS, Context
from verify_bench.shapes import parse_shape

context = Context(native=Path("none"), sglang_kernels=Path(sys.argv[1]))
for spec in ("prefix=40,q=9,h=2", "prefix=33+3,q=5,h=4,page=16"):
    shape = parse_shape(spec)
    problem = inputs.build(shape, layers=2, seed=5)
    # The interpreter's bf16 is wrong, so float32 throughout.
    problem = dataclasses.replace(problem, q=problem.q.float(), kv=[kv.float() for kv in problem.kv])
    for name in ("triton_extend", "triton_decode"):
        arm = ARMS[name](context)
        prepared = arm.prepare(problem)
        prepared.run(1)
        errors = [
            inputs.relative_error(prepared.out, inputs.oracle(problem, 1, tree))[0]
            for tree in (arm.tree_mask, not arm.tree_mask)
        ]
        print(name, shape, *errors)
module = sys.modules["sglang.kernels.ops.attention.extend_attention"]
print("module", module.__file__)
