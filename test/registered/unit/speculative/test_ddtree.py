# SPDX-License-Identifier: Apache-2.0
"""DDTREE's tree: a chain where one rank is used, never shorter than DFLASH's chain, and known by its name."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

import unittest

import torch
from sgl_kernel_sm120 import ddtree_build, tree_accept

import sglang.srt.server_args  # noqa: F401  registers the algorithm
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.test_utils import CustomTestCase

BATCH, DEPTH, RANKS, VOCAB = 5, 7, 4, 50


def draft(seed):
    """Root tokens and a drafter's best tokens for each position, best first."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(BATCH, DEPTH, VOCAB, generator=generator)
    log_probs, ids = logits.log_softmax(-1).topk(RANKS)
    return torch.randint(VOCAB, (BATCH,), generator=generator), ids, log_probs


class TestDDTree(CustomTestCase):
    def test_one_rank_is_the_chain_of_dflash(self):
        root, ids, log_probs = draft(0)
        tree = ddtree_build(root, ids[..., :1], log_probs[..., :1], DEPTH + 1)
        self.assertTrue(torch.equal(tree.tokens[:, 0], root))
        self.assertTrue(torch.equal(tree.tokens[:, 1:], ids[..., 0]))
        causal = torch.ones(DEPTH + 1, DEPTH + 1, dtype=torch.bool).tril()
        self.assertTrue(torch.equal(tree.visible, causal.expand(BATCH, -1, -1)))

    def test_a_tree_accepts_what_the_target_says_along_a_branch(self):
        root, ids, log_probs = draft(1)
        tree = ddtree_build(root, ids, log_probs, 24)
        for request in range(BATCH):
            leaf = int(tree.depth[request].argmax())
            path = []
            while leaf >= 0:
                path.insert(0, leaf)
                leaf = int(tree.parents[request, leaf])
            target = torch.full((1, 24), VOCAB)  # says no to everything else
            for node, child in zip(path, path[1:]):
                target[0, node] = tree.tokens[request, child]
            target[0, path[-1]] = VOCAB + 1
            one = slice(request, request + 1)
            accepted = tree_accept(
                tree.tokens[one], tree.parents[one], target, DEPTH + 1
            )
            self.assertEqual(int(accepted.accept_len), len(path))
            self.assertEqual(accepted.path[0, : len(path)].tolist(), path)
            self.assertEqual(int(accepted.bonus), VOCAB + 1)

    def test_the_name_is_registered_with_every_question_that_is_asked_of_an_algorithm(
        self,
    ):
        """A question that is added to the enum has to be answered here, too."""
        algorithm = SpeculativeAlgorithm.from_string("DDTREE")
        asked = [
            name
            for name, value in vars(SpeculativeAlgorithm).items()
            if callable(value) and not name.startswith("_") and name != "register"
        ]
        self.assertGreater(len(asked), 10)
        self.assertEqual([name for name in asked if not hasattr(algorithm, name)], [])
        self.assertTrue(algorithm.is_dflash_family())


if __name__ == "__main__":
    unittest.main()
