# SPDX-License-Identifier: Apache-2.0
"""The adaptive budget against the chain on recorded answers of the small model: what its drafter promised at each place
and what each tree would have had accepted there (recorded_steps.json, by ``python -m acceptance --record FILE``).

Costs are given, no time is taken. Those "like an H200's" are what one measured at its start for one request in
benchmark/acceptance (256 layers), and for eight the chain's of that run, with the trees' assumed. The promise is of
speed, and a batch is as slow as its longest answer, as it is there.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from sglang.srt.speculative.ddtree_budget import AdaptiveBudget, CostTable, StepRow, options_up_to

RECORD = json.loads((Path(__file__).parent / "recorded_steps.json").read_text())
MODELS = Path(__file__).parents[2] / "models"
BLOCK = RECORD["block_size"]
OPTIONS = options_up_to(max(RECORD["widths"]), BLOCK)
CONTEXT, LARGE = 1000, 8

# Milliseconds of a step of one request and of eight, by option.
COSTS = {
    "like an H200's": ((13.02, 12.94, 13.05, 13.83, 15.80, 17.87), (15.9, 15.5, 16.0, 18.5, 23.0, 30.0)),
    "rows are free": ((10.0,) * 6, (10.0,) * 6),
    "a row costs 1 %": tuple([1 + 0.01 * b * (o.width - 1) for o in OPTIONS] for b in (1, LARGE)),
    "a row costs 20 %": tuple([1 + 0.2 * b * (o.width - 1) for o in OPTIONS] for b in (1, LARGE)),
}


@dataclass(frozen=True)
class Cell:
    """What the benchmark asks one after another: a kind of text, batches of equal size."""

    temperature: str
    kind: str
    size: int

    def batches(self):
        answers = [a for a in RECORD["answers"] if (a["temperature"], a["kind"]) == (self.temperature, self.kind)]
        if self.size == 1:
            return [[answer] for answer in answers]
        return [(answers * self.size)[: self.size]]


KINDS = ("repeat", "code", "prose", "noise", "long")
CELLS = [
    *(Cell("0", kind, 1) for kind in KINDS),
    *(Cell("0", kind, LARGE) for kind in KINDS),
    *(Cell("1", kind, size) for size in (1, LARGE) for kind in KINDS if kind != "repeat"),
]


class Chain:
    """A server that verifies nothing else."""

    def choose(self, rids, context):
        return type("Decision", (), {"option": OPTIONS[0]})

    def learns(self, option):
        return False

    def learn(self, option, rows):
        pass


def table_of(costs):
    planes = tuple((tuple(map(float, row)),) for row in costs)
    widths = (0, *(option.width for option in OPTIONS[1:]))
    return CostTable(
        batch_sizes=(1, LARGE), contexts=(0,), widths=widths, step_ms=planes, node_ms=((0.0,), (0.0,))
    )  # fmt: skip


def answer_batch(budget, batch, costs, name):
    """-> tokens, milliseconds"""
    places, tokens, ms = dict.fromkeys(range(len(batch)), 0), 0, 0.0
    pending = []
    while places:
        option = budget.choose([f"{name} {i}" for i in places], CONTEXT).option
        chosen, learns, rows = OPTIONS.index(option), budget.learns(option), []
        ms += costs.step(len(places), CONTEXT, option)
        for i, place in list(places.items()):
            promised, accepted = batch[i]["promised"], [int(digit) for digit in batch[i]["accepted"][place]]
            drafts, chain = accepted[chosen], accepted[0]
            committed = min(drafts + 1, len(promised) - place)
            tokens, places[i] = tokens + committed, place + committed
            rows.append(
                StepRow(
                    rid=f"{name} {i}",
                    gains=tuple(p / 100 for p in promised[place]),
                    drafts=drafts,
                    chain_drafts=min(chain, drafts + 1),  # more is not told by what was committed
                    chain_is_open=chain > drafts and drafts + 1 < BLOCK - 1,
                    is_last=places[i] == len(promised),
                )
            )
            if rows[-1].is_last:
                del places[i]
        pending.append((option, rows if learns else []))
        if len(pending) == 2:  # counts arrive when the next step was chosen
            budget.learn(*pending.pop(0))
    budget.learn(*pending.pop())
    return tokens, ms


def speeds(budget, costs, rounds):
    """Of each cell, tokens per millisecond: one server, all cells in turn."""
    found = {}
    for number in range(rounds):
        for cell in CELLS:
            told = [answer_batch(budget, b, costs, f"{number} {cell} {i}") for i, b in enumerate(cell.batches())]
            totals = found.setdefault(cell, [0, 0.0])
            totals[0] += sum(tokens for tokens, _ in told)
            totals[1] += sum(ms for _, ms in told)
    return {cell: tokens / ms for cell, (tokens, ms) in found.items()}


def mistaken(costs, share, seed):
    """The same costs as a start of a noisy machine could have measured them."""
    random = Random(seed)
    rows = [[ms * (1 + random.uniform(-share, share)) for ms in row] for row in costs]
    return [[min(row[0], *row[2:]), *(min(row[i:]) for i in range(1, len(row)))] for row in rows]


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("share", [0.0, 0.02])
def test_never_two_per_cent_slower_than_the_chain(name, share):
    true = table_of(COSTS[name])
    chain = speeds(Chain(), true, 1)
    for seed in range(12 if share else 1):
        budget = AdaptiveBudget(OPTIONS, table_of(mistaken(COSTS[name], share, seed)))
        ours = speeds(budget, true, 2)
        slower = {cell: round(ours[cell] / chain[cell], 3) for cell in CELLS if ours[cell] < 0.98 * chain[cell]}
        assert not slower, f"seed {seed}"


@pytest.mark.parametrize(
    ("name", "least"), [("rows are free", 1.25), ("like an H200's", 1.08), ("a row costs 20 %", 1.15)]
)
def test_branching_pays_where_texts_branch(name, least):
    """The mean of all kinds but the one that repeats itself."""
    costs = table_of(COSTS[name])
    chain, ours = speeds(Chain(), costs, 1), speeds(AdaptiveBudget(OPTIONS, costs), costs, 1)
    gains = [ours[cell] / chain[cell] for cell in CELLS if cell.kind != "repeat"]
    assert sum(gains) / len(gains) > least


def test_the_record_is_of_these_models():
    document = json.loads((MODELS / "expected_steps.json").read_text())
    for key in ("target_sha256", "drafter_sha256"):
        assert RECORD[key] == document[key], "record it anew: python -m acceptance --record FILE, in benchmark/"
    assert RECORD["widths"] == [0 if option.is_chain else option.width for option in OPTIONS]
    for answer in RECORD["answers"]:
        assert len(answer["promised"]) == len(answer["accepted"])
        for promised, accepted in zip(answer["promised"], answer["accepted"], strict=True):
            assert len(promised) == len(accepted) == len(OPTIONS)
            assert promised[1:] == sorted(promised[1:]) and list(accepted[1:]) == sorted(accepted[1:])
