# SPDX-License-Identifier: Apache-2.0
"""The acceptance study: how far each way follows an answer, and the result file."""

import json
import math
from pathlib import Path

import pytest
import torch
from acceptance import ROW_COSTS, WIDTHS, results, table

walk = pytest.importorskip("acceptance.walk", reason="the fork of sglang is not installed")

RESULT = Path(__file__).resolve().parents[2] / "benchmark" / "results" / "cpu" / "acceptance.json"


@pytest.fixture
def scores():
    return (torch.randn(7, 90, generator=torch.Generator().manual_seed(1)) * 3).log_softmax(-1)


def test_the_paths_are_the_most_probable_ones():
    found = walk.best_paths([[math.log(0.6), math.log(0.3)], [math.log(0.5), math.log(0.4)]], 5)
    assert [path for path, _ in found] == [(0,), (0, 0), (1,), (0, 1), (1, 0)]
    assert [math.exp(weight) for _, weight in found] == pytest.approx([0.6, 0.3, 0.3, 0.24, 0.15])


def test_every_way_follows_the_chain(scores):
    step = walk.Step(scores, scores.argmax(-1).tolist())
    assert step.chain() == 7
    assert all(step.seeded(width) == min(7, width - 1) for width in WIDTHS)
    assert step.tree(64) >= step.tree(8) >= 1


def test_a_second_rank_ends_the_chain_and_not_the_trees(scores):
    ranked = scores.sort(-1, descending=True).indices
    likely = int((scores.topk(2, -1).values[:, 1]).argmax())  # where the second candidate is most probable
    wanted = ranked[:, 0].tolist()
    wanted[likely] = int(ranked[likely, 1])
    step = walk.Step(scores, wanted)
    assert step.chain() == likely
    assert all(step.seeded(width) >= step.chain() for width in WIDTHS)
    lengths = [step.tree(width) for width in (2, 4, *WIDTHS)]
    assert lengths == sorted(lengths)


def test_a_token_that_is_no_candidate_ends_every_way(scores):
    wanted = scores.argmax(-1).tolist()
    wanted[2] = int(scores[2].argmin())
    step = walk.Step(scores, wanted)
    assert step.chain() == 2 and step.seeded(64) == 2 and step.tree(64) <= 2


def test_promises_are_sums_of_path_probabilities(scores):
    step = walk.Step(scores, [])
    spine = scores.max(-1).values.cumsum(0).exp()
    chain = walk.Option(width=8, is_chain=True)
    assert step.promised(chain) == pytest.approx(float(spine.sum()), rel=1e-4)
    assert step.promised(walk.Option(width=2)) == pytest.approx(float(spine[0]), rel=1e-4)


def test_all_ways_walk_the_whole_answer(scores):
    tokens = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    log_probs = scores.expand(39, 7, 90).clone()
    for start in range(39):  # drafts that are right two times out of three
        for depth, token in enumerate(tokens[start + 1 : start + 8]):
            if (start + depth) % 3:
                log_probs[start, depth, token] = 0.0
    study = walk.Study(8)
    tallies = {way: walk.Tally() for way in study.ways()}
    study.add(tokens, log_probs, 8, tallies)
    assert {tally.tokens for tally in tallies.values()} == {39}
    assert tallies["chain"].rows == 8 * tallies["chain"].steps
    assert tallies["tree 64"].steps <= tallies["tree 8"].steps < 39
    for tally in tallies.values():
        assert tally.cost[0.0] == tally.steps
        assert tally.cost[0.2] == pytest.approx(tally.steps + 0.2 * (tally.rows - tally.steps))


def test_the_committed_file_is_consistent_and_fills_its_tables(tmp_path):
    data = results.load(RESULT)
    for make in (table.acceptance_lengths, table.acceptance_adaptive):
        lines = make(data).splitlines()
        assert len({line.count("|") for line in lines}) == 1
    assert len(table.acceptance_adaptive(data).splitlines()) == 2 + len(ROW_COSTS)
    kinds = next(iter(data["walks"]["0"].values()))
    kinds["chain"]["accept_length"] += 0.1
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="chain: accept_length is"):
        results.load(broken)
