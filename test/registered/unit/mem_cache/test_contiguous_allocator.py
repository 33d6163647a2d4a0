# SPDX-License-Identifier: Apache-2.0
"""The contiguous allocator takes the place of the stock one: the same sizes, other slots."""

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

import random
import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.contiguous import ContiguousTokenAllocator
from sglang.srt.mem_cache.defrag import settings
from sglang.test.test_utils import CustomTestCase

SIZE = 96


class NoCache:
    def supports_prefix_sharing(self):
        return False


def stock():
    return TokenToKVPoolAllocator(SIZE, torch.int64, "cpu", object(), need_sort=False)


def chosen(tier):
    with patch.object(settings, "get_memory", lambda: SimpleNamespace(kv_defrag=tier)):
        return settings.select_allocator(stock())


class TestContiguousAllocator(CustomTestCase):
    def test_the_flag_chooses(self):
        self.assertIs(type(chosen("off")), TokenToKVPoolAllocator)
        self.assertIs(type(chosen("tier0")), ContiguousTokenAllocator)

    def test_the_same_calls_leave_the_same_room(self):
        """Random allocations and frees: both refuse the same ones, and neither hands a slot out twice."""
        for seed in range(20):
            rng = random.Random(seed)
            pair = (stock(), chosen("tier0"))
            held = ([], [])
            for _ in range(60):
                if held[0] and rng.random() < 0.45:
                    index = rng.randrange(len(held[0]))
                    for allocator, own in zip(pair, held):
                        allocator.free(own.pop(index))
                else:
                    need = rng.randint(1, 24)
                    given = [allocator.alloc(need) for allocator in pair]
                    self.assertEqual(given[0] is None, given[1] is None)
                    for own, slots in zip(held, given):
                        own += [] if slots is None else [slots.clone()]
                self.assertEqual(pair[0].available_size(), pair[1].available_size())
                for own in held:
                    slots = torch.cat(own) if own else torch.empty(0)
                    self.assertEqual(slots.unique().numel(), slots.numel())
                    self.assertFalse((slots == 0).any(), "slot 0 is for padded rows")

    def test_what_was_freed_in_any_order_is_one_run_again(self):
        allocator = chosen("tier0")
        slots = allocator.alloc(SIZE).clone()
        for part in slots[torch.randperm(SIZE)].split(5):
            allocator.free(part)
        allocator.create_prefill_budget(NoCache())  # where the scheduler sizes prefill
        self.assertEqual(allocator.alloc(SIZE).tolist(), list(range(1, SIZE + 1)))


if __name__ == "__main__":
    unittest.main()
