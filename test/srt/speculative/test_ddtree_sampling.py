# SPDX-License-Identifier: Apache-2.0
"""The target's token after each node: argmax, or what plain decoding draws at that position with that seed."""

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers.sampler import sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ddtree_sampling import adjust_logits, expand_sampling_info, target_tokens

BATCH, NODES, VOCAB = 2, 3, 50
FILTERS = {
    "none": dict(need_top_p_sampling=False, need_top_k_sampling=False),
    "top-p and top-k": {},
    "min-p": dict(
        need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=True, top_ps=torch.ones(2),
        top_ks=torch.tensor([VOCAB, VOCAB]), min_ps=torch.tensor([0.05, 0.3]),
    ),
}  # fmt: skip


def make_info(**fields):
    defaults = dict(
        temperatures=torch.tensor([[0.7], [1.3]]), top_ps=torch.tensor([0.8, 1.0]), top_ks=torch.tensor([50, 12]),
        min_ps=torch.zeros(2), is_all_greedy=False, is_any_greedy=False, need_top_p_sampling=True,
        need_top_k_sampling=True, need_min_p_sampling=False, vocab_size=VOCAB, device="cpu",
        sampling_seed=torch.tensor([11, 12]),
    )  # fmt: skip
    return SamplingBatchInfo(**(defaults | fields))


class Sampler:
    """Upstream's torch sampler, without the runtime that it is built from."""

    def _sample_from_probs(self, probs, info, positions, unfiltered):
        if unfiltered:
            return sampling_from_probs_torch(probs, info.sampling_seed, positions), None
        tokens = top_k_top_p_min_p_sampling_from_probs_torch(
            probs, info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling, info.sampling_seed, positions
        )
        return tokens, None


@pytest.fixture
def logits():
    return torch.randn(BATCH * NODES, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def test_greedy_takes_the_largest_logit(logits):
    tokens = target_tokens(logits, make_info(is_all_greedy=True), None, NODES, None)
    assert torch.equal(tokens, logits.argmax(-1).view(BATCH, NODES))


@pytest.mark.parametrize("filters", ["none", "top-p and top-k"])  # upstream's sampler takes no min-p with a seed
def test_a_seeded_node_draws_what_plain_decoding_draws_at_its_position(logits, filters):
    info = make_info(**FILTERS[filters])
    positions = torch.tensor([4, 5, 5, 9, 10, 11])
    before = logits.clone()
    tokens = target_tokens(logits, info, positions, NODES, Sampler())
    assert torch.equal(logits, before), "log-probabilities are taken from these logits later"
    for node in range(BATCH * NODES):
        row = node // NODES
        alone = make_info(
            temperatures=info.temperatures[row : row + 1], top_ps=info.top_ps[row : row + 1],
            top_ks=info.top_ks[row : row + 1], min_ps=info.min_ps[row : row + 1],
            sampling_seed=info.sampling_seed[row : row + 1],
        )  # fmt: skip
        probs = (logits[node : node + 1] / alone.temperatures).softmax(-1)
        drawn, _ = Sampler()._sample_from_probs(probs, alone, positions[node : node + 1], filters == "none")
        assert int(tokens.view(-1)[node]) == int(drawn)


@pytest.mark.parametrize("filters", FILTERS)
def test_without_a_seed_every_node_draws_from_its_own_distribution(logits, filters):
    """Chi-square against the exact probabilities at a level of 1e-3, 4000 draws a node, torch's generator fixed."""
    draws = 4000
    info = make_info(**FILTERS[filters] | {"sampling_seed": None})
    torch.manual_seed(0)
    counts = torch.zeros(BATCH * NODES, VOCAB)
    for _ in range(draws // 100):
        repeated = {name: getattr(info, name).repeat(100) for name in ("top_ps", "top_ks", "min_ps")}
        repeated |= {"temperatures": info.temperatures.repeat(100, 1), "sampling_seed": None}
        many = make_info(**FILTERS[filters] | repeated)
        tokens = target_tokens(logits.repeat(100, 1), many, None, NODES, Sampler()).view(100, BATCH * NODES)
        counts.scatter_add_(1, tokens.T, torch.ones(BATCH * NODES, 100))
    for node in range(BATCH * NODES):
        row = node // NODES
        limits = (VOCAB, 1.0) if filters == "none" else (int(info.top_ks[row]), float(info.top_ps[row]))
        exact = exact_distribution(logits[node] / info.temperatures[row], *limits, float(info.min_ps[row]))
        assert not counts[node][exact == 0].any(), "a token was drawn that the filters exclude"
        assert chi_square_p(counts[node], exact) > 1e-3, node


def exact_distribution(scaled, top_k, top_p, min_p):
    """Probabilities of the tokens that are among the top_k, before whom less than top_p is taken, and that have at
    least min_p of the most probable one's."""
    probs, order = scaled.double().softmax(-1).sort(descending=True)
    kept = (probs.cumsum(0) - probs <= top_p) & (torch.arange(VOCAB) < top_k) & (probs >= min_p * probs[0])
    return torch.zeros(VOCAB, dtype=torch.float64).scatter(0, order, probs * kept / (probs * kept).sum())


def chi_square_p(counts, exact):
    """Probability of counts at least this far from their means; tokens expected less than 5 times are one cell."""
    mean = exact * counts.sum()
    rare = mean < 5
    cells = [(counts[rare].sum(), mean[rare].sum())] if mean[rare].sum() > 0 else []
    cells += list(zip(counts[~rare], mean[~rare], strict=True))
    if len(cells) == 1:  # the filters left one token, and every draw is it
        return 1.0
    statistic = sum(float((count - m) ** 2 / m) for count, m in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def test_siblings_at_one_position_draw_the_same_number_from_their_own_distributions(logits):
    """Equal rows at equal positions give equal tokens: the draw depends on seed and position, not on the node."""
    same = logits.clone()
    same[1] = same[2]
    tokens = target_tokens(same, make_info(), torch.tensor([4, 5, 5, 9, 10, 11]), NODES, Sampler())
    assert tokens[0, 1] == tokens[0, 2]


def test_adjustments_are_those_of_plain_decoding(logits):
    generator = torch.Generator().manual_seed(1)
    additive, scaling, bias = (torch.rand(BATCH, VOCAB, generator=generator) + 0.5 for _ in range(3))
    info = make_info(acc_additive_penalties=additive, acc_scaling_penalties=scaling, logit_bias=bias)
    expected = logits.clone()
    for node in range(BATCH * NODES):
        one = expected[node : node + 1]
        row = slice(node // NODES, node // NODES + 1)
        alone = make_info(
            temperatures=info.temperatures[row], acc_additive_penalties=additive[row],
            acc_scaling_penalties=scaling[row], logit_bias=bias[row],
        )  # fmt: skip
        alone.apply_logits_bias(one)
    adjust_logits(logits, info, NODES, None)
    torch.testing.assert_close(logits, expected)


def test_without_overlap_the_penalizers_apply_themselves(logits):
    calls = []
    penalizers = SimpleNamespace(is_required=True, apply=lambda logits, repeat: calls.append((logits.shape, repeat)))
    adjust_logits(logits, make_info(penalizer_orchestrator=penalizers), NODES, None)
    assert calls == [(logits.shape, NODES)]


def test_the_grammar_comes_before_the_bias(logits):
    order = []
    mask = SimpleNamespace(apply=lambda logits: order.append(logits[0, 0].item()))
    first = logits[0, 0].item()
    adjust_logits(logits, make_info(logit_bias=torch.ones(BATCH, VOCAB)), NODES, mask)
    assert order == [first]
    assert logits[0, 0].item() == pytest.approx(first + 1)


def test_every_node_has_its_requests_parameters():
    info = expand_sampling_info(make_info(), NODES)
    assert info.top_ks.tolist() == [50] * NODES + [12] * NODES
    assert info.sampling_seed.tolist() == [11] * NODES + [12] * NODES
    assert info.temperatures.shape == (BATCH * NODES, 1)
    assert expand_sampling_info(make_info(sampling_seed=None), NODES).sampling_seed is None
