# SPDX-License-Identifier: Apache-2.0
"""Lets upstream's NextN layer run at a hidden size that its fused norm refuses. A plugin of a server's processes.

On CUDA the layer calls ``fused_eh_norm``, which takes hidden sizes above 256 alone, and the small model has 256.
Elsewhere the layer joins two norms; with this plugin it does so on CUDA, too. Upstream's runs and ours load it alike.
"""

from __future__ import annotations


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", before_init, HookType.BEFORE)


def before_init(*args, **kwargs) -> None:
    """In the process that loads the models, and before it does."""
    from sglang.srt.models import deepseek_nextn

    deepseek_nextn.fused_eh_norm = joined_norms


def joined_norms(embeds, previous, embeds_weight, previous_weight, eps):
    """embeds and previous [n, hidden], a weight [hidden] for each -> [n, 2 * hidden]"""
    import torch
    from torch.nn.functional import rms_norm

    pairs = ((embeds, embeds_weight), (previous, previous_weight))
    return torch.cat([rms_norm(x, (x.shape[-1],), weight, eps) for x, weight in pairs], dim=-1)
