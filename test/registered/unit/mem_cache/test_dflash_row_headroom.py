# SPDX-License-Identifier: Apache-2.0
"""A row of req_to_token holds what one decode step of the DFLASH family reserves."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.mem_cache import allocation_sizing
from sglang.test.test_utils import CustomTestCase

CONTEXT_LEN = 64


def row_headroom_and_reserve(num_draft_tokens, page_size):
    """(columns of a row past the context, tokens reserved past the committed length)"""
    spec = SimpleNamespace(
        speculative_algorithm="DFLASH",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
    )
    with (
        patch.object(allocation_sizing, "get_spec", lambda: spec),
        patch.object(allocation_sizing, "get_alloc_page_size", lambda: page_size),
        patch.object(
            allocation_sizing,
            "max_speculative_num_draft_tokens",
            lambda: num_draft_tokens,
        ),
    ):
        return (
            allocation_sizing.get_req_to_token_extra_context_len(),
            allocation_sizing.get_alloc_reserve_per_decode(),
        )


class TestDflashRowHeadroom(CustomTestCase):
    def test_a_row_holds_the_reservation(self):
        for page_size in (1, 16):
            for num_draft_tokens in (4, 8, 16, 40):
                with self.subTest(page_size=page_size, tokens=num_draft_tokens):
                    headroom, reserve = row_headroom_and_reserve(
                        num_draft_tokens, page_size
                    )
                    self.assertEqual(reserve, 2 * num_draft_tokens)
                    self.assertGreaterEqual(headroom, reserve + page_size - 1)

    def test_a_request_at_the_context_limit_leaves_the_next_row_alone(self):
        """What the missing columns did: the next request read a slot that is not its own."""
        headroom, reserve = row_headroom_and_reserve(16, 1)
        width = CONTEXT_LEN + headroom
        table = torch.zeros(2, width, dtype=torch.int32)
        # The writer is given a start, an end and the row's first element.
        table.view(-1)[CONTEXT_LEN : CONTEXT_LEN + reserve] = 7
        self.assertEqual(table[1].count_nonzero().item(), 0)


if __name__ == "__main__":
    unittest.main()
