# SPDX-License-Identifier: Apache-2.0
"""The reference, which is the specification and the CPU kernel, against a double loop written without it."""

import math

import pytest
import torch
from kernels.cases import CASES, CPU_CASES, D_V, NAIVE_CASES, SM_SCALE, Case, ids, make_inputs, poisoned, write_rows

from sgl_kernel_sm120 import MaskLayout, Status, mla_tree_verify, mla_tree_verify_reference


def naive(inputs):
    """out [b, s_q, h_q, 512] and lse [b, s_q, h_q] in float64: row by row, head by head, key by key."""
    case, arguments = inputs.case, inputs.arguments
    q, cache = arguments["q"].double(), arguments["kv_cache"]
    out = torch.zeros(case.b, case.s_q, case.h_q, D_V, dtype=torch.float64)
    lse = torch.full((case.b, case.s_q, case.h_q), -math.inf, dtype=torch.float64)
    for r, slots in enumerate(inputs.slots):
        prefix = inputs.prefixes[r]
        rows = [cache[s].double() for s in slots]
        for i in range(case.s_q):
            seen = [row for j, row in enumerate(rows) if j < prefix or inputs.visible[r, i, j - prefix]]
            for h in range(case.h_q):
                logits = [float(q[r, i, h] @ row) * SM_SCALE * case.k_scale for row in seen]
                if case.logit_cap:
                    logits = [case.logit_cap * math.tanh(x / case.logit_cap) for x in logits]
                if not logits:
                    continue
                top = max(logits)
                mass = [math.exp(x - top) for x in logits]
                for m, row in zip(mass, seen, strict=True):
                    out[r, i, h] += m / sum(mass) * case.v_scale * row[:D_V]
                lse[r, i, h] = top + math.log(sum(mass))
    return out, lse


def run(inputs, **more):
    case = inputs.case
    lse = torch.full((case.b, case.s_q, case.h_q), float("nan"))
    status = torch.zeros(1, dtype=torch.int32)
    out = mla_tree_verify(**inputs.arguments, lse=lse, status=status, **more)
    return out, lse, Status(int(status))


@pytest.mark.parametrize("case", NAIVE_CASES, ids=ids(NAIVE_CASES))
def test_reference_equals_double_loop(case):
    inputs = make_inputs(case, dtype=torch.float32)
    out, lse, status = run(inputs)
    want, want_lse = naive(inputs)
    # fp32 rounds a logit of 1e5 by up to 4e-3 and one of 100 by up to 4e-6; weights change by as much.
    rtol = {"low": 1e-2, "growing": 1e-4}.get(case.scores, 2e-5)
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-5)
    assert status == Status(0)


def test_naive_covers_every_kind():
    """The double loop must stay affordable without dropping a layout, a page size or an empty list."""
    for key in (
        "layout",
        "tree",
        "kv",
        "page_size",
        "index_dtype",
        "indptr_dtype",
        "draft_slots",
        "q_layout",
        "scores",
    ):
        every = {getattr(c, key) for c in CASES if not c.big}
        assert {getattr(c, key) for c in NAIVE_CASES} >= every - {"wide"}, key
    assert any(p == -c.s_q for c in NAIVE_CASES for p in c.prefixes)


@pytest.mark.parametrize("case", CPU_CASES, ids=ids(CPU_CASES))
def test_bf16_is_finite_and_close_to_float64(case):
    inputs = make_inputs(case)
    out, lse, _ = run(inputs)
    exact = torch.empty(out.shape, dtype=torch.float64)
    mla_tree_verify_reference(**inputs.arguments, out=exact, compute_dtype=torch.float64)
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    assert (out.double() - exact).norm() <= (1e-2 if case.scores == "low" else 4e-3) * exact.norm()
    assert ((lse == -math.inf) == (exact == 0).all(-1)).all()


# What goes wrong in practice, as small inputs with the right value.


def small(layout=MaskLayout.QLEN, prefixes=(20, 3), **more):
    return make_inputs(Case("small", prefixes, s_q=5, h_q=2, layout=layout, **more), dtype=torch.float32)


def test_draft_slots_are_attended():
    """Attending the prefix alone gives another result, and the draft rows decide it."""
    inputs = small()
    out, _, _ = run(inputs)
    case, arguments = inputs.case, inputs.arguments
    lists = [s[:p] for s, p in zip(inputs.slots, inputs.prefixes, strict=True)]
    prefix_only = inputs.changed(
        kv_indptr=torch.tensor([0] + [len(x) for x in lists]).cumsum(0),
        kv_indices=torch.tensor([s for x in lists for s in x]),
        draft_slots=torch.tensor([s[p:] for s, p in zip(inputs.slots, inputs.prefixes, strict=True)]),
        tree_mask=torch.zeros_like(arguments["tree_mask"]),
    )
    without, _, _ = run(prefix_only)
    assert (out - without).abs().amax(dim=(-1, -2)).min() > 1e-3, "some row does not depend on its draft keys"
    for r in range(case.b):
        changed = arguments["kv_cache"].clone()
        changed[inputs.slots[r][-1]] += 1.0
        moved, _, _ = run(inputs.changed(kv_cache=changed))
        for i in range(case.s_q):
            assert torch.equal(moved[r, i], out[r, i]) == (not inputs.visible[r, i, -1])


def test_full_mask_row_stride_is_prefix_plus_s_q():
    """A FULL mask and a QLEN mask of one tree agree; the block read with stride prefix would not."""
    full, qlen = small(MaskLayout.FULL, tree="random"), small(MaskLayout.QLEN, tree="random")
    assert torch.equal(full.visible, qlen.visible)
    assert torch.equal(run(full)[0], run(qlen)[0])
    s_q, prefix = 5, full.prefixes[0]
    flat = full.arguments["tree_mask"]
    wrong = torch.stack([flat[i * prefix : (i + 1) * prefix][:s_q] for i in range(s_q)])
    assert not torch.equal(wrong, full.visible[0]), "the case cannot tell the strides apart"


def test_mask_indptr_sliced_one_too_long_is_refused():
    inputs = small(MaskLayout.FULL)
    indptr = torch.cat([inputs.arguments["mask_indptr"], torch.tensor([0])])
    assert indptr.numel() == inputs.case.b + 2
    with pytest.raises(ValueError, match=r"mask_indptr: expected \[b\] or \[b \+ 1\] with b = 2, got int64 \[4\]"):
        run(inputs.changed(mask_indptr=indptr))
    starts = inputs.arguments["mask_indptr"][: inputs.case.b]
    assert torch.equal(run(inputs.changed(mask_indptr=starts))[0], run(inputs)[0])


def test_siblings_do_not_see_each_other():
    """Node 1 and node 2 are children of the root: the output of one does not depend on the K of the other."""
    visible = torch.eye(3, dtype=torch.bool)
    visible[:, 0] = True
    inputs = make_inputs(Case("siblings", (7,), s_q=3, h_q=2), dtype=torch.float32)
    inputs = inputs.changed(tree_mask=visible[None])
    out, _, _ = run(inputs)
    for changed, kept in ((1, 2), (2, 1)):  # an earlier sibling must be masked as well as a later one
        cache = inputs.arguments["kv_cache"].clone()
        cache[inputs.slots[0][7 + changed]] *= -3.0
        moved, _, _ = run(inputs.changed(kv_cache=cache))
        assert torch.equal(moved[0, kept], out[0, kept])
        assert torch.equal(moved[0, 0], out[0, 0])
        assert not torch.allclose(moved[0, changed], out[0, changed])


@pytest.mark.parametrize("layout", list(MaskLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("b", [1, 3])
def test_zero_scores_give_the_exact_mean(layout, dtype, b):
    """Q = K = 0: each output row is the mean of the V rows it sees. Integers make the mean exact up to one division."""
    tree = "causal" if layout == MaskLayout.CAUSAL else "random"
    case = Case("mean", (16, 0, 3)[:b], s_q=6, h_q=2, layout=layout, tree=tree, scores="zero")
    inputs = make_inputs(case, dtype=dtype)
    cache = inputs.arguments["kv_cache"]
    owned = torch.tensor(sorted({s for x in inputs.slots for s in x}))
    values = torch.zeros(len(owned), 576)
    values[:, :512] = torch.randint(-8, 9, (len(owned), 512), generator=torch.Generator().manual_seed(1)).float()
    write_rows(cache, owned, values.to(dtype))
    out, lse, _ = run(inputs)
    for r in range(b):
        prefix = inputs.prefixes[r]
        for i in range(case.s_q):
            seen = [s for j, s in enumerate(inputs.slots[r]) if j < prefix or inputs.visible[r, i, j - prefix]]
            want = cache[seen][:, :512].double().mean(0) if seen else torch.zeros(512, dtype=torch.float64)
            tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(out[r, i].double(), want.expand(2, -1), rtol=tolerance, atol=tolerance)
            assert lse[r, i].tolist() == pytest.approx([math.log(len(seen)) if seen else -math.inf] * 2)


def test_empty_row_is_zero_with_lse_minus_inf():
    case = Case("empty", (-4, 2), s_q=4, h_q=3, layout=MaskLayout.CAUSAL)
    out, lse, _ = run(make_inputs(case))
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    assert torch.isfinite(lse[1]).all()


@pytest.mark.parametrize("short", [1, 2, 3])
def test_list_shorter_than_s_q_has_the_first_draft_keys(short):
    """A list of n < s_q entries: no prefix, draft keys 0..n-1; later rows see those alone under CAUSAL."""
    case = Case("short", (-short,), s_q=4, h_q=1, layout=MaskLayout.CAUSAL)
    inputs = make_inputs(case, dtype=torch.float32)
    keys = 4 - short
    same_q = inputs.changed(q=inputs.arguments["q"][:, keys - 1 : keys].expand(-1, 4, -1, -1).contiguous())
    rows, lse, _ = run(same_q)
    for i in range(keys, 4):
        torch.testing.assert_close(rows[0, i], rows[0, keys - 1])
    for i in range(1, keys):
        assert (lse[0, i] > lse[0, i - 1]).all(), "each of the first rows sees one key more"


def test_bad_lists_are_clamped_and_flagged():
    inputs = small()
    good = inputs.arguments["kv_indptr"]
    cases = {
        "past the end": good + torch.tensor([0, 0, 100], dtype=good.dtype),
        "decreasing": torch.tensor([0, 25, 10], dtype=good.dtype),
        "negative": torch.tensor([-5, 25, 33], dtype=good.dtype),
    }
    for name, indptr in cases.items():
        out, _, status = run(inputs.changed(kv_indptr=indptr))
        assert status == Status.LIST_CLAMPED, name
        assert torch.isfinite(out).all(), name
    indices = inputs.arguments["kv_indices"].clone()
    indices[0], indices[1] = 2**31 - 1, -1
    cache = poisoned(inputs.arguments["kv_cache"].shape, torch.float32, "cpu").fill_(1.0)
    out, _, status = run(inputs.changed(kv_indices=indices, kv_cache=cache))
    assert status == Status.SLOT_CLAMPED
    torch.testing.assert_close(out, torch.ones_like(out))


def test_short_full_mask_is_clamped_and_flagged():
    inputs = small(MaskLayout.FULL, tree="all")
    mask = inputs.arguments["tree_mask"]
    out, _, status = run(inputs.changed(tree_mask=mask[:-1].clone()))
    assert status == Status.MASK_CLAMPED
    complete, _, _ = run(inputs)
    assert torch.equal(out[0], complete[0]) and torch.equal(out[1, :-1], complete[1, :-1])
    assert not torch.allclose(out[1, -1], complete[1, -1])


def test_a_broken_page_promise_is_named():
    case = Case("pages", (32,), s_q=4, h_q=1, page_size=16)
    inputs = make_inputs(case)
    indices = inputs.arguments["kv_indices"].clone()
    indices[17] = indices[18]
    with pytest.raises(
        ValueError, match=r"whole pages of 16 slots, got slot \d+ at entry 17 of request 0; pass page_size=1"
    ):
        run(inputs.changed(kv_indices=indices))
    assert torch.isfinite(run(inputs.changed(kv_indices=indices, page_size=1))[0]).all()


def test_high_and_low_slots_with_the_same_rows_agree():
    inputs = small()
    shift = 1000
    cache = poisoned((inputs.arguments["kv_cache"].shape[0] + shift, 576), torch.float32, "cpu")
    cache[shift:] = inputs.arguments["kv_cache"]
    moved = inputs.changed(kv_cache=cache, kv_indices=inputs.arguments["kv_indices"] + shift)
    assert torch.equal(run(moved)[0], run(inputs)[0])


def test_cache_with_a_head_dimension_and_a_row_stride():
    inputs = small()
    cache = inputs.arguments["kv_cache"]
    wide = poisoned((cache.shape[0], 640), torch.float32, "cpu")
    wide[:, :576] = cache
    for other in (cache[:, None], wide[:, :576], wide[:, None, :576]):
        assert torch.equal(run(inputs.changed(kv_cache=other))[0], run(inputs)[0])
