# SPDX-License-Identifier: Apache-2.0
"""Are two samples of tokens of one distribution?"""

from collections import Counter

import torch


def contingency(ours, theirs):
    """[[count of ours, count of theirs]] for each token seen 20 times or more, and one for all others."""
    both = Counter(ours) + Counter(theirs)
    common = [token for token, count in both.items() if count >= 20]
    table = [[ours.count(token), theirs.count(token)] for token in common]
    rest = [len(sample) - sum(column) for sample, column in zip((ours, theirs), zip(*table, strict=True), strict=True)]
    return table + [rest] if sum(rest) else table


def chi_square_p(table):
    """Probability of a table at least this uneven, if both columns are of one distribution."""
    columns = [sum(column) for column in zip(*table, strict=True)]
    statistic = 0.0
    for row in table:
        for count, column in zip(row, columns, strict=True):
            mean = sum(row) * column / sum(columns)
            statistic += (count - mean) ** 2 / mean
    half_freedom = torch.tensor((len(table) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
