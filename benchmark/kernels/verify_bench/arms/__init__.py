# SPDX-License-Identifier: Apache-2.0
"""The arms by name, in the order of the report."""

from __future__ import annotations

from . import flashinfer_mla, ladder, ours, sglang_triton
from .base import Arm, Context, Prepared, Unavailable, lack_of_resources

ARMS: dict[str, type[Arm]] = {
    arm.name: arm
    for arm in (
        ours.Ours,
        sglang_triton.Extend,
        sglang_triton.Decode,
        flashinfer_mla.Full,
        flashinfer_mla.Limited,
        ladder.Loads32Splits16,
        ladder.Loads32Splits64,
        ladder.Loads128Splits64,
        ours.Reference,
    )
}

__all__ = ["ARMS", "Arm", "Context", "Prepared", "Unavailable", "lack_of_resources"]
