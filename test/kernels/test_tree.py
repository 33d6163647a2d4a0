# SPDX-License-Identifier: Apache-2.0
"""Trees: the builder against a heap on the host, acceptance against a walk, masks against bits."""

import heapq

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels.cases import encode_mask, make_tree
from kernels.sheets import KINDS, in_order, score_sheet

from sgl_kernel_sm120 import (
    DraftTree,
    MaskLayout,
    ddtree_build,
    pack_tree_mask,
    tree_accept,
    tree_count,
    tree_links,
    tree_visibility,
    unpack_tree_mask,
)
from sgl_kernel_sm120.tree import NUM_COUNTS

VOCABULARY = 5000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def heap_paths(log_probs, budget):
    """The `budget` best rank paths, best first, by popping a heap: (-weight, depth, path). Sums are fp32, root down."""
    depths, k = log_probs.shape
    heap, best = [], []

    def push(above, path):
        step = log_probs[len(path) - 1, path[-1]]
        if step > -numpy.inf:
            heapq.heappush(heap, (-numpy.float32(above + step), len(path), path, above))

    if depths:
        push(numpy.float32(0), (0,))
    while heap and len(best) < budget:
        weight, depth, path, above = heapq.heappop(heap)
        best.append(path)
        if path[-1] + 1 < k:
            push(above, (*path[:-1], path[-1] + 1))
        if depth < depths:
            push(-weight, (*path, 0))
    return best


def check_against_heap(log_probs, num_nodes, seed=0, device="cpu"):
    """Everything that DraftTree promises, for a batch of log-probabilities [b, D, K]."""
    b, depths, k = log_probs.shape
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(b, depths, VOCABULARY, generator=generator).argsort(dim=-1)[..., :k]
    root = torch.randint(0, VOCABULARY, (b,), generator=generator)
    tree = ddtree_build(root.to(device), ids.to(device), log_probs.to(device), num_nodes)
    tree = DraftTree(*(t.cpu() for t in tree))
    for r in range(b):
        # Breadth-first: by depth, then lexicographic.
        paths = [()] + sorted(heap_paths(log_probs[r].numpy(), num_nodes - 1), key=lambda p: (len(p), p))
        used, n = len(paths), num_nodes
        number = {path: i for i, path in enumerate(paths)}
        tokens = [int(root[r])] + [int(ids[r, len(p) - 1, p[-1]]) for p in paths[1:]]
        parents = [-1] + [number[p[:-1]] for p in paths[1:]]
        assert int(tree.used[r]) == used
        assert tree.tokens[r].tolist() == tokens + [int(root[r])] * (n - used)
        assert tree.parents[r].tolist() == parents + [-2] * (n - used)
        assert tree.depth[r].tolist() == [len(p) for p in paths] + [0] * (n - used)
        children = [[j for j in range(1, used) if parents[j] == i] for i in range(n)]
        following = {j: c[c.index(j) + 1] for c in children for j in c[:-1]}
        assert tree.first_child[r].tolist() == [c[0] if c else -1 for c in children]
        assert tree.next_sibling[r].tolist() == [following.get(j, -1) for j in range(n)]
        sees = [{number[p[:d]] for d in range(len(p) + 1)} for p in paths] + [{i} for i in range(used, n)]
        assert [set(row.nonzero().flatten().tolist()) for row in tree.visible[r]] == sees
        weights = [weight_of(log_probs[r], path) for path in heap_paths(log_probs[r].numpy(), num_nodes - 1)]
        assert tree.path_log_probs[r].tolist() == [0.0, *weights] + [-torch.inf] * (n - used)
    return tree


def weight_of(log_probs, path):
    weight = torch.zeros(())
    for depth, rank in enumerate(path):
        weight = weight + log_probs[depth, rank]
    return float(weight)


@st.composite
def score_sheets(draw, max_depth=15, max_k=64):
    """[b, D, K], best first; smooth, or of few values (ties within and between depths), or with -inf tails."""
    b, depths, k = draw(st.integers(1, 3)), draw(st.integers(1, max_depth)), draw(st.integers(1, max_k))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = -torch.rand(b, depths, k, generator=generator) * draw(st.sampled_from([0.01, 1.0, 8.0]))
    if draw(st.booleans()):
        scores = (scores * 4).round() / 4
    if draw(st.booleans()):
        scores[torch.rand(b, depths, k, generator=generator) < 0.3] = -torch.inf
    return scores.sort(dim=-1, descending=True).values + 0.0  # no -0.0


@settings(deadline=None, max_examples=120)
@given(scores=score_sheets(), num_nodes=st.integers(1, 64))
@example(scores=torch.zeros(2, 3, 4), num_nodes=20)
@example(scores=torch.full((1, 3, 4), -torch.inf), num_nodes=9)
def test_builder_equals_heap(scores, num_nodes):
    check_against_heap(scores, num_nodes)


@settings(deadline=None, max_examples=10)
@given(scores=score_sheets(max_depth=31), num_nodes=st.integers(65, 128))
def test_builder_equals_heap_at_its_limits(scores, num_nodes):
    check_against_heap(scores, num_nodes)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_builder_is_exact_where_fp32_sums_collide(data):
    """Steps of very different size: different parents, equal rounded sums."""
    depths, k = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    step = st.sampled_from([0.0, -1e-9, -3e-8, -6e-8, -1.0, -1.0000001, -16.0])
    scores = torch.tensor([[data.draw(st.lists(step, min_size=k, max_size=k)) for _ in range(depths)]])
    check_against_heap(scores.sort(dim=-1, descending=True).values + 0.0, data.draw(st.integers(2, 40)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depths, k, n", [(3, 4, 15), (4, 3, 40), (7, 8, 33), (5, 12, 64)])
def test_builder_equals_heap_on_hostile_sheets(depths, k, n, kind):
    scores = score_sheet(torch.Generator().manual_seed(n), 12, depths, k, kind)
    ids = torch.arange(scores.numel()).view_as(scores)
    tree = ddtree_build(torch.full((12,), 7), ids, scores, n)
    for r in range(12):
        sheet = in_order(scores[r])
        paths = heap_paths(sheet.numpy(), n - 1)
        assert tree.path_log_probs[r, 1 : len(paths) + 1].tolist() == [weight_of(sheet, path) for path in paths]
        real = [ids[r, d][scores[r, d] > -torch.inf].tolist() for d in range(depths)]
        last = sorted((len(path), *path) for path in paths)
        assert tree.tokens[r, 1 : len(paths) + 1].tolist() == [real[d - 1][path[-1]] for d, *path in last]
        assert int(tree.used[r]) == len(paths) + 1


@settings(deadline=None, max_examples=60)
@given(scores=score_sheets(max_depth=6, max_k=8), n=st.integers(1, 20), more=st.integers(0, 20), data=st.data())
def test_a_limit_cuts_the_least_probable_nodes_and_more_paths_change_no_node(scores, n, more, data):
    """A limit gives the tree of as many nodes as are above it; the weights of what is beyond are still told."""
    b, depths, k = scores.shape
    ids, root = torch.arange(b * depths * k).view(b, depths, k), torch.full((b,), 7)
    limit = data.draw(st.sampled_from([*scores[0].flatten().tolist(), -0.5, -2.0, 0.0, -torch.inf]))
    whole = ddtree_build(root, ids, scores, n + more)
    tree = ddtree_build(root, ids, scores, n, min_log_prob=limit, num_paths=n + more)
    assert torch.equal(tree.path_log_probs, whole.path_log_probs)
    for r in range(b):
        weights = whole.path_log_probs[r, 1:n]
        count = 1 + int(((weights >= limit) & (weights > -torch.inf)).sum())
        assert int(tree.used[r]) == count
        small = ddtree_build(root[r : r + 1], ids[r : r + 1], scores[r : r + 1], count)
        assert torch.equal(tree.tokens[r, :count], small.tokens[0])
        assert torch.equal(tree.parents[r, :count], small.parents[0])
        assert torch.equal(tree.visible[r, :count, :count], small.visible[0])
        assert (tree.parents[r, count:] == -2).all() and (tree.tokens[r, count:] == 7).all()
        assert torch.equal(tree.visible[r, count:], torch.eye(n, dtype=torch.bool)[count:])


SIZES = [(1, 7, 4), (1, 0, 4), (5, 0, 4), (128, 31, 64), (2, 1, 1), (128, 1, 1), (33, 7, 8)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_nodes, depths, k", SIZES)
def test_builder_corner_sizes(num_nodes, depths, k, device):
    scores = -torch.rand(2, depths, k, generator=torch.Generator().manual_seed(3))
    for sheet in (scores, (scores * 4).round() / 4):
        tree = check_against_heap(sheet.sort(dim=-1, descending=True).values + 0.0, num_nodes, device=device)
    if num_nodes == 1 or depths == 0:
        assert tree.used.tolist() == [1, 1], "the root alone"


@pytest.mark.parametrize("device", DEVICES)
def test_builder_takes_256_requests(device):
    scores = -torch.rand(256, 7, 8, generator=torch.Generator().manual_seed(4))
    check_against_heap(scores.sort(dim=-1, descending=True).values, 16, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "b, depths, k, n",
    [
        (256, 7, 32, 32),
        (256, 7, 15, 16),
        (32, 15, 63, 64),
        (8, 31, 64, 128),
        (256, 3, 4, 15),
        (256, 5, 3, 47),
        (64, 4, 9, 127),
    ],
)
def test_builder_equals_cpu_on_gpu(b, depths, k, n, kind):
    """All outputs, bit for bit; with a limit, with more paths than nodes; and again, as a race is not always lost."""
    generator = torch.Generator().manual_seed(n)
    scores = score_sheet(generator, b, depths, k, kind)
    ids = torch.randint(0, 2**40, (b, depths, k), generator=generator)
    root = torch.randint(0, 2**40, (b,), generator=generator)
    on_gpu = [t.cuda() for t in (root, ids, scores)]
    for limit, num_paths in [(-torch.inf, n), (-3.0, 128)]:
        want = ddtree_build(root, ids, scores, n, min_log_prob=limit, num_paths=num_paths)
        for _ in range(20):
            got = ddtree_build(*on_gpu, n, min_log_prob=limit, num_paths=num_paths)
            for name, g, w in zip(want._fields, got, want, strict=True):
                assert torch.equal(g.cpu(), w), (name, limit)


@pytest.mark.gpu
def test_tree_step_replays_in_a_graph():
    """Build and accept are captured once; a replay sees new scores and new targets."""
    b, depths, k, n = 4, 7, 8, 33
    generator = torch.Generator().manual_seed(9)
    sheets = [-torch.rand(b, depths, k, generator=generator).sort(dim=-1).values for _ in range(3)]
    ids = torch.randint(0, 50, (b, depths, k), generator=generator).cuda()
    root = torch.arange(b).cuda()
    scores, targets = sheets[0].cuda(), torch.zeros(b, n, dtype=torch.int64, device="cuda")

    def step():
        tree = ddtree_build(root, ids, scores, n)
        return tree, tree_accept(tree.tokens, tree.parents, targets, depths + 1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree, accepted = step()
    for sheet in sheets:
        scores.copy_(sheet)
        want_tree = ddtree_build(root.cpu(), ids.cpu(), sheet, n)
        # The target wants the first child of every node that has one.
        wanted = want_tree.tokens.gather(1, want_tree.first_child.clamp(min=0).long())
        targets.copy_(wanted)
        graph.replay()
        want = tree_accept(want_tree.tokens, want_tree.parents, wanted, depths + 1)
        assert int(want.accept_len.min()) > 1
        assert all(torch.equal(g.cpu(), w) for g, w in zip(tree, want_tree, strict=True))
        assert all(torch.equal(g.cpu(), w) for g, w in zip(accepted, want, strict=True))


def test_padded_vocabulary_never_becomes_a_node():
    """-inf and NaN columns stay out even where budget is left over."""
    scores = torch.tensor([[[-0.5, -torch.inf, -torch.inf], [-0.1, torch.nan, -torch.inf]]])
    tree = ddtree_build(torch.tensor([7]), torch.arange(6).view(1, 2, 3), scores, 12)
    assert int(tree.used) == 3
    assert tree.tokens[0, :3].tolist() == [7, 0, 3]
    assert tree.parents[0].tolist() == [-1, 0, 1] + [-2] * 9


def test_of_equal_weights_the_shorter_path_wins_then_the_smaller_ranks():
    scores = torch.tensor([[[-1.0, -1.0, -2.0], [0.0, -1.0, -1.0]]])
    tree = ddtree_build(torch.tensor([0]), torch.arange(1, 7).view(1, 2, 3), scores, 5)
    # -1: (0), (1), then (0, 0), (1, 0) at -1 too; everything else is at -2.
    assert tree.tokens[0].tolist() == [0, 1, 2, 4, 4]
    tree = ddtree_build(torch.tensor([0]), torch.arange(1, 7).view(1, 2, 3), scores, 7)
    # At -2: the shorter (2), then of (0, 1), (0, 2), (1, 1), ... the first.
    assert tree.tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 4]


def random_parents(n, generator):
    parents = [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, n)]
    return torch.tensor([parents], dtype=torch.int32)


def walk(tokens, parents, target, max_len):
    """The definition of acceptance for one tree, in lists."""
    path = [0]
    while len(path) < max_len:
        matches = [j for j, p in enumerate(parents) if p == path[-1] and tokens[j] == target[path[-1]]]
        if not matches:
            break
        path.append(matches[0])
    return path


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 64),
    alphabet=st.integers(1, 6),
    max_len=st.integers(1, 20),
    unused=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_acceptance_equals_walk(n, alphabet, max_len, unused, seed):
    generator = torch.Generator().manual_seed(seed)
    b = 3
    tokens, targets = (torch.randint(0, alphabet, (b, n), generator=generator) for _ in range(2))
    parents = torch.cat([random_parents(n, generator) for _ in range(b)])
    parents[:, max(n - unused, 1) :] = -2
    got = tree_accept(tokens, parents, targets, max_len)
    for r in range(b):
        path = walk(tokens[r].tolist(), parents[r].tolist(), targets[r].tolist(), max_len)
        committed = [int(tokens[r, i]) for i in path[1:]] + [int(targets[r, path[-1]])]
        rest = max_len - len(path)
        assert int(got.accept_len[r]) == len(path)
        assert got.path[r].tolist() == path + list(range(len(path), max_len))
        assert got.out_tokens[r].tolist() == committed + [0] * rest
        assert int(got.bonus[r]) == committed[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("n, alphabet, max_len", [(1, 2, 4), (64, 3, 8), (128, 2, 64)])
def test_tree_acceptance_equals_cpu_on_gpu(n, alphabet, max_len):
    generator = torch.Generator().manual_seed(n)
    tokens, targets = (torch.randint(0, alphabet, (256, n), generator=generator) for _ in range(2))
    parents = torch.cat([random_parents(n, generator) for _ in range(256)])
    want = tree_accept(tokens, parents, targets, max_len)
    got = tree_accept(tokens.cuda(), parents.cuda(), targets.cuda(), max_len)
    for name, g, w in zip(want._fields, got, want, strict=True):
        assert torch.equal(g.cpu(), w), name


def test_root_only_tree_commits_the_bonus():
    tree = ddtree_build(torch.tensor([5, 6]), torch.zeros(2, 3, 2, dtype=torch.int64), torch.zeros(2, 3, 2), 1)
    got = tree_accept(tree.tokens, tree.parents, torch.tensor([[8], [9]]), 4)
    assert got.accept_len.tolist() == [1, 1] and got.bonus.tolist() == [8, 9]
    assert got.out_tokens.tolist() == [[8, 0, 0, 0], [9, 0, 0, 0]]
    assert got.path.tolist() == [[0, 1, 2, 3]] * 2


def test_unused_nodes_are_never_accepted():
    """They carry the root's token; the target wants that token everywhere."""
    tree = ddtree_build(torch.tensor([5]), torch.tensor([[[4]]]), torch.tensor([[[-1.0]]]), 6)
    got = tree_accept(tree.tokens, tree.parents, torch.full((1, 6), 5), 6)
    assert got.accept_len.tolist() == [1]


def context_target(tokens, parents, seed, alphabet):
    """A target whose token after a node depends on the node's whole path of tokens."""
    contexts = [()]
    for i in range(1, len(tokens)):
        contexts.append((*contexts[parents[i]], tokens[i]) if parents[i] >= 0 else (i,))
    return torch.tensor([[hash((seed, c)) % alphabet for c in contexts]])


@settings(deadline=None, max_examples=100)
@given(scores=score_sheets(max_depth=6, max_k=4), num_nodes=st.integers(1, 20), seed=st.integers(0, 1000))
def test_a_larger_budget_never_shortens_acceptance(scores, num_nodes, seed):
    ids = torch.arange(scores.shape[2]).expand(1, scores.shape[1], -1)
    lengths = []
    for n in (num_nodes, num_nodes + 1, num_nodes + 5):
        tree = ddtree_build(torch.zeros(1, dtype=torch.int64), ids, scores[:1], n)
        target = context_target(tree.tokens[0].tolist(), tree.parents[0].tolist(), seed, scores.shape[2])
        lengths.append(int(tree_accept(tree.tokens, tree.parents, target, n).accept_len))
    assert lengths == sorted(lengths)


@settings(deadline=None, max_examples=100)
@given(n=st.integers(2, 24), seed=st.integers(0, 2**31))
def test_adding_a_sibling_never_shortens_acceptance(n, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(n, generator)
    tokens = torch.arange(n).view(1, n)  # siblings differ
    sibling_of = int(torch.randint(1, n, (), generator=generator))
    more_parents = torch.cat([parents, parents[:, sibling_of : sibling_of + 1]], 1)
    more_tokens = torch.cat([tokens, torch.tensor([[n]])], 1)
    target = torch.randint(0, n + 1, (1, n + 1), generator=generator)
    chosen = torch.where(torch.rand(n, generator=generator) < 0.7, torch.arange(n), -1)
    for node, parent in enumerate(parents[0].tolist()):
        if parent >= 0 and chosen[node] >= 0:
            target[0, parent] = node
    before = tree_accept(tokens, parents, target[:, :n], n).accept_len
    after = tree_accept(more_tokens, more_parents, target, n + 1).accept_len
    assert int(after) >= int(before)


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_links_and_visibility_of_trees_in_any_node_order(n, seed):
    """Trees of other builders too, where siblings are not neighbours."""
    parents = random_parents(n, torch.Generator().manual_seed(seed))
    first, following = tree_links(parents)
    listed = parents[0].tolist()
    for i in range(n):
        children = [j for j in range(n) if listed[j] == i]
        found, at = [], int(first[0, i])
        while at >= 0:
            found.append(at)
            at = int(following[0, at])
        assert found == children
        ancestors, at = {i}, listed[i]
        while at >= 0:
            ancestors.add(at)
            at = listed[at]
        assert set(tree_visibility(parents, n)[0, i].nonzero().flatten().tolist()) == ancestors


@pytest.mark.parametrize("device", DEVICES)
def test_pack_every_width(device):
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 129):
        visible = torch.rand(3, n, n, generator=generator) < 0.5
        visible[1], visible[2] = True, False
        want, _ = encode_mask(visible, [0] * 3, MaskLayout.BITS)
        for kind in (torch.bool, torch.uint8):
            given = visible.to(device) if kind == torch.bool else visible.to(device, kind) * 255
            words = pack_tree_mask(given)
            assert torch.equal(words.cpu(), want), f"width {n}, {kind}"
        assert torch.equal(unpack_tree_mask(words, n).cpu(), visible), f"width {n}"


def test_pack_leaves_no_stale_bits():
    """The bits beyond N of a preallocated buffer are cleared."""
    visible = make_tree(5, "tree", torch.Generator().manual_seed(0))[None]
    words = torch.full((1, 5, 1), -1)
    assert torch.equal(pack_tree_mask(visible, words=words), pack_tree_mask(visible))
    assert int(words.max()) < 32


@pytest.mark.gpu
@pytest.mark.parametrize("b, depths, k, n", [(1, 7, 31, 32), (64, 7, 64, 128), (5, 31, 64, 128)])
def test_counts_are_those_of_the_cpu(b, depths, k, n):
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(b, depths, 3 * k, generator=generator).log_softmax(-1)
    scores, ids = scores.topk(k)
    tree = ddtree_build(torch.zeros(b, dtype=torch.int64), ids, scores, n)
    child = tree.tokens.gather(1, tree.first_child.clamp(min=0).long())
    wanted = torch.where(torch.rand(child.shape, generator=generator) < 0.8, child, -1)
    accepted = tree_accept(tree.tokens, tree.parents, wanted, min(n, depths + 1))
    options = torch.tensor([-8, 4, 8, n], dtype=torch.int32)
    want = tree_count(tree, ids, scores, accepted, n, options)
    on_gpu = [type(x)(*(t.cuda() for t in x)) for x in (tree, accepted)]
    got = tree_count(on_gpu[0], ids.cuda(), scores.cuda(), on_gpu[1], n, options.cuda()).cpu()
    assert torch.equal(got[:, :NUM_COUNTS], want[:, :NUM_COUNTS])
    torch.testing.assert_close(got[:, NUM_COUNTS:].view(torch.float32), want[:, NUM_COUNTS:].view(torch.float32))
