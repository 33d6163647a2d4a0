# SPDX-License-Identifier: Apache-2.0
"""What fails without our edits of upstream modules. The tests of plain upstream bugs are in test/registered."""

from types import SimpleNamespace

import pytest

from sglang.srt import server_args  # noqa: F401 - names the fork's algorithm, as in every process of a server
from sglang.srt.mem_cache import allocation_sizing


@pytest.mark.parametrize("num_tokens", [8, 40])
def test_row_holds_the_reservation(monkeypatch, num_tokens):
    """A request at the context limit has 2N slots reserved behind its committed tokens, in the same row. DFLASH itself:
    test/registered/unit/mem_cache/test_dflash_row_headroom.py."""
    spec = SimpleNamespace(speculative_algorithm="DDTREE", speculative_num_steps=1, speculative_eagle_topk=1)
    monkeypatch.setattr(allocation_sizing, "get_spec", lambda: spec)
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 1)
    monkeypatch.setattr(allocation_sizing, "max_speculative_num_draft_tokens", lambda: num_tokens)
    assert allocation_sizing.get_req_to_token_extra_context_len() >= 2 * num_tokens


@pytest.mark.parametrize(("algorithm", "masked"), [("DDTREE", True), ("DFLASH", False)])
def test_a_tree_is_captured_with_its_mask(monkeypatch, algorithm, masked):
    from sglang.srt import runtime_context
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    class TritonAttnBackend:  # the policy goes by this name
        pass

    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    assert resolve_dflash_verify_mask_policy(TritonAttnBackend()) == ("TritonAttnBackend", masked)
