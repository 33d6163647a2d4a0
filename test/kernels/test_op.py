# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of mla_tree_verify against the reference in float64. Every test here needs a GPU."""

import math

import pytest
import torch
from kernels.cases import CASES, D_V, Case, Inputs, ids, make_inputs

from sgl_kernel_sm120 import (
    MaskLayout,
    Status,
    mla_tree_verify,
    mla_tree_verify_plan,
    mla_tree_verify_reference,
    mla_tree_verify_workspace_bytes,
)
from sgl_kernel_sm120.reference import gather_rows, slots_of_request, softmax_of_visible

pytestmark = pytest.mark.gpu

GUARD = 4096  # elements on either side of an output that a kernel must leave alone
CUDA_CASES = [case for case in CASES if case.kv != "fp32"]

# bf16 rounds with a relative error of 2^-9. The kernel rounds the weights, the parts of a split request and the result;
# the bound is twice the first and the last.
NORM_BOUND = 6e-3
ELEMENT_BOUND = 2 * 2 * 2**-9


def expected(inputs: Inputs):
    """float64 out, lse, and mass = weights |v|, the scale of an element's rounding error."""
    case, arguments = inputs.case, inputs.arguments
    device = arguments["q"].device
    out = torch.empty(case.b, case.s_q, case.h_q, D_V, dtype=torch.float64, device=device)
    lse = torch.empty(case.b, case.s_q, case.h_q, dtype=torch.float64, device=device)
    mass = torch.empty_like(out)
    mla_tree_verify_reference(**arguments, out=out, lse=lse, compute_dtype=torch.float64)
    lists = [arguments[k] for k in ("kv_indptr", "kv_indices")]
    for r in range(case.b):
        cache, q = arguments["kv_cache"], arguments["q"][r].double()
        prefix, slots, _ = slots_of_request(r, case.s_q, cache.shape[0], *lists, arguments.get("draft_slots"))
        visible = inputs.visible[r].to(device)
        visible = torch.cat([visible.new_ones(case.s_q, prefix), visible[:, : slots.numel() - prefix]], 1)
        keys = gather_rows(cache, slots).double()
        scores = torch.einsum("qhd,nd->qhn", q, keys) * arguments["sm_scale"] * case.k_scale
        if case.logit_cap:
            scores = case.logit_cap * torch.tanh(scores / case.logit_cap)
        weights, _ = softmax_of_visible(scores, visible)
        mass[r] = weights @ (keys[:, :D_V].abs() * case.v_scale)
    return out, lse, mass


def guarded(shape, dtype, fill):
    """A tensor inside a larger one, and a function that says whether the rest is untouched."""
    size = math.prod(shape)
    storage = torch.full((size + 2 * GUARD,), fill, dtype=dtype, device="cuda")
    before = storage.view(torch.uint8).clone()
    view = storage[GUARD : GUARD + size].view(shape)
    edge = GUARD * storage.element_size()

    def untouched():
        now = storage.view(torch.uint8)
        return torch.equal(now[:edge], before[:edge]) and torch.equal(now[-edge:], before[-edge:])

    return view, untouched


def run(inputs: Inputs):
    """One call with poisoned outputs and workspace, guards around all of them. -> out, lse, status."""
    case = inputs.case
    shape = (case.b, case.s_q, case.h_q)
    out, out_kept = guarded((*shape, D_V), torch.bfloat16, math.nan)
    lse, lse_kept = guarded(shape, torch.float32, math.nan)
    size = mla_tree_verify_workspace_bytes(*shape)
    workspace, workspace_kept = guarded((size,), torch.uint8, 0xFF)  # NaN as fp32 and as bf16
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    mla_tree_verify(**inputs.arguments, out=out, lse=lse, workspace=workspace, status=status)
    torch.cuda.synchronize()
    assert out_kept() and lse_kept() and workspace_kept(), "written outside a buffer"
    return out, lse, Status(int(status))


def assert_matches(case, got, want, mass):
    assert torch.isfinite(got).all()
    difference = (got.double() - want).abs()
    # A logit near 1e5 is rounded by up to 4e-3 in fp32, and moves its weight by as much.
    slack = 1e-2 if case.scores == "low" else 0.0
    assert difference.norm() <= (NORM_BOUND + slack) * want.norm(), (
        f"relative norm {difference.norm() / want.norm():.2e}"
    )
    bound = (ELEMENT_BOUND + slack) * mass
    assert (difference <= bound).all(), (
        f"worst element at {((difference - bound).argmax())}: {(difference / mass).nan_to_num().max():.2e}"
    )


@pytest.mark.parametrize("case", CUDA_CASES, ids=ids(CUDA_CASES))
def test_kernel_equals_float64_reference(case):
    inputs = make_inputs(case, "cuda")
    out, lse, status = run(inputs)
    want, want_lse, mass = expected(inputs)
    assert_matches(case, out, want, mass)
    empty = want_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty) and (out[empty] == 0).all()
    torch.testing.assert_close(lse[~empty].double(), want_lse[~empty], rtol=1e-6, atol=2e-3)
    assert status == Status(0)


@pytest.mark.parametrize("case", [c for c in CUDA_CASES if not c.big], ids=ids([c for c in CUDA_CASES if not c.big]))
def test_ten_runs_are_bitwise_equal(case):
    inputs = make_inputs(case, "cuda")
    first, first_lse, _ = run(inputs)
    for _ in range(9):
        out, lse, _ = run(inputs)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


MIXED = Case("mixed", (1500, 0, 33, 700, -9, 64, 5, 2048))


def permuted(inputs: Inputs, order: list[int]) -> Inputs:
    arguments = inputs.arguments
    index = torch.tensor(order, device="cuda")
    lists = [inputs.slots[r] for r in order]
    indptr = torch.tensor([0] + [len(x) for x in lists]).cumsum(0)
    return inputs.changed(
        q=arguments["q"][index].contiguous(),
        tree_mask=arguments["tree_mask"][index].contiguous(),
        kv_indptr=indptr.to(arguments["kv_indptr"]),
        kv_indices=torch.tensor([s for x in lists for s in x]).to(arguments["kv_indices"]),
    )


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_batch_permutation(kv):
    """Requests do not mix: in another order each still matches the reference of its own."""
    inputs = make_inputs(Case("mixed", MIXED.prefixes, kv=kv), "cuda")
    want, want_lse, mass = expected(inputs)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [4, 0, 7, 2, 6, 1, 3, 5]):
        out, lse, _ = run(permuted(inputs, order))
        assert_matches(inputs.case, out, want[order], mass[order])
        assert torch.equal(lse == -math.inf, want_lse[order] == -math.inf)


def test_zero_scores_give_the_mean():
    """Q = K = 0 for every mask layout: a mask that is ignored, or applied on one side of the diagonal alone, shows."""
    for layout in MaskLayout:
        tree = "causal" if layout == MaskLayout.CAUSAL else "random"
        case = Case("mean", (70, 0, 3, 31), s_q=17, h_q=2, layout=layout, tree=tree, scores="zero")
        inputs = make_inputs(case, "cuda")
        out, _, _ = run(inputs)
        cache = inputs.arguments["kv_cache"]
        for r in range(case.b):
            prefix = inputs.prefixes[r]
            for i in range(case.s_q):
                seen = [s for j, s in enumerate(inputs.slots[r]) if j < prefix or inputs.visible[r, i, j - prefix]]
                want = (
                    cache[seen][:, :D_V].double().mean(0)
                    if seen
                    else torch.zeros(D_V, dtype=torch.float64, device="cuda")
                )
                bound = ELEMENT_BOUND * (
                    cache[seen][:, :D_V].double().abs().mean(0) if seen else torch.zeros_like(want)
                )
                assert ((out[r, i].double() - want).abs() <= bound).all(), (layout, r, i)


def test_siblings_do_not_see_each_other():
    inputs = make_inputs(Case("siblings", (100,), s_q=3, h_q=8), "cuda")
    visible = torch.eye(3, dtype=torch.bool, device="cuda")
    visible[:, 0] = True
    inputs = inputs.changed(tree_mask=visible[None].contiguous())
    out, _, _ = run(inputs)
    for changed, kept in ((1, 2), (2, 1)):
        cache = inputs.arguments["kv_cache"].clone()
        cache[inputs.slots[0][100 + changed]] *= -3.0
        moved, _, _ = run(inputs.changed(kv_cache=cache))
        assert torch.equal(moved[0, kept], out[0, kept]) and torch.equal(moved[0, 0], out[0, 0])
        assert not torch.equal(moved[0, changed], out[0, changed])


def test_high_and_low_slots_with_the_same_rows_agree():
    low = make_inputs(Case("pair", (700, 64)), "cuda")
    rows = low.arguments["kv_cache"]
    shift = 2**31 // 576 + 1
    cache = torch.full((shift + rows.shape[0], 576), math.nan, dtype=rows.dtype, device="cuda")
    cache[shift:] = rows
    high = low.changed(kv_cache=cache, kv_indices=low.arguments["kv_indices"] + shift)
    assert torch.equal(run(high)[0], run(low)[0])


def test_mask_layouts_agree_bitwise():
    outs = [
        run(make_inputs(Case("same", (37, 5, 0), layout=layout, tree="random"), "cuda"))[0]
        for layout in list(MaskLayout)[1:]
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_lse_is_optional_and_a_plan_may_be_shared():
    inputs = make_inputs(MIXED, "cuda")
    want, _, _ = run(inputs)
    arguments = inputs.arguments
    plan = mla_tree_verify_plan(arguments["kv_indptr"], arguments["kv_indices"].numel(), s_q=MIXED.s_q, h_q=MIXED.h_q)
    for _ in range(2):  # two layers of one step
        assert torch.equal(mla_tree_verify(**arguments, plan=plan), want)


def fill_lists(buffers, inputs):
    """Copy another batch's lists into the buffers that a captured graph reads."""
    for name in ("kv_indptr", "kv_indices", "tree_mask", "q"):
        given = inputs.arguments[name]
        buffers[name].view(-1)[: given.numel()].copy_(given.reshape(-1))


def test_graph_replays_with_other_lengths_and_a_smaller_batch():
    """Captured at the maxima; replayed with shorter, longer and empty lists (padded rows) and new masks."""
    s_q, h_q, b = 9, 8, 4
    sizes = [
        (0, 0, 0, 0),
        (40, 3, 0, 17),
        (500, 900, 31, 33),
        (900, 900, 900, 900),
        (64, -9, 700, -9),
        (12, -9, -9, -9),
    ]
    batches = [make_inputs(Case("replay", p, s_q=s_q, h_q=h_q), "cuda", seed=i) for i, p in enumerate(sizes)]
    largest = batches[3]
    slots = max(x.arguments["kv_cache"].shape[0] for x in batches)
    cache = torch.full((slots, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    capacity = largest.arguments["kv_indices"].numel() + 1000
    buffers = dict(
        q=largest.arguments["q"].clone(),
        kv_indptr=largest.arguments["kv_indptr"].clone(),
        kv_indices=torch.full((capacity,), -(2**40), dtype=torch.int64, device="cuda"),
        tree_mask=largest.arguments["tree_mask"].clone(),
    )
    fill_lists(buffers, largest)
    cache[: largest.arguments["kv_cache"].shape[0]] = largest.arguments["kv_cache"]
    out = torch.empty(b, s_q, h_q, D_V, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(b, s_q, h_q, dtype=torch.float32, device="cuda")
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    workspace = torch.empty(mla_tree_verify_workspace_bytes(b, s_q, h_q), dtype=torch.uint8, device="cuda")
    plan = mla_tree_verify_plan(buffers["kv_indptr"], capacity, s_q=s_q, h_q=h_q)
    common = dict(
        kv_cache=cache, sm_scale=largest.arguments["sm_scale"], mask_layout=MaskLayout.QLEN,
        out=out, lse=lse, workspace=workspace, plan=plan, status=status,
    )  # fmt: skip

    def step():
        mla_tree_verify_plan(buffers["kv_indptr"], capacity, s_q=s_q, h_q=h_q, plan=plan)
        mla_tree_verify(**buffers, **common)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in (3, 0, 1, 2, 4, 5, 3):
        inputs = batches[i]
        fill_lists(buffers, inputs)
        cache.fill_(math.nan)
        cache[: inputs.arguments["kv_cache"].shape[0]] = inputs.arguments["kv_cache"]
        out.fill_(math.nan)
        lse.fill_(math.nan)
        workspace.fill_(0xFF)
        graph.replay()
        want, want_lse, mass = expected(inputs)
        assert_matches(inputs.case, out, want, mass)
        assert torch.equal(lse == -math.inf, want_lse == -math.inf), sizes[i]
        eager, _, _ = run(inputs)
        assert int(status) == 0
        assert_matches(inputs.case, eager, want, mass)


@pytest.mark.parametrize("name", ["past the end", "decreasing", "negative", "slots"])
def test_bad_lists_are_clamped_and_flagged(name):
    """Never an illegal access, and status says what was wrong."""
    inputs = make_inputs(Case("bad", (20, 3), s_q=5, h_q=2), "cuda")
    cache = torch.ones_like(inputs.arguments["kv_cache"])
    good, indices = inputs.arguments["kv_indptr"], inputs.arguments["kv_indices"].clone()
    other = {
        "past the end": torch.tensor([0, 25, 2**31 - 1]),
        "decreasing": torch.tensor([0, 25, 10]),
        "negative": torch.tensor([-(2**31), 25, 33]),
        "slots": good.cpu(),
    }[name]
    if name == "slots":
        indices[0], indices[1], indices[-1] = 2**40, -1, -(2**62)
    out, _, status = run(inputs.changed(kv_cache=cache, kv_indptr=other.to(good), kv_indices=indices))
    assert status == (Status.SLOT_CLAMPED if name == "slots" else Status.LIST_CLAMPED)
    assert torch.isfinite(out).all()
    assert ((out == 1) | (out == 0)).all(), "a mean of ones, or an empty row"


def test_short_full_mask_is_clamped_and_flagged():
    inputs = make_inputs(Case("bad", (20, 3), s_q=5, h_q=2, layout=MaskLayout.FULL, tree="all"), "cuda")
    short = inputs.changed(tree_mask=inputs.arguments["tree_mask"][:-1].clone())
    out, _, status = run(short)
    assert status == Status.MASK_CLAMPED
    complete, _, _ = run(inputs)
    assert torch.equal(out[0], complete[0])
    assert not torch.equal(out[1, -1], complete[1, -1])


CUDA_MISTAKES = {
    "q: expected bfloat16, got float32 [2, 5, 2, 576] on cuda:0": lambda x: dict(q=x["q"].float()),
    "kv_cache: expected bfloat16 or float8_e4m3fn, got dtype code": lambda x: dict(kv_cache=x["kv_cache"].half()),
    "kv_cache: expected a tensor on cuda:0, got bfloat16": lambda x: dict(kv_cache=x["kv_cache"].cpu()),
    "kv_indptr: expected [b + 1] = [3], got int32 [2]": lambda x: dict(kv_indptr=x["kv_indptr"][:2]),
    "draft_slots: expected the dtype of kv_indices, int64": lambda x: dict(
        draft_slots=torch.zeros(2, 5, dtype=torch.int32, device="cuda")
    ),
    "tree_mask: expected [b, s_q, s_q] = [2, 5, 5], got bool [1, 5, 5]": lambda x: dict(tree_mask=x["tree_mask"][:1]),
    "workspace: expected at least": lambda x: dict(workspace=torch.zeros(16, dtype=torch.uint8, device="cuda")),
    "plan: expected at least": lambda x: dict(plan=torch.zeros(1, dtype=torch.int32, device="cuda")),
    "out: expected [b, s_q, h_q, 512] = [2, 5, 2, 512], got bfloat16 [2, 5, 2, 576]": lambda x: dict(
        out=x["q"].clone()
    ),
    "page_size: expected a power of two in 1..64, got 3": lambda x: dict(page_size=3),
    "q: expected strides that are multiples of 8": lambda x: dict(
        q=torch.zeros(2, 5, 2, 580, dtype=torch.bfloat16, device="cuda")[..., :576]
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", CUDA_MISTAKES)
def test_mistakes_are_named(message):
    inputs = make_inputs(Case("api", (20, 3), s_q=5, h_q=2), "cuda")
    with pytest.raises(RuntimeError) as raised:
        mla_tree_verify(**inputs.changed(**CUDA_MISTAKES[message](inputs.arguments)).arguments)
    assert str(raised.value).startswith("mla_tree_verify: " + message)


@pytest.mark.parametrize("check", ["test_schema", "test_faketensor"])
def test_opcheck(check):
    inputs = make_inputs(Case("api", (20, 3), s_q=5, h_q=2), "cuda")
    x = inputs.arguments
    absent = torch.empty(0, dtype=torch.int64, device="cuda")
    plan = mla_tree_verify_plan(x["kv_indptr"], x["kv_indices"].numel(), s_q=5, h_q=2)
    workspace = torch.empty(mla_tree_verify_workspace_bytes(2, 5, 2), dtype=torch.uint8, device="cuda")
    out = torch.empty(2, 5, 2, D_V, dtype=torch.bfloat16, device="cuda")
    lse, status = torch.empty(2, 5, 2, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    lists = [x[k] for k in ("q", "kv_cache", "kv_indptr", "kv_indices")]
    arguments = [*lists, absent, x["tree_mask"], absent, plan, out, lse, workspace, status, 1, 1, 0.1, 0.0, 1.0, 1.0]
    torch.library.opcheck(torch.ops.sgl_kernel_sm120.mla_tree_verify.default, tuple(arguments), test_utils=check)


def test_compiled_call_equals_eager():
    inputs = make_inputs(MIXED, "cuda")
    arguments = inputs.arguments
    plan = mla_tree_verify_plan(arguments["kv_indptr"], arguments["kv_indices"].numel(), s_q=MIXED.s_q, h_q=MIXED.h_q)
    workspace = torch.empty(
        mla_tree_verify_workspace_bytes(MIXED.b, MIXED.s_q, MIXED.h_q), dtype=torch.uint8, device="cuda"
    )

    def step(q):
        return mla_tree_verify(**{**arguments, "q": q}, plan=plan, workspace=workspace) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(arguments["q"]), step(arguments["q"]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current():
    inputs = make_inputs(Case("second", (700, 3)), "cuda:1")
    out = mla_tree_verify(**inputs.arguments)
    want = torch.empty(out.shape, dtype=torch.float64, device="cuda:1")
    mla_tree_verify_reference(**inputs.arguments, out=want, compute_dtype=torch.float64)
    assert (out.double() - want).norm() <= NORM_BOUND * want.norm()
    assert torch.cuda.current_device() == 0
