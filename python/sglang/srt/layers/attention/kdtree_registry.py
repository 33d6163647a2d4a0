# SPDX-License-Identifier: Apache-2.0
"""Names the fork's attention backends. The classes load when a runner asks."""

from sglang.srt.layers.attention.attention_registry import register_attention_backend


@register_attention_backend("kdtree_sm120")
def create_kdtree_backend(runner):
    from sglang.srt.layers.attention.kdtree_backend import create_kdtree_backend

    return create_kdtree_backend(runner)


@register_attention_backend("torch_reference")
def create_torch_reference_backend(runner):
    from sglang.srt.layers.attention.torch_reference_backend import (
        TorchReferenceAttnBackend,
    )

    return TorchReferenceAttnBackend(runner)


def offer_draft_backends(runner, backends, *, multi_step):
    from sglang.srt.layers.attention.kdtree_triton_draft import offer_draft_backends

    offer_draft_backends(runner, backends, multi_step=multi_step)
