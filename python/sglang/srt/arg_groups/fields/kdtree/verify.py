# SPDX-License-Identifier: Apache-2.0
"""Flags of the attention backend kdtree_sm120, and where its name may be given."""

from __future__ import annotations

import os
from typing import Literal, Optional

import msgspec

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.arg_utils import A
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

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


@register_resolution_hook("handle_other_validations")
def refuse_before_loading(server_args, previous) -> None:
    """A backend is built after the weights and the pools, which may take minutes."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.layers.attention import kdtree_registry

    previous(server_args)
    cfg = overrides.resolving_view(server_args)
    split = overrides.attention_backends_of(cfg)
    if "kdtree_sm120" in split:
        kdtree_registry.check_page_size("kdtree_sm120", cfg.page_size)
        model = overrides.model_config_of(server_args)
        kdtree_registry.check_model(model, cfg.speculative_num_draft_tokens)
        kdtree_registry.check_split(
            *split, cfg.speculative_algorithm, cfg.speculative_attention_mode
        )
    if cfg.kdtree_dump_dir is not None:
        kdtree_registry.check_dump_dir(cfg.kdtree_dump_dir, cfg.kdtree_verify)


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


FIELDS = KDTreeKernel
REGISTERS = ["sglang.srt.layers.attention.kdtree_registry"]

choices.add_attention_backend_choices(["kdtree_sm120", "torch_reference"])
# Where a drafter names none it inherits the target's; a name that is not in this list
# would become flashinfer. Drafters of this name run on Triton, but for EAGLE's extend.
choices.add_draft_attention_backend_choices(["kdtree_sm120", "torch_reference"])
# Request seeds need --enable-deterministic-inference. Of the two names only the
# CPU form takes it; kdtree_sm120 on a GPU refuses it at start-up.
choices.add_deterministic_attention_backend_choices(["kdtree_sm120", "torch_reference"])
choices.add_radix_supported_deterministic_attention_backend_choices(
    ["kdtree_sm120", "torch_reference"]
)
