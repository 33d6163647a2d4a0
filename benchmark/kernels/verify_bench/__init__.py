# SPDX-License-Identifier: Apache-2.0
"""Parts of the tree-verify benchmark: shapes, inputs and oracle, counters, timing, probes, results, arms."""
