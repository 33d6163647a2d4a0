# SPDX-License-Identifier: Apache-2.0
"""Flags of --speculative-algorithm DDTREE."""

from __future__ import annotations

from typing import Optional

import msgspec

from sglang.srt.arg_groups.arg_utils import A


class KDTreeSpec(msgspec.Struct):
    _NS_PATH = "spec"

    speculative_ddtree_topk: A[
        Optional[int],
        "DDTREE only. How many ranks of each draft position the tree may use, 64 at "
        "most; 1 is a chain. Default: num_draft_tokens - 1, all that can be of use, "
        "or 64 where that is less.",
    ] = None
    speculative_ddtree_budget: A[
        Optional[str],
        "DDTREE only. How many nodes a step verifies, the root included: a number up to "
        "--speculative-num-draft-tokens, which is the default, or auto = chosen before "
        "each step from the drafter's scores and the measured cost of a step.",
    ] = None
    speculative_ddtree_costs: A[
        Optional[str],
        "DDTREE with --speculative-ddtree-budget auto only. A JSON file with the cost of "
        "steps, see docs/ddtree.md; measured at start-up by default.",
    ] = None


FIELDS = KDTreeSpec
REGISTERS = ["sglang.srt.speculative.ddtree_algo"]
