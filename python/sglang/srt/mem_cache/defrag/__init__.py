# SPDX-License-Identifier: Apache-2.0
"""Keeping a request's KV slots together: where new slots come from, and moving live ones.

Layers, lowest first; none imports upwards:

    slot_runs      runs of a slot list, as tensors of fixed shape
    host_runs      the same for a list in host memory
    ../allocator/contiguous
                   tier 0: the free list kept by runs
    planner        which slots go where: a pure function over host integers
    snapshot       what the planner looks at, on its way to the host
    mover          the copy, in every pool that the slots index
    tree_values    the prefix cache's view of a moved slot
    rewrite        the commit: rows and tree name the new slots
    metrics        counters and gauges of one rank
    step_checks    debug mode: owners, KV and ranks after every step
    settings       flags, refusals, which allocator to build
    tier0          the free list at idle, the gauges
    tier1          moving slots: one step at each safe point of the scheduler
    defragmenter   which of them a scheduler gets
"""
