# SPDX-License-Identifier: Apache-2.0
"""Verifying a token tree is verifying each of its branches as a chain."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

import unittest
from types import SimpleNamespace

import torch

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_reference_backend import (
    TorchReferenceAttnBackend,
)
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.test.test_utils import CustomTestCase

PREFIX, HEADS, DIM, V_DIM = 9, 3, 24, 16
# parents[i] of node i; node 0 is the root.
PARENTS = [-1, 0, 0, 1, 1, 2]
BRANCHES = [[0, 1, 3], [0, 1, 4], [0, 2, 5]]


class LatentPool:
    """KV rows of one MLA layer: the values are the first columns of the keys."""

    def __init__(self, num_slots):
        self.start_layer, self.layer_num = 0, 1
        self.rows = torch.full((num_slots, 1, DIM), float("nan"))

    def get_key_buffer(self, layer_id):
        return self.rows

    def get_value_buffer(self, layer_id):
        return self.rows[..., :V_DIM]

    def set_kv_buffer(self, layer, loc_info, k, v):
        self.rows[loc_info.loc] = k


def visible_from(parents):
    n = len(parents)
    mask = torch.eye(n, dtype=torch.bool)
    for node in range(n):
        if parents[node] >= 0:
            mask[node] |= mask[parents[node]]
    return mask


class TestTreeVerifyBackend(CustomTestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.table = (torch.randperm(40) + 1).int().view(1, 40)
        self.prefix = torch.randn(PREFIX, 1, DIM)
        self.q = torch.randn(len(PARENTS), HEADS * DIM)
        self.k = torch.randn(len(PARENTS), 1, DIM)

    def verify(self, nodes, spec_info):
        """Attention output of the nodes, written behind the prefix in this order."""
        n = len(nodes)
        pool = LatentPool(64)
        pool.rows[self.table[0, :PREFIX].long()] = self.prefix
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=pool,
        )
        layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=HEADS,
            tp_k_head_num=1,
            tp_v_head_num=1,
            qk_head_dim=DIM,
            head_dim=DIM,
            v_head_dim=V_DIM,
            scaling=DIM**-0.5,
            logit_cap=0.0,
            logit_capping_method="tanh",
            sliding_window_size=-1,
            attn_type=AttentionType.DECODER,
            k_scale=None,
            v_scale=None,
            k_scale_float=None,
            v_scale_float=None,
            is_cross_attention=False,
            xai_temperature_len=-1,
        )
        batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([PREFIX]),
            extend_seq_lens=torch.tensor([n]),
            spec_info=spec_info,
            out_cache_loc=self.table[0, PREFIX : PREFIX + n].long(),
            out_cache_loc_is_physical=True,
        )
        backend = TorchReferenceAttnBackend(runner)
        backend.init_forward_metadata(batch)
        k = self.k[nodes]
        return backend.forward(self.q[nodes], k, k[..., :V_DIM], layer, batch)

    def test_a_tree_gives_what_its_branches_give_as_chains(self):
        empty = torch.empty(0)
        tree = self.verify(
            list(range(len(PARENTS))),
            DDTreeVerifyInput(
                draft_token=empty,
                positions=empty,
                draft_token_num=len(PARENTS),
                custom_mask=visible_from(PARENTS).flatten(),
            ),
        )
        for branch in BRANCHES:
            with self.subTest(branch=branch):
                chain = self.verify(
                    branch,
                    DFlashVerifyInput(
                        draft_token=empty,
                        positions=empty,
                        draft_token_num=len(branch),
                    ),
                )
                torch.testing.assert_close(tree[branch], chain)

    def test_the_server_knows_both_backends(self):
        self.assertIn("kdtree_verify", ServerArgs._NS_BY_FIELD)
        for name in ("kdtree_sm120", "torch_reference"):
            self.assertIn(name, ATTENTION_BACKENDS)
            self.assertIn(name, ATTENTION_BACKEND_CHOICES)


if __name__ == "__main__":
    unittest.main()
