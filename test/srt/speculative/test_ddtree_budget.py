# SPDX-License-Identifier: Apache-2.0
"""How many nodes a step verifies: the decision by itself, and over simulated texts against chain and fixed trees."""

import heapq
import json
import math
import random
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.speculative import ddtree_costs
from sglang.srt.speculative.ddtree_budget import (
    COST_DOUBT,
    HYSTERESIS,
    MAX_LIMIT,
    AdaptiveBudget,
    CostTable,
    Decision,
    FixedBudget,
    Option,
    StepRow,
    bracket,
    choose_option,
    doubted,
    load_costs,
    monotone,
    options_up_to,
    parse_budget,
)

BLOCK = 8
OPTIONS = options_up_to(32, BLOCK)
WIDTHS = tuple(sorted({option.width for option in OPTIONS}))


def table(step_ms, node_ms=0.0, chain_ms=None, batch_sizes=(1,), contexts=(0,)):
    """The same time at every batch size and context."""
    widths = WIDTHS if chain_ms is None else (0, *WIDTHS)
    step = tuple(map(float, step_ms if chain_ms is None else [chain_ms, *step_ms]))
    plane = tuple(tuple(step for _ in contexts) for _ in batch_sizes)
    nodes = tuple(tuple(float(node_ms) for _ in contexts) for _ in batch_sizes)
    return CostTable(batch_sizes=batch_sizes, contexts=contexts, widths=widths, step_ms=plane, node_ms=nodes)


def test_options_start_with_the_chain_and_end_with_the_widest_tree():
    def described(num_nodes, block):
        return [(o.width, o.is_chain) for o in options_up_to(num_nodes, block)]

    assert described(32, 8) == [(8, True), (4, False), (8, False), (16, False), (32, False)]
    assert described(48, 8) == [(8, True), (4, False), (8, False), (16, False), (32, False), (48, False)]
    assert described(8, 8) == [(8, True), (4, False), (8, False)]
    assert described(2, 2) == [(2, True), (2, False)]


positive = st.floats(0.01, 100)
amounts = st.lists(st.tuples(st.floats(1, 1000), positive), min_size=2, max_size=7)


@settings(deadline=None)
@given(pairs=amounts, data=st.data())
def test_the_choice_is_never_worse_than_the_chain_nor_the_best_but_by_the_hysteresis(pairs, data):
    tokens, costs = zip(*pairs, strict=True)
    current = data.draw(st.integers(0, len(pairs) - 1))
    chosen = choose_option(tokens, costs, current)
    believed = [t / c for t, c in zip(tokens, doubted(costs), strict=True)]
    believed[0] *= HYSTERESIS
    assert believed[chosen] * HYSTERESIS >= max(believed)
    assert chosen == current or believed[chosen] == max(believed)
    assert chosen == 0 or believed[chosen] > believed[0], "a tree stays that is no better than the chain"
    assert all(cost <= more <= cost + COST_DOUBT * costs[0] for cost, more in zip(costs, doubted(costs), strict=True))
    # It is the same wherever it is computed, and it does not flip back.
    assert choose_option(tokens, costs, chosen) == chosen


@settings(deadline=None)
@given(
    axis=st.lists(st.integers(0, 10**6), min_size=1, max_size=6, unique=True).map(sorted), value=st.integers(0, 10**6)
)
def test_bracket(axis, value):
    below, above, share = bracket(axis, value)
    assert 0 <= share <= 1 and 0 <= below <= above < len(axis)
    between = axis[below] * (1 - share) + axis[above] * share
    assert between == pytest.approx(min(max(value, axis[0]), axis[-1]))


def test_costs_between_points_are_linear_and_beyond_them_the_edge():
    costs = CostTable(
        batch_sizes=(1, 5), contexts=(100, 200), widths=(4, 8),
        step_ms=(((1.0, 2.0), (3.0, 4.0)), ((5.0, 6.0), (7.0, 8.0))), node_ms=((0.0, 1.0), (2.0, 3.0)),
    )  # fmt: skip
    costs.check([Option(4), Option(8, is_chain=True)])
    four, eight, chain = Option(4), Option(8), Option(8, is_chain=True)
    assert costs.step(1, 100, four) == 1.0 and costs.step(1, 150, eight) == 3.0 and costs.step(3, 100, four) == 3.0
    assert costs.step(3, 150, eight) == 5.0 and costs.step(100, 10**6, eight) == 8.0 and costs.step(1, 0, eight) == 2.0
    assert costs.node(3, 150) == 1.5 and costs.step(3, 150, chain) == 5.0
    of_chain = CostTable(
        batch_sizes=(1,), contexts=(0,), widths=(0, 4), step_ms=(((1.5, 2.0),),), node_ms=((0.0,),)
    )  # fmt: skip
    of_chain.check([four, chain])
    assert (of_chain.step(1, 0, chain), of_chain.step(1, 0, four)) == (1.5, 2.0)
    with pytest.raises(ValueError, match=r"it has widths \[0, 4\], and this server also verifies \[8\]"):
        of_chain.check([eight])


FOUR_AND_EIGHT = [Option(4), Option(8)]
TABLE = dict(batch_sizes=[1], contexts=[0], widths=[4, 8], step_ms=[[[1.0, 2.0]]], node_ms=[[0.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(widths=[8, 4]), r"widths must ascend from 0 or more, got \(8, 4\)"),
        (dict(contexts=[]), "contexts must ascend"),
        (dict(batch_sizes=[-1]), "batch_sizes must ascend"),
        (dict(step_ms=[[[1.0]]]), r"step_ms must be \[batch size\]\[context\]\[width\]"),
        (dict(node_ms=[[0.0], [0.0]]), r"node_ms \[batch size\]\[context\], of the sizes"),
        (dict(step_ms=[[[0.0, 2.0]]]), "step_ms above 0"),
        (dict(node_ms=[[-1.0]]), "node_ms not below it"),
        (dict(widths=[4, 9]), r"it has widths \[4, 9\], and this server also verifies \[8\]"),
        (dict(width=[4]), "no cost table in .*width"),
        (dict(step_ms=[[["fast", 2.0]]]), "no cost table in .*step_ms"),
    ],
)
def test_mistakes_in_a_cost_table_are_named(tmp_path, change, message):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(TABLE))
    load_costs(str(file)).check(FOUR_AND_EIGHT)
    file.write_text(json.dumps(TABLE | change))
    with pytest.raises(ValueError, match=message):
        load_costs(str(file)).check(FOUR_AND_EIGHT)


def test_parse_budget():
    assert parse_budget(None, 16) == 16 and parse_budget("auto", 16) is None and parse_budget("16", 16) == 16
    for wrong in ("1", "17", "-4", "", "8.5", "AUTO"):
        with pytest.raises(ValueError, match="^DDTREE.*--speculative-ddtree-budget"):
            parse_budget(wrong, 16)


def test_a_narrower_step_is_not_taken_for_slower():
    assert monotone([1.0, 3.0, 2.0, 4.0]) == (1.0, 2.0, 2.0, 4.0)


@pytest.mark.parametrize("block", [8, 7])  # no tree has 7 nodes
def test_the_chain_is_timed_apart_and_is_not_taken_for_slower_than_a_wider_tree(monkeypatch, block):
    options = options_up_to(32, block)
    trees = {option: 10.0 + option.width / 8 for option in options[1:]}
    chain_ms = iter([9.0, 50.0])  # the second time something else ran beside it

    def time_steps(worker, batch_size, context, kinds):
        *whole, root = kinds
        assert [kind.option for kind in whole] == list(options) and root == Decision(options[-1], min_log_prob=1.0)
        return [next(chain_ms), *trees.values(), 12.0]

    monkeypatch.setattr(ddtree_costs, "time_steps", time_steps)
    config = SimpleNamespace(context_len=4096)
    runner = SimpleNamespace(max_running_requests=9, model_config=config)
    costs = ddtree_costs.measure(SimpleNamespace(device="cpu", model_runner=runner), options)
    costs.check(options)
    assert costs.step(1, 256, options[0]) == 9.0
    assert costs.step(8, 256, options[0]) == min(ms for option, ms in trees.items() if option.width >= block)
    assert all(costs.step(1, 256, option) == ms for option, ms in trees.items())
    assert costs.node(1, 256) == pytest.approx(2.0 / 31) and costs.node(8, 256) == pytest.approx(2.0 / 31 / 8)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (48, [1, 4, 16, 48]), (255, [1, 4, 16, 64, 255]), (256, [1, 4, 16, 64, 256]),
                        (300, [1, 4, 16, 64, 256])]
)  # fmt: skip
def test_the_largest_batch_is_timed(monkeypatch, most, sizes):
    """Beyond the largest one that was timed a batch would cost what a smaller one does."""
    monkeypatch.setattr(ddtree_costs, "time_steps", lambda worker, batch_size, context, kinds: [1.0] * len(kinds))
    runner = SimpleNamespace(max_running_requests=most, model_config=SimpleNamespace(context_len=40_000))
    costs = ddtree_costs.measure(SimpleNamespace(device="cuda", model_runner=runner), options_up_to(32, 8))
    assert list(costs.batch_sizes) == sizes and costs.contexts == (256, 4096, 32768)


def row(gains, drafts=1, chain_drafts=1, rid="a", **more):
    return StepRow(rid=rid, gains=gains, drafts=drafts, chain_drafts=chain_drafts, chain_is_open=False, **more)


def test_nodes_that_cost_more_than_they_bring_are_left_out():
    """A step commits 3 tokens in 10 ms; a node of 1 ms has to bring 0.3 of a token."""
    budget = AdaptiveBudget(OPTIONS, table([10] * len(WIDTHS), node_ms=1.0))
    gains = (1.0, 1.0, 1.5, 1.8, 2.0)
    budget.learn(Option(8), [row(gains, drafts=1.5, chain_drafts=1.0)])
    decision = budget.choose(["a"], 0)
    assert decision.option == Option(32)
    assert decision.min_log_prob == pytest.approx(math.log(0.3))
    dear = AdaptiveBudget(OPTIONS, table([10] * len(WIDTHS), node_ms=100.0))
    dear.learn(Option(8), [row(gains, drafts=1.5, chain_drafts=1.0)])
    assert dear.choose(["a"], 0).min_log_prob == MAX_LIMIT
    free = AdaptiveBudget(OPTIONS, table([10] * len(WIDTHS)))
    free.learn(Option(8), [row(gains, drafts=1.5, chain_drafts=1.0)])
    assert free.choose(["a"], 0).min_log_prob == -math.inf


def test_requests_are_forgotten():
    budget = AdaptiveBudget(OPTIONS, table([10] * len(WIDTHS)))
    gains = (1.0, 1.0, 1.5, 1.8, 2.0)
    budget.learn(Option(8), [row(gains, rid="a"), row(gains, rid="b"), row(gains, rid="c", is_last=True)])
    assert set(budget.curves) == {"a", "b"}
    budget.forget("a")
    budget.forget("never seen")
    budget.learn(Option(8), [row(gains, rid="b", is_last=True)])
    assert not budget.curves


def test_the_mix_of_requests_decides():
    """Two requests of unlike texts, each alone and together, at a cost that grows with the width."""
    costs = table([10, 10, 12, 30])
    budget = AdaptiveBudget(OPTIONS, costs)
    wide, narrow = (2.0, 1.0, 2.0, 2.5, 12.0), (1.0, 0.9, 1.0, 1.05, 1.1)
    for _ in range(40):
        budget.learn(Option(8), [row(wide, 2.0, 2.0, "wide"), row(narrow, 1.0, 1.0, "narrow")])
    assert budget.choose(["wide"], 0).option.width == 32
    assert budget.choose(["narrow"], 0).option.width <= 8
    assert budget.choose(["wide"] + ["narrow"] * 9, 0).option.width <= 8


# Simulated texts. A text has, for each depth, the probabilities of the ranks; the drafter tells them sharpened or
# flattened, so that what it promises is not what happens.

RANKS = 4


def text(head, sharpen=1.0, decay=0.5):
    """head: probability of the best candidate. -> (true probabilities, told ones), by rank"""
    rest = [decay**r for r in range(RANKS - 1)]
    true = [head, *((1 - head) * 0.9 * r / sum(rest) for r in rest)]
    told = [p**sharpen for p in true]
    return true, [p / (sum(told) / sum(true)) for p in told]


TEXTS = {
    "copied": text(0.97),
    "code": text(0.75),
    "branching": text(0.45, decay=0.8),
    "prose": text(0.2),
    "told too sure": text(0.4, sharpen=2.0),
    "told too unsure": text(0.7, sharpen=0.5),
}
COSTS = {
    "rows are free": [10, 10, 10, 10],
    "rows cost a little": [10, 10.2, 10.8, 12],
    "rows are all there is": [4, 8, 16, 32],
    "a step, then rows": [12, 16, 24, 40],
    "a tree costs more than a chain": [10, 10, 10, 10, 9.4],  # the last one is the chain's
}


def table_of(cost):
    steps = COSTS[cost]
    return table(steps[: len(WIDTHS)], chain_ms=steps[-1] if len(steps) > len(WIDTHS) else None)


@cache
def trees_of(name):
    """By width: the set of rank paths, best first by what the drafter tells, and its promise."""
    told = TEXTS[name][1]
    heap, paths = [(-told[0], (0,))], []
    while len(paths) < WIDTHS[-1] - 1:
        weight, path = heapq.heappop(heap)
        paths.append((path, -weight))
        if path[-1] + 1 < RANKS:
            heapq.heappush(heap, (weight / told[path[-1]] * told[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < BLOCK - 1:
            heapq.heappush(heap, (weight * told[0], (*path, 0)))
    trees = {w: ({p for p, _ in paths[: w - 1]}, sum(x for _, x in paths[: w - 1])) for w in WIDTHS}
    chain = {(0,) * d for d in range(1, BLOCK)}
    return trees, (chain, sum(told[0] ** d for d in range(1, BLOCK)))


def promises(name):
    trees, chain = trees_of(name)
    return tuple(chain[1] if o.is_chain else trees[o.width][1] for o in OPTIONS)


def accept(paths, truth):
    length = 0
    while length < len(truth) and tuple(truth[: length + 1]) in paths:
        length += 1
    return length


def simulate(names, costs, steps, seed=0, lag=2):
    """-> tokens per millisecond of: the adaptive budget, the chain, the best fixed tree. names(i): text of step i."""
    rng = random.Random(seed)
    budget, pending = AdaptiveBudget(OPTIONS, costs), []
    ours, fixed = [0.0, 0.0], {option: [0.0, 0.0] for option in OPTIONS}
    for i in range(steps):
        name = names(i)
        true = TEXTS[name][0]
        # RANKS = none of the candidates
        truth = rng.choices(range(RANKS + 1), [*true, 1 - sum(true)], k=BLOCK - 1)
        trees, chain = trees_of(name)
        drafts = {o: accept(chain[0] if o.is_chain else trees[o.width][0], truth) for o in OPTIONS}
        option = budget.choose(["a"], 0).option
        for totals, taken in [(ours, option), *((fixed[o], o) for o in OPTIONS)]:
            totals[0] += 1 + drafts[taken]
            totals[1] += costs.step(1, 0, taken)
        chain_drafts = drafts[OPTIONS[0]]
        length = drafts[option] + 1  # what is committed tells no more of the chain
        is_open = chain_drafts >= length and length < BLOCK - 1
        result = StepRow("a", promises(name), drafts[option], min(chain_drafts, length), is_open)
        pending.append((option, [result] if budget.learns(option) else []))
        if len(pending) >= lag:  # counts arrive after the next step was chosen
            budget.learn(*pending.pop(0))
    rates = {option: tokens / ms for option, (tokens, ms) in fixed.items()}
    return ours[0] / ours[1], rates[OPTIONS[0]], max(rates.values())


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", TEXTS)
def test_never_two_per_cent_slower_than_the_chain(name, cost):
    adaptive, chain, best = simulate(lambda i: name, table_of(cost), steps=1500)
    assert adaptive >= 0.98 * chain
    # What it costs to doubt the costs, where they are right.
    assert adaptive >= 0.88 * best, "a fixed tree is better"


@pytest.mark.parametrize("cost", COSTS)
def test_texts_that_change_are_followed(cost):
    """A text of another kind every 100 steps: as a whole still not slower than the chain."""
    kinds = list(TEXTS)
    adaptive, chain, _ = simulate(lambda i: kinds[i // 100 % len(kinds)], table_of(cost), steps=2400, seed=1)
    assert adaptive >= 0.98 * chain


def test_a_chain_tells_once_in_a_few_steps():
    budget, (chain, tree, *_) = AdaptiveBudget(OPTIONS, table(COSTS["rows are free"])), OPTIONS
    assert [budget.learns(chain) for _ in range(9)] == [True, False, False, False] * 2 + [True]
    assert [budget.learns(option) for option in (tree, tree, chain, chain)] == [True, True, True, False]
    assert not FixedBudget(8).learns(Option(8))


def test_what_was_learnt_of_trees_fades_while_the_chain_is_verified():
    """Else trees that once promised too much would never be tried again."""
    budget = AdaptiveBudget(OPTIONS, table(COSTS["rows are free"]))
    gains = (2.0, 2.0, 2.0, 4.0, 5.0)
    for _ in range(60):
        budget.learn(Option(32), [row(gains, drafts=1.0, chain_drafts=2.0)])
    assert budget.more.factor < 0.5 and budget.choose(["a"], 0).option.is_chain
    for _ in range(400):
        budget.learn(OPTIONS[0], [row(gains, drafts=2.0, chain_drafts=2.0)])
    assert budget.more.factor > 0.9 and not budget.choose(["a"], 0).option.is_chain


def test_a_chain_that_promises_too_much_is_believed_less():
    budget = AdaptiveBudget(OPTIONS, table(COSTS["rows are free"]))
    for _ in range(100):
        budget.learn(OPTIONS[0], [row((4.0, 3.0, 4.0, 4.0, 4.0), drafts=2.0, chain_drafts=2.0)])
    assert budget.chain.factor == pytest.approx(0.5, abs=0.03)


def test_branching_pays_where_rows_are_free():
    adaptive, chain, _ = simulate(lambda i: "branching", table(COSTS["rows are free"]), steps=1000)
    assert adaptive > 1.2 * chain


def test_equal_inputs_give_equal_decisions():
    """Ranks decide for themselves, from numbers that they share."""
    costs = table(COSTS["a step, then rows"], node_ms=0.01)
    first, second = AdaptiveBudget(OPTIONS, costs), AdaptiveBudget(OPTIONS, costs)
    rng = random.Random(5)
    for _ in range(300):
        name = rng.choice(list(TEXTS))
        rids = rng.sample("abcdef", 3)
        decisions = [budget.choose(rids, 1000) for budget in (first, second)]
        assert decisions[0] == decisions[1]
        rows = [row(promises(name), rng.randrange(8), rng.randrange(8), rid) for rid in rids]
        for budget in (first, second):
            budget.learn(decisions[0].option, rows)
