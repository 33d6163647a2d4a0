# SPDX-License-Identifier: Apache-2.0
"""The rows that models are trained on: what they repeat, and what their labels ask for."""

import math

import pytest
import torch
from training.architecture import BOS_ID, FIRST_TEXT_ID
from training.optimisation import FINAL_RATE, PEAK_RATE, learning_rate
from training.rows import IGNORED, RowMix, sample_rows

STREAM = torch.arange(FIRST_TEXT_ID, 2048).repeat(20)  # neighbours differ by one, so copies can be recognised
LENGTH = 256


def rows_of(**mix: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return sample_rows(STREAM, sum(mix.values()) or 16, LENGTH, RowMix(**mix))


def period_of(row: list[int]) -> int:
    return next(p for p in range(1, len(row)) if row[p:] == row[:-p])


def test_plain_rows_are_windows_of_the_stream():
    ids, labels = rows_of()
    assert (ids[:, 0] == BOS_ID).all()
    assert torch.equal(ids, labels)
    steps = ids[:, 2:] - ids[:, 1:-1]
    assert ((steps == 1) | (steps == FIRST_TEXT_ID - 2047)).all()


@pytest.mark.parametrize("kind", ["tiled", "tiled_random"])
def test_tiled_rows_repeat_one_span(kind):
    ids, _ = rows_of(**{kind: 32})
    periods = [period_of(row) for row in ids[:, 1:].tolist()]
    assert max(periods) <= LENGTH // 4
    assert len(set(periods)) > 8  # of varied length


def test_random_tokens_are_asked_for_only_where_they_repeat():
    ids, labels = rows_of(tiled_random=32)
    for row, label in zip(ids[:, 1:].tolist(), labels[:, 1:].tolist(), strict=True):
        period = period_of(row)
        assert label[:period] == [IGNORED] * period
        assert label[period:] == row[period:]


def test_copied_blocks_come_from_earlier_in_the_row():
    ids, labels = rows_of(block_copy_random=32)
    for row, label in zip(ids[:, 1:].tolist(), labels[:, 1:].tolist(), strict=True):
        fresh = next(i for i, value in enumerate(label) if value != IGNORED)  # length of a block
        for start in range(fresh, len(row), 2 * fresh):
            block = row[start : start + fresh]
            assert label[start : start + fresh] == block
            sources = [row[s : s + len(block)] for s in range(0, start, 2 * fresh)]
            assert block in sources


def test_the_rate_warms_up_and_decays():
    rates = [learning_rate(i / 100) for i in range(101)]
    peak = rates.index(max(rates))
    assert math.isclose(max(rates), PEAK_RATE)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert math.isclose(rates[-1], FINAL_RATE * PEAK_RATE)
