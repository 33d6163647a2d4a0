# SPDX-License-Identifier: Apache-2.0
"""Backends and graphs of several widths on one target: built at their width, in place while it is verified, and gone
afterwards. Capturing real graphs needs a GPU."""

import contextlib
from types import SimpleNamespace

import pytest

from sglang.srt.speculative import ddtree_widths
from sglang.srt.speculative.ddtree_widths import VerifyWidths

WIDEST = 32


class Spec:
    """The server's settings, of which one is read."""

    speculative_num_draft_tokens = WIDEST

    @contextlib.contextmanager
    def override(self, speculative_num_draft_tokens):
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        yield
        self.speculative_num_draft_tokens = WIDEST


class Graphs:
    def __init__(self, runner, attn_backend, speculative_num_draft_tokens):
        self.attn_backend, self.width = attn_backend, speculative_num_draft_tokens


class Runner:
    def __init__(self, spec, graphs):
        self.spec, self.init_new_workspace, self.eager_runner = spec, False, "eager"
        self.attn_backend, self.decode_cuda_graph_runner = "widest", graphs

    def _get_attention_backend(self, init_new_workspace):
        assert init_new_workspace, "a second backend must not share the workspace of the first"
        self.init_new_workspace = True
        return SimpleNamespace(width=self.spec.speculative_num_draft_tokens)

    def _decode_cuda_graph_runner_cls(self):
        return Graphs


@pytest.fixture
def spec(monkeypatch):
    spec = Spec()
    monkeypatch.setattr(ddtree_widths, "get_spec", lambda: spec)
    return spec


def test_each_width_has_a_backend_and_graphs_of_its_own(spec):
    runner = Runner(spec, "graphs of the widest")
    widths = VerifyWidths(runner)
    widths.capture([8, 4, 8, WIDEST])
    assert sorted(widths.states) == [4, 8]
    for width in (4, 8):
        with widths.use(width):
            assert runner.attn_backend.width == width
            assert runner.decode_cuda_graph_runner.width == width
            assert runner.decode_cuda_graph_runner.attn_backend is runner.attn_backend
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("widest", "graphs of the widest")
    with widths.use(WIDEST):
        assert runner.attn_backend == "widest"
    assert not runner.init_new_workspace and spec.speculative_num_draft_tokens == WIDEST


@pytest.mark.parametrize("graphs", [None, "eager"])
def test_without_graphs_there_is_a_backend(spec, graphs):
    runner = Runner(spec, graphs)
    widths = VerifyWidths(runner)
    widths.capture([4])
    with widths.use(4):
        assert runner.attn_backend.width == 4 and runner.decode_cuda_graph_runner is graphs


def test_a_failing_step_leaves_the_widest_in_place(spec):
    runner = Runner(spec, "graphs of the widest")
    widths = VerifyWidths(runner)
    widths.capture([4])
    with pytest.raises(RuntimeError, match="out of memory"), widths.use(4):
        raise RuntimeError("out of memory")
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("widest", "graphs of the widest")
