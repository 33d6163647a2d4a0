# SPDX-License-Identifier: Apache-2.0
"""The inputs that all arms share, and the answer they are judged by."""

import math

import pytest
import torch
from verify_bench import inputs
from verify_bench.shapes import Shape, parse_shape

import sgl_kernel_sm120

RAGGED = parse_shape("prefix=70+0+33,q=5,h=3,page=16")


def naive(problem, layer, tree):
    """One row, one key at a time."""
    s = problem.shape
    out = torch.zeros(s.bs, s.s_q, s.h_q, 512, dtype=torch.float64)
    bounds = problem.kv_indptr.tolist()
    for b, prefix in enumerate(s.prefixes):
        slots = problem.kv_indices[bounds[b] : bounds[b + 1]].tolist()
        for i in range(s.s_q):
            for h in range(s.h_q):
                weights, total = [], 0.0
                for j, slot in enumerate(slots):
                    seen = not tree or j < prefix or bool(problem.visible[b, i, j - prefix])
                    row = problem.kv[layer][slot].double()
                    w = math.exp(float(problem.q[b, i, h].double() @ row) * problem.sm_scale) if seen else 0.0
                    total += w
                    weights.append((w, row[:512]))
                out[b, i, h] = sum(w * v for w, v in weights) / total
    return out


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("chunk", [7, 64, 32768])
def test_oracle_is_the_double_loop(tree, chunk):
    """Chunks that cut the tree block in two must not change the answer."""
    problem = inputs.build(RAGGED, layers=2, seed=3)
    torch.testing.assert_close(inputs.oracle(problem, 1, tree, chunk), naive(problem, 1, tree), rtol=1e-10, atol=1e-12)


def test_oracle_agrees_with_the_package_reference_on_fp8():
    problem = inputs.build(parse_shape("prefix=50,q=9,h=4,kv=fp8"), layers=2)
    out = problem.new_out()
    sgl_kernel_sm120.mla_tree_verify_reference(
        problem.q, problem.kv[0], problem.kv_indptr, problem.kv_indices, sm_scale=problem.sm_scale,
        tree_mask=problem.mask_words, mask_layout=sgl_kernel_sm120.MaskLayout.BITS, out=out,
    )  # fmt: skip
    error, worst = inputs.relative_error(out, inputs.oracle(problem))
    assert error < 3e-3 and worst < 5e-3


def test_lists_are_whole_pages_and_disjoint():
    problem = inputs.build(RAGGED, layers=2)
    bounds = problem.kv_indptr.tolist()
    assert len(set(problem.kv_indices.tolist())) == problem.kv_indices.numel() == RAGGED.tokens
    for b in range(RAGGED.bs):
        slots = problem.kv_indices[bounds[b] : bounds[b + 1]]
        position = torch.arange(len(slots))
        assert torch.equal(slots % 16, position % 16)
        assert torch.equal(slots // 16, (slots // 16)[position - position % 16])
        assert torch.equal(slots[-RAGGED.s_q :], problem.draft_slots[b])
    prefixes = [problem.kv_indices[a : z - RAGGED.s_q] for a, z in zip(bounds, bounds[1:], strict=False)]
    assert torch.equal(problem.prefix_indices, torch.cat(prefixes))
    assert problem.kv_indices.min() >= 16, "page 0 is the padding page"
    assert problem.kv_indices.max() < problem.kv[0].shape[0]


def test_page_one_lists_are_scattered():
    slots = inputs.build(Shape((500,)), layers=2).kv_indices
    assert (slots.diff() == 1).float().mean() < 0.1


def test_layers_differ_and_seed_repeats():
    one, two = (inputs.build(Shape((20,)), layers=2, seed=7) for _ in range(2))
    assert not torch.equal(one.kv[0], one.kv[1])
    assert torch.equal(one.q, two.q) and torch.equal(one.kv[1], two.kv[1]) and torch.equal(one.visible, two.visible)


def test_tree_rows_see_themselves_and_ancestors():
    visible = inputs.random_tree(40, torch.Generator().manual_seed(1))
    assert visible.diagonal().all() and visible[:, 0].all() and not visible.triu(1).any()
    for node in range(1, 40):
        parent = int(visible[node, :node].nonzero().max())
        assert torch.equal(visible[node, :node], visible[parent, :node])
    assert not torch.equal(visible, torch.ones(40, 40).tril().bool()), "a chain would not test the mask"


@pytest.mark.parametrize("n", [1, 9, 63, 64, 65, 128])
def test_mask_words_are_the_packages(n):
    visible = torch.rand(2, n, n, generator=torch.Generator().manual_seed(n)) < 0.5
    assert torch.equal(inputs.pack_words(visible), sgl_kernel_sm120.pack_tree_mask(visible))


def test_layers_cover_four_times_l2():
    l2 = 60 << 20
    for shape in (Shape((1024,)), Shape((16384,)), Shape((1024,), kv_dtype="fp8")):
        layers = inputs.layers_for(shape, l2)
        assert layers * shape.tokens * (1152 if shape.kv_dtype == "bf16" else 576) >= 4 * l2 or layers == 256
    assert inputs.layers_for(Shape((189440,) * 8), l2) == 2


def test_error_sees_one_bad_row_and_unwritten_output():
    problem = inputs.build(Shape((20,)), layers=2)
    want = torch.randn(1, 9, 8, 512, dtype=torch.float64)
    out = want.clone()
    out[0, 3, 2] = 0
    error, worst = inputs.relative_error(out, want)
    assert worst == pytest.approx(1.0) and error == pytest.approx((1 / 72) ** 0.5, rel=0.1)
    poisoned = problem.new_out()
    assert all(math.isnan(e) for e in inputs.relative_error(poisoned, want))
