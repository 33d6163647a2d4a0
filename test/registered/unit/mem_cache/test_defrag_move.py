# SPDX-License-Identifier: Apache-2.0
"""A plan carried out on real pools: every request reads the same KV, from fewer runs of slots."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

import unittest
from unittest.mock import MagicMock

import numpy as np
import torch

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.defrag.host_runs import run_bounds
from sglang.srt.mem_cache.defrag.mover import SlotMover
from sglang.srt.mem_cache.defrag.planner import FreeRun, Row, make_plan
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.test.test_utils import CustomTestCase

SIZE, BLOCK = 256, 8


def latent_pool():
    pool = MLATokenToKVPool(
        size=SIZE,
        page_size=1,
        dtype=torch.bfloat16,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


class TestDefragMove(CustomTestCase):
    def test_requests_read_the_same_kv_from_fewer_runs(self):
        torch.manual_seed(0)
        pools = [latent_pool(), latent_pool()]
        order = torch.randperm(SIZE // 2) + 1  # the upper half is free, one run
        rows = list(order.split(40)[:3])
        before = [
            [buffer[row].clone() for pool in pools for buffer in pool.kv_buffer]
            for row in rows
        ]
        free = [FreeRun(position=0, start=SIZE // 2 + 1, length=SIZE // 2)]
        plan = make_plan(
            [Row(key, 0, row.numpy(), -1) for key, row in enumerate(rows)],
            free,
            block=BLOCK,
            max_units=SIZE,
        )
        self.assertTrue(plan.moves)
        sources, targets = [], []
        for move in plan.moves:
            target = SIZE // 2 + 1 + move.position + torch.arange(move.hi - move.lo)
            sources.append(rows[move.key][move.lo : move.hi].clone())
            rows[move.key][move.lo : move.hi] = target
            targets.append(target)
        SlotMover(pools)(torch.cat(targets), torch.cat(sources))
        for row, kept in zip(rows, before):
            after = [buffer[row] for pool in pools for buffer in pool.kv_buffer]
            for one, two in zip(after, kept):
                self.assertTrue(torch.equal(one, two))
            lengths = np.diff(run_bounds(row.numpy()))
            self.assertGreaterEqual(lengths.min(), BLOCK)

    def test_the_scheduler_offers_its_safe_points(self):
        scheduler = MagicMock()
        scheduler.kv_defragmenter = MagicMock()
        Scheduler.process_batch_result(scheduler, MagicMock(), MagicMock())
        scheduler.kv_defragmenter.after_batch.assert_called_once_with()
        scheduler.kv_defragmenter.on_idle.assert_not_called()


if __name__ == "__main__":
    unittest.main()
