# SPDX-License-Identifier: Apache-2.0
"""How many tokens a verify step commits: chain, trees, chain-seeded trees and the adaptive budget on the small model.

    python -m acceptance            in benchmark/; about two minutes on one CPU core, writes results/cpu/acceptance.json

walk      one answer, walked in every way from one forward of each model
results   the file, and what a reader may expect of it
table     its tables in Markdown
plot      its picture
"""

WIDTHS = (8, 16, 32, 64)  # of trees
# Cost of one more row of a request, as a share of a step that verifies one row.
ROW_COSTS = (0.0, 0.002, 0.01, 0.05, 0.2)
