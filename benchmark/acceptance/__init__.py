# SPDX-License-Identifier: Apache-2.0
"""How many tokens a verify step commits: chain, trees, chain-seeded trees and the adaptive budget on the small model.

    python -m acceptance            in benchmark/; about two minutes on one CPU core, writes results/cpu/acceptance.json
    python -m acceptance --record FILE      what the adaptive budget would be told along some answers, for a test
    python -m acceptance --engine   on a GPU, two minutes: real Engines side by side, acceptance and speed, with the
                                    walk of their answers; writes results/h200/acceptance.json

walk      one answer, walked in every way from one forward of each model
offline   the walk alone: all ways over the same answers
arm       one Engine in a process of its own, which does what it is told
engine    all Engines: rounds of measurements that take turns, and the walk beside them
scores    the models and the drafter's scores along an answer, in torch
results   the files, and what a reader may expect of them
table     their tables in Markdown
plot      their pictures
"""

WIDTHS = (8, 16, 32, 64)  # of trees
# Cost of one more row of a request, as a share of a step that verifies one row.
ROW_COSTS = (0.0, 0.002, 0.01, 0.05, 0.2)
