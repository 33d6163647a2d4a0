# SPDX-License-Identifier: Apache-2.0
"""Keeping a request's KV slots together: where new slots come from, and moving live ones.

Layers, lowest first; none imports upwards:

    slot_runs      runs of a slot list, as tensors of fixed shape
    ../allocator/contiguous
                   tier 0: the free list kept by runs
    planner        which slots go where: a pure function over host integers
    mover          the copy, in every pool that the slots index
    tree_values    the prefix cache's view of a moved slot
    settings       flags, refusals, which allocator to build
    defragmenter   tier 1: the safe points of the scheduler, one step at each
    metrics        counters and gauges of one rank
"""
