# SPDX-License-Identifier: Apache-2.0
"""The fork's config fields, and its names in upstream's registries.

``server_args`` imports this module while it collects its fields, and every
process of a server imports ``server_args``: a name registered here is known
everywhere, and a failure to register stops the process.
"""

from __future__ import annotations

import os
from typing import Literal, Optional

import msgspec

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.arg_utils import A


class KDTreeSpec(msgspec.Struct):
    _NS_PATH = "spec"

    speculative_ddtree_topk: A[
        Optional[int],
        "DDTREE only. How many ranks of each draft position the tree may use, 64 at "
        "most; 1 is a chain. Default: num_draft_tokens - 1, all that can be of use, "
        "or 64 where that is less.",
    ] = None


VERIFY_MODES = ("off", "validate", "on")


def default_verify_mode() -> str:
    """KDTREE_VERIFY is for services whose command line is fixed; the flag goes first."""
    mode = os.environ.get("KDTREE_VERIFY", "on")
    if mode not in VERIFY_MODES:
        raise ValueError(
            f"the environment variable KDTREE_VERIFY is {mode!r}; use one of "
            f"{', '.join(VERIFY_MODES)}."
        )
    return mode


class KDTreeKernel(msgspec.Struct):
    _NS_PATH = "exec.kernel"

    kdtree_verify: A[
        Literal["off", "validate", "on"],
        "Attention backend kdtree_sm120 only. Which kernel verifies drafts: off = "
        "the stock one, validate = both, compared, and the stock result is used, "
        "on = kdtree_sm120's. The environment variable KDTREE_VERIFY sets the default.",
    ] = default_verify_mode()
    kdtree_dump_dir: A[
        Optional[str],
        "--kdtree-verify validate only. Where a mismatch is written as a file that "
        "python -m sglang.kdtree probe verify reads; nothing is written by default.",
    ] = None


class KDTreeMemory(msgspec.Struct):
    _NS_PATH = "memory"

    kv_defrag: A[
        Literal["off", "tier0", "tier1"],
        "How the KV slots of a request are kept together: off = upstream's order, "
        "tier0 = allocated in runs, ascending, tier1 = tier0, and slots of running "
        "requests are moved together under --kv-defrag-copy-budget.",
    ] = "off"
    kv_defrag_copy_budget: A[
        str,
        "--kv-defrag tier1 only. Bytes of KV that may be moved after each step, over "
        "all layers and pools of a rank, such as 64M or 1G.",
    ] = "64M"


KDTREE_NAMESPACES = [KDTreeSpec, KDTreeKernel, KDTreeMemory]

choices.add_attention_backend_choices(["kdtree_sm120", "torch_reference"])
choices.add_draft_attention_backend_choices(["torch_reference"])
# Request seeds need --enable-deterministic-inference. Of the two names only the
# CPU form takes it; kdtree_sm120 on a GPU refuses it at start-up.
choices.add_deterministic_attention_backend_choices(["kdtree_sm120", "torch_reference"])
choices.add_radix_supported_deterministic_attention_backend_choices(
    ["kdtree_sm120", "torch_reference"]
)

# Registration is the effect of these imports. They come last: both modules are
# on upstream's side of the tree and must not import this one.
from sglang.srt.layers.attention import kdtree_registry  # noqa: E402,F401
from sglang.srt.speculative import ddtree_algo  # noqa: E402,F401
