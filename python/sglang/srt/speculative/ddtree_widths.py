# SPDX-License-Identifier: Apache-2.0
"""Verification of several widths on one target: each has an attention backend of its own,
and the CUDA graphs that were captured with it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Dict, Iterable

import msgspec

from sglang.srt.runtime_context import get_spec

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class WidthState(msgspec.Struct, frozen=True):
    attn_backend: Any
    graph_runner: Any  # None: eager


class VerifyWidths:
    """A backend sizes its buffers by the server's number of draft tokens, which is the
    widest step; a graph is captured for one width. On a CPU one backend serves all."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.states: Dict[int, WidthState] = {}

    def capture(self, widths: Iterable[int]) -> None:
        """After the target's own graphs, which are those of the widest step."""
        widest = int(get_spec().speculative_num_draft_tokens)
        for width in widths:
            if width != widest and width not in self.states:
                with get_spec().override(speculative_num_draft_tokens=width):
                    self.states[width] = self.build(width)

    def build(self, width: int) -> WidthState:
        runner = self.runner
        had_workspace = runner.init_new_workspace
        try:
            backend = runner._get_attention_backend(init_new_workspace=True)
        finally:
            runner.init_new_workspace = had_workspace
        graphs = runner.decode_cuda_graph_runner
        if graphs is not None and graphs is not runner.eager_runner:
            graphs = runner._decode_cuda_graph_runner_cls()(
                runner, attn_backend=backend, speculative_num_draft_tokens=width
            )
        return WidthState(backend, graphs)

    @contextlib.contextmanager
    def use(self, width: int):
        """The target verifies ``width`` tokens a request inside."""
        state = self.states.get(width)
        if state is None:
            yield
            return
        widest = self.runner.attn_backend, self.runner.decode_cuda_graph_runner
        self.runner.attn_backend = state.attn_backend
        self.runner.decode_cuda_graph_runner = state.graph_runner
        try:
            yield
        finally:
            self.runner.attn_backend, self.runner.decode_cuda_graph_runner = widest
