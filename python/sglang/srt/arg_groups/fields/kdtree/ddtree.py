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


FIELDS = KDTreeSpec
REGISTERS = ["sglang.srt.speculative.ddtree_algo"]
