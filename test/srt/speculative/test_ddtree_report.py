# SPDX-License-Identifier: Apache-2.0
"""Counts of a verify step: against a walk in lists, on their way to the host, in meta_info and as metrics."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_sm120 import Acceptance, ddtree_build, tree_accept, tree_count
from sgl_kernel_sm120.tree import NUM_COUNTS
from sglang.srt.managers.auxiliary_output import CommittedTokens
from sglang.srt.speculative.ddtree_budget import FixedBudget, Option
from sglang.srt.speculative.ddtree_report import (
    BEYOND,
    LEAF,
    Counts,
    DDTreeMetrics,
    DDTreeReport,
    StepCounts,
    meta_info_values,
    option_codes,
)

RANKS = 3
NO_OPTIONS = torch.empty(0, dtype=torch.int32)


def counts_of(truth, candidates, accept_len, depths):
    """The definition, for one request. truth: its tokens from here on, all of them."""
    chain = 0
    while chain < depths and truth[chain] == candidates[chain][0]:
        chain += 1
    known = min(chain, accept_len)  # of what was committed
    stop = -1
    if accept_len <= depths:
        row = candidates[accept_len - 1]
        stop = row.index(truth[accept_len - 1]) if truth[accept_len - 1] in row else len(row)
    return known + 1, known == accept_len and known < depths, stop


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31), nodes=st.integers(2, 12), depths=st.integers(1, 6), ranks=st.integers(1, 4),
    agreeing=st.floats(0, 1),
)  # fmt: skip
def test_counts_are_those_of_the_definition(seed, nodes, depths, ranks, agreeing):
    """The target goes its own way; the drafter has it among its candidates more or less often."""
    generator = torch.Generator().manual_seed(seed)
    b = 3
    ids = torch.rand(b, depths, 20, generator=generator).argsort(-1)[..., :ranks]
    scores = -torch.rand(b, depths, ranks, generator=generator).sort(-1).values * 3
    truth = torch.randint(0, 20, (b, depths + 2), generator=generator)
    known = torch.rand(b, depths, generator=generator) < agreeing
    picked = ids.gather(2, torch.randint(0, ranks, (b, depths, 1), generator=generator))[..., 0]
    truth[:, :depths] = torch.where(known, picked, truth[:, :depths])
    tree = ddtree_build(torch.full((b,), 99), ids, scores, nodes)
    # A node at depth d that is on the true path wants the token after it; others want anything.
    wanted = truth.gather(1, tree.depth.long())
    accepted = tree_accept(tree.tokens, tree.parents, wanted, min(nodes, depths + 1))
    counts = tree_count(tree, ids, scores, accepted, nodes, NO_OPTIONS)
    assert counts.dtype == torch.int32
    for r in range(b):
        length = int(accepted.accept_len[r])
        chain, is_open, stop = counts_of(truth[r].tolist(), ids[r].tolist(), length, depths)
        assert counts[r].tolist() == [int(tree.used[r]), nodes, length, chain, int(is_open), stop]


def test_a_chain_that_the_tree_cuts_short_is_counted_as_open():
    """Two nodes: the chain's second token is right as well, but nobody verified what follows."""
    ids = torch.tensor([[[5], [6], [7]]])
    tree = ddtree_build(torch.tensor([1]), ids, torch.full((1, 3, 1), -0.1), 2)
    accepted = tree_accept(tree.tokens, tree.parents, torch.tensor([[5, 6]]), 2)
    counts = tree_count(tree, ids, torch.full((1, 3, 1), -0.1), accepted, 2, NO_OPTIONS)
    assert counts.tolist() == [[2, 2, 2, 3, 1, 0]]


def test_promised_drafts_are_sums_of_path_probabilities():
    log_probs = torch.tensor([[[0.5, 0.25], [0.5, 0.25]]]).log()
    tree = ddtree_build(torch.tensor([1]), torch.arange(4).view(1, 2, 2), log_probs, 2, num_paths=6)
    chains = [Option(width=width, is_chain=True) for width in (3, 2)]
    options = [*chains, Option(width=2), Option(width=4), Option(width=6)]
    accepted = tree_accept(tree.tokens, tree.parents, torch.tensor([[9, 9]]), 2)
    codes = option_codes(options, torch.device("cpu"))
    counts = tree_count(tree, torch.arange(4).view(1, 2, 2), log_probs, accepted, 2, codes)
    promised = counts[:, NUM_COUNTS:].view(torch.float32)
    # Paths by probability: 1/2, 1/4 (depth 1), 1/4 (depth 2), then 1/8 three times.
    expected = [0.5 + 0.25, 0.5, 0.5, 0.5 + 0.25 + 0.25, 1.0 + 2 * 0.125]
    torch.testing.assert_close(promised, torch.tensor([expected]))


class Request:
    """What the report reads of upstream's Req."""

    def __init__(self, rid, prompt_output=1):
        self.rid, self.customized_info = rid, None
        self.output_ids, self.finished_len = [0] * prompt_output, None

    @property
    def output_ids_through_stop(self):
        return self.output_ids[: self.finished_len]

    def finished(self):
        return self.finished_len is not None

    def commit(self, tokens, finished_len=None):
        start = len(self.output_ids)
        self.output_ids += tokens
        self.finished_len = finished_len
        return CommittedTokens(start, tuple(tokens))


class Budget(FixedBudget):
    def __init__(self):
        super().__init__(8)
        self.learnt = []

    def learn(self, option, rows):
        self.learnt += rows


def test_a_step_reaches_meta_info_and_the_budget():
    budget = Budget()
    report = DDTreeReport(budget, RANKS, None)
    requests = [Request(rid, prompt_output=0) for rid in "abc"]
    report.start(requests)
    for request in requests:
        request.output_ids.append(0)  # the prefill's token
    tensor = torch.tensor([[8, 8, 3, 2, 0, 1], [8, 8, 2, 3, 1, 0], [8, 8, 5, 1, 0, -1]], dtype=torch.int32)
    promised = torch.tensor([[1.5, 2.0], [0.5, 1.0], [3.0, 3.0]])
    tensor = torch.cat([tensor, promised.view(torch.int32)], dim=1)
    copies = []
    step = StepCounts(report, Option(8), tensor)
    on_host = step.copy_to_host(lambda t: copies.append(t) or t.clone())
    assert [t.data_ptr() for t in copies] == [tensor.data_ptr()]
    # b stops inside its path: its second token is the last one that is shown. c had finished before.
    commits = [requests[0].commit([4, 5, 6]), requests[1].commit([4, 5], finished_len=2), None]
    on_host.consume(SimpleNamespace(reqs=requests), commits)
    assert requests[0].customized_info == {"ddtree": [None] * 4}
    totals = {"steps": 1, "nodes_built": 8, "nodes_verified": 8, "tree_tokens": 2, "chain_tokens": 3}
    assert requests[1].customized_info == {"ddtree": [None, totals | {"chain_longer": 1, "stops": {"1:0": 1}}]}
    assert requests[2].customized_info == {"ddtree": [None]}
    assert [(row.rid, row.drafts, row.chain_drafts, row.is_last) for row in budget.learnt] == [
        ("a", 2, 1, False), ("b", 1, 2, True),
    ]  # fmt: skip
    assert budget.learnt[0].gains == (1.5, 2.0)
    on_host.consume(SimpleNamespace(reqs=requests[:1]), [requests[0].commit([7, 8, 9], finished_len=7)])
    last = requests[0].customized_info["ddtree"]
    assert last[:-1] == [None] * 6
    assert last[-1] == totals | {"steps": 2, "nodes_built": 16, "nodes_verified": 16, "tree_tokens": 6,
                                 "chain_tokens": 4, "chain_longer": 0, "stops": {"2:1": 2}}  # fmt: skip


def test_values_of_other_features_stay():
    request = Request("a")
    request.customized_info = {"other": [1]}
    assert meta_info_values(request, 3) == [None] * 3
    assert request.customized_info == {"other": [1], "ddtree": [None] * 3}


def test_totals_go_with_their_request():
    report = DDTreeReport(Budget(), RANKS, None)
    request = Request("a")
    report.add(request, Counts(8, 8, 1, 1, False, 0), Option(8))
    assert len(report.requests) == 1
    del request
    assert len(report.requests) == 0


def test_metrics_have_the_names_that_dashboards_read(monkeypatch):
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Histogram"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    metrics = DDTreeMetrics({"tp_rank": "0"})
    metrics.add(Counts(7, 8, 3, 2, False, 1), "1", Option(8))
    metrics.add(Counts(8, 8, 2, 3, True, 0), "0", Option(8, is_chain=True))
    lines = set(prometheus_client.generate_latest(registry).decode().splitlines())
    wanted = {
        'sglang:ddtree_steps_total{shape="tree",tp_rank="0",width="8"} 1.0',
        'sglang:ddtree_steps_total{shape="chain",tp_rank="0",width="8"} 1.0',
        'sglang:ddtree_nodes_built_total{tp_rank="0"} 15.0',
        'sglang:ddtree_nodes_verified_total{tp_rank="0"} 16.0',
        'sglang:ddtree_stops_total{depth="2",rank="1",tp_rank="0"} 1.0',
        'sglang:ddtree_stops_total{depth="1",rank="0",tp_rank="0"} 1.0',
        'sglang:ddtree_chain_longer_total{tp_rank="0"} 1.0',
        'sglang:ddtree_tree_accept_length_sum{tp_rank="0"} 5.0',
        'sglang:ddtree_tree_accept_length_bucket{le="2.0",tp_rank="0"} 1.0',
        'sglang:ddtree_chain_accept_length_sum{tp_rank="0"} 5.0',
        'sglang:ddtree_chain_accept_length_count{tp_rank="0"} 2.0',
    }
    assert wanted <= lines, wanted - lines


def test_ranks_are_told_from_no_candidate_and_from_the_drafts_end():
    report = DDTreeReport(Budget(), RANKS, None)
    request = Request("a", prompt_output=9)
    for rank in (0, RANKS, -1):
        report.add(request, Counts(8, 8, 4, 1, False, rank), Option(8))
    assert report.requests[request].stops == {"3:0": 1, f"3:{BEYOND}": 1, f"3:{LEAF}": 1}


def test_counting_needs_no_candidate_beyond_the_tree():
    """Fewer nodes than draft positions: only as many columns as can be committed are looked at."""
    ids = torch.arange(14).view(1, 7, 2)
    tree = ddtree_build(torch.tensor([1]), ids, torch.full((1, 7, 2), -0.5), 3)
    accepted = Acceptance(
        path=torch.tensor([[0, 1, 2]]), accept_len=torch.tensor([1], dtype=torch.int32),
        out_tokens=torch.tensor([[1, 0, 0]]), bonus=torch.tensor([1]),
    )  # fmt: skip
    counts = tree_count(tree, ids, torch.full((1, 7, 2), -0.5), accepted, 3, NO_OPTIONS)
    assert counts.tolist() == [[3, 3, 1, 1, 0, 1]]
