# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 over Triton, on a CPU: metadata through the static buffers of a graph, masks that never stay, sizes,
modes, fallbacks. The stock kernels are stand-ins here; test/e2e/test_triton_interpreted.py runs the real ones."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from srt.attention_naive import make_layer, naive_attention
from srt.layers.attention.kdtree_triton_cases import (
    MAX_REQUESTS,
    NUM_HEADS,
    batch_of,
    capture,
    chain_input,
    make_backend,
    make_runner,
    patch_settings,
    replay,
    tree_input,
)
from torch.utils._python_dispatch import TorchDispatchMode

import sgl_kernel_sm120
from sglang.kdtree.plan.buffers import workspace_bytes
from sglang.srt.layers.attention import (
    kdtree_backend,
    kdtree_serving,
    kdtree_torch_backend,
    kdtree_triton_backend,
    kdtree_triton_serving,
)
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.kdtree_metadata import full_mask, visible_of_full_mask
from sglang.srt.layers.attention.kdtree_triton_serving import tensor_bytes
from sglang.srt.layers.attention.kdtree_verify import VerifyErrors
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput

N = 4
CAUSAL = torch.ones(N, N, dtype=torch.uint8).tril()
# Node 0 has the children 1 and 2, node 1 the child 3.
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.uint8)


@pytest.fixture
def graph_backend(monkeypatch):
    backend = make_backend(monkeypatch)
    backend.init_cuda_graph_state(5, 5 * N)
    return backend


@pytest.fixture
def stock(monkeypatch):
    """The stock kernels are Triton's. Counts calls of the base class and gives what the test puts into `answer`."""
    record = SimpleNamespace(calls=[], answer=None)

    def forward(name):
        def stand_in(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
            record.calls.append(name)
            return record.answer if record.answer is not None else q.new_full((q.shape[0], NUM_HEADS * 512), 7.0)

        return stand_in

    monkeypatch.setattr(TritonAttnBackend, "forward_extend", forward("extend"))
    monkeypatch.setattr(TritonAttnBackend, "forward_decode", forward("decode"))
    return record


def random_trees(generator, count):
    return (torch.rand(count, N, N, generator=generator) < 0.5).to(torch.uint8) | torch.eye(N, dtype=torch.uint8)


# Layouts in which a worker may hand over a mask: (visible, prefix lengths, backend) -> spec_info.


def tree_in_place(visible, prefixes, backend):
    """DDTREE: the worker writes the backend's buffer."""
    buffer = backend.verify_mask.buffer[: visible.numel()]
    return tree_input(N, buffer.copy_(visible.flatten()))


def tree_apart(visible, prefixes, backend):
    return tree_input(N, visible.flatten().bool())


def full_layout(visible, prefixes, backend):
    cells = N * (sum(prefixes) + N * len(prefixes))
    return full_mask(visible.bool(), torch.tensor(prefixes), cells)


def tree_full(visible, prefixes, backend):
    return tree_input(N, full_layout(visible, prefixes, backend), TreeMaskMode.FULL_MASK)


def ngram(visible, prefixes, backend):
    return NgramVerifyInput(custom_mask=full_layout(visible, prefixes, backend), draft_token_num=N)


def eagle_in_place(visible, prefixes, backend):
    """EAGLE: the whole buffer is set, then the batch's part is written by the tree kernel."""
    backend.verify_mask.buffer.fill_(1)
    backend.verify_mask.buffer[: visible.numel()] = visible.flatten()
    return eagle_input(backend.verify_mask.buffer)


def eagle_input(mask):
    return EagleVerifyInput(
        draft_token=None, custom_mask=mask, positions=None, retrieve_index=None, retrieve_next_token=None,
        retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=1, topk=2, draft_token_num=N,
        capture_hidden_mode=None, seq_lens_sum=None, seq_lens_cpu=None,
    )  # fmt: skip


def chain(visible, prefixes, backend):
    visible[:] = CAUSAL
    return chain_input(N)


LAYOUTS = [tree_in_place, tree_apart, tree_full, ngram, eagle_in_place, chain]


@st.composite
def steps(draw):
    """Steps through one captured bucket of 5: rows, prefix lengths (0 among them) and a mask layout each."""
    one = st.integers(1, 5).flatmap(
        lambda size: st.tuples(
            st.permutations(range(1, MAX_REQUESTS + 1)).map(lambda rows: rows[:size]),
            st.lists(st.integers(0, 40), min_size=size, max_size=size),
            st.sampled_from(LAYOUTS),
        )
    )
    return draw(st.lists(one, min_size=1, max_size=4)), draw(st.integers(0, 10_000))


@given(steps())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_replay_reads_its_own_lists_and_masks(graph_backend, case):
    batches, seed = case
    generator = torch.Generator().manual_seed(seed)
    table = graph_backend.req_to_token
    step = capture(graph_backend, 5)
    for rows, prefixes, layout in batches:
        visible = random_trees(generator, len(rows))
        replay(graph_backend, rows, prefixes, layout(visible, prefixes, graph_backend), bucket=5)

        expected = [table[row, : p + N].tolist() for row, p in zip(rows, prefixes, strict=True)]
        expected += [[0] * (1 + N)] * (5 - len(rows))  # padding: the dummy row, length 1
        begins = step.indptr.tolist()
        assert [step.indices[a:b].tolist() for a, b in zip(begins, begins[1:], strict=False)] == expected
        assert step.rows.tolist() == list(rows) + [0] * (5 - len(rows))
        assert torch.equal(step.tree_mask[: len(rows)], visible), layout.__name__
        if layout is not eagle_in_place and layout not in (tree_full, ngram):
            assert torch.equal(step.tree_mask[len(rows) :], CAUSAL.expand(5 - len(rows), N, N))


def test_padding_of_a_shrinking_batch_is_a_chain_on_the_sink(graph_backend):
    """5 requests, then 3 in the same bucket: nothing of the two that ended stays."""
    step = capture(graph_backend, 5)
    replay(graph_backend, [1, 2, 3, 4, 5], [9, 8, 7, 6, 5], tree_apart(TREE.expand(5, N, N), None, None), 5)
    replay(graph_backend, [6, 1, 2], [3, 0, 40], tree_apart(TREE.expand(3, N, N), None, None), 5)
    assert step.rows.tolist() == [6, 1, 2, 0, 0]
    assert step.indptr.tolist() == [0, 7, 11, 55, 60, 65]
    assert step.indices[55:65].tolist() == [0] * 10
    assert torch.equal(step.tree_mask[3:], CAUSAL.expand(2, N, N))


def test_a_chain_after_a_tree_is_verified_causally(graph_backend):
    """DFLASH sends no mask; the captured kernel reads the buffer all the same."""
    step = capture(graph_backend, 5)
    replay(graph_backend, [1], [9], tree_apart(TREE[None], None, None), 5)
    replay(graph_backend, [1], [9], chain_input(N), 5)
    assert torch.equal(step.tree_mask, CAUSAL.expand(5, N, N))


def test_a_capture_holds_the_addresses_that_replays_write(graph_backend):
    step = capture(graph_backend, 3)
    assert step.indptr.data_ptr() == graph_backend.graph.indptr.data_ptr()
    assert step.indices.data_ptr() == graph_backend.graph.indices.data_ptr()
    assert step.tree_mask.data_ptr() == graph_backend.verify_mask.buffer.data_ptr()
    assert step.plan.data_ptr() == graph_backend.plan.data_ptr()
    assert step.batch_size == 3


def test_the_mask_is_taken_again_after_the_draft(graph_backend):
    """The plan stream prepares a step before the draft has written its mask."""
    step = capture(graph_backend, 2)
    spec_info = tree_apart(CAUSAL.expand(2, N, N).clone(), None, None)
    replay(graph_backend, [1, 2], [4, 5], spec_info, 2)
    spec_info.custom_mask.copy_(TREE.expand(2, N, N).flatten())
    graph_backend.update_verify_buffers_to_fill_after_draft(spec_info, 2)
    assert torch.equal(step.tree_mask, TREE.expand(2, N, N))


def test_another_width_than_captured_is_refused(graph_backend):
    capture(graph_backend, 2)
    with pytest.raises(RuntimeError, match="captured for 4 tokens a request, and this verification has 3"):
        replay(graph_backend, [1], [5], chain_input(3), 2)


def test_a_full_mask_shorter_than_the_padded_batch_is_read_in_bounds():
    mask = torch.tensor([True, False, True, True])  # one request, prefix 0, N = 2
    visible = visible_of_full_mask(mask, torch.tensor([0, 1, 1]), 2)
    assert visible[0].tolist() == [[True, False], [True, True]]
    assert visible.shape == (3, 2, 2)


# Attention through captured steps.


def naive(backend, rows, prefixes, q, visible, layer):
    parts = []
    for i, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        keys = backend.token_to_kv_pool.keys[backend.req_to_token[row, : prefix + N].long()]
        parts.append(
            naive_attention(
                q[i * N : (i + 1) * N].view(N, NUM_HEADS, 576), keys, keys[..., :512],
                lambda a, j, p=prefix, m=visible[i]: j < p or bool(m[a, j - p]), scaling=layer.scaling,
            ).flatten(1)
        )  # fmt: skip
    return torch.cat(parts)


def run_layer(backend, batch, seed=3):
    generator = torch.Generator().manual_seed(seed)
    total = batch.batch_size * N
    q = torch.randn(total, NUM_HEADS * 576, generator=generator)
    k = torch.randn(total, 1, 576, generator=generator)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    return q, layer, backend.forward_extend(q, k, k[..., :512], layer, batch)


@pytest.mark.parametrize("visible", [TREE, CAUSAL])
def test_a_replayed_step_gives_tree_attention_and_finite_padding(graph_backend, visible):
    rows, prefixes, bucket = [3, 1], [17, 0], 4
    capture(graph_backend, bucket)
    spec_info = chain_input(N) if visible is CAUSAL else tree_apart(visible.expand(2, N, N), None, None)
    batch = batch_of(rows, prefixes, spec_info, bucket=bucket, table=graph_backend.req_to_token)
    graph_backend.init_forward_metadata_out_graph(batch)
    # Slots that no request of the batch owns hold NaN: nothing outside the lists is read.
    keys = graph_backend.token_to_kv_pool.keys
    used = torch.zeros(len(keys), dtype=torch.bool)
    used[0] = True
    for row, prefix in zip(rows, prefixes, strict=True):
        used[graph_backend.req_to_token[row, : prefix + N].long()] = True
    keys[~used] = torch.nan
    # The scheduler may use req_to_token again from here on.
    table = graph_backend.req_to_token.clone()
    graph_backend.req_to_token.fill_(-1)
    q, layer, out = run_layer(graph_backend, batch)
    graph_backend.req_to_token.copy_(table)
    torch.testing.assert_close(
        out[: 2 * N].double(),
        naive(graph_backend, rows, prefixes, q, visible.expand(2, N, N), layer),
        rtol=2e-5,
        atol=2e-5,
    )
    assert out[2 * N :].isfinite().all()
    assert graph_backend.shared_read_ends(ForwardMode.TARGET_VERIFY) is SharedReadEnds.IN_REPLAY


@pytest.mark.parametrize("known_sum", [True, False])
def test_an_eager_step_gives_tree_attention(monkeypatch, known_sum):
    backend = make_backend(monkeypatch)
    rows, prefixes = [2, 5, 1], [0, 33, 7]
    batch = batch_of(rows, prefixes, tree_apart(TREE.expand(3, N, N), None, None), table=backend.req_to_token)
    if not known_sum:
        batch.seq_lens_sum = None
    backend.init_forward_metadata(batch)
    q, layer, out = run_layer(backend, batch)
    expected = naive(backend, rows, prefixes, q, TREE.expand(3, N, N), layer)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layout", [tree_in_place, tree_apart, tree_full, ngram])
@pytest.mark.parametrize("mode", ["on", "validate"])
def test_requests_added_by_data_parallel_padding_are_chains(monkeypatch, stock, mode, layout):
    """Upstream pads an eager batch to the other ranks' size after the mask was built, with row 0 and length 1."""
    backend = make_backend(monkeypatch, mode=mode)
    rows, prefixes = [2, 5], [9, 33]
    spec_info = layout(TREE.expand(2, N, N).clone(), prefixes, backend)
    batch = batch_of(rows, prefixes, spec_info, bucket=4, table=backend.req_to_token)
    batch.seq_lens_sum += 2
    backend.init_forward_metadata(batch)
    assert torch.equal(backend.step.tree_mask[:2].bool(), TREE.expand(2, N, N).bool())
    assert backend.step.indptr.tolist() == [0, 13, 50, 55, 60]
    assert backend.step.indices[50:60].tolist() == [0] * 10
    q, layer, out = run_layer(backend, batch)
    if mode == "on":
        expected = naive(backend, rows, prefixes, q, TREE.expand(2, N, N), layer)
        torch.testing.assert_close(out[: 2 * N].double(), expected, rtol=2e-5, atol=2e-5)
        assert out.isfinite().all()
    else:
        visible = visible_of_full_mask(backend.forward_metadata.custom_mask, torch.tensor(prefixes), N)
        assert torch.equal(visible, TREE.expand(2, N, N).bool())


def test_more_rows_than_the_batch_has_give_zeros(monkeypatch):
    """Data-parallel padding of an eager batch."""
    backend = make_backend(monkeypatch)
    batch = batch_of([2], [6], chain_input(N), table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    step = backend.step
    out = backend.verifier.run(
        step, torch.randn(3 * N, NUM_HEADS * 576), backend.token_to_kv_pool.keys, make_layer(2, 1, 576, 512)
    )
    assert out.shape == (3 * N, NUM_HEADS * 512)
    assert torch.equal(out[N:], torch.zeros_like(out[N:]))


def test_plain_decode_reads_the_stock_list(monkeypatch):
    backend = make_backend(monkeypatch, algorithm=None, width=1)
    rows, lens = [4, 2], [13, 1]
    batch = batch_of(rows, lens, None, mode=ForwardMode.DECODE, table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    q, k = torch.randn(2, NUM_HEADS * 576), torch.randn(2, 1, 576)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    out = backend.forward_decode(q, k, k[..., :512], layer, batch)
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        keys = backend.token_to_kv_pool.keys[backend.req_to_token[row, :length].long()]
        assert torch.equal(keys[-1], k[i])
        expected = naive_attention(
            q[i].view(1, NUM_HEADS, 576), keys, keys[..., :512], lambda *_: True, scaling=layer.scaling
        )
        torch.testing.assert_close(out[i].double(), expected.flatten(), rtol=2e-5, atol=2e-5)


def test_a_captured_decode_follows_its_replays(monkeypatch):
    backend = make_backend(monkeypatch, algorithm=None, width=1)
    backend.init_cuda_graph_state(3, 3)
    decode = ForwardMode.DECODE
    backend.init_forward_metadata_out_graph(batch_of([], [], None, mode=decode, bucket=3), in_capture=True)
    step = backend.step
    backend.init_forward_metadata_out_graph(batch_of([5, 2], [9, 30], None, mode=decode, bucket=3))
    backend.init_forward_metadata_out_graph(batch_of([1], [2], None, mode=decode, bucket=3))
    assert step.num_tokens == 1 and step.tree_mask is None
    assert step.indptr.tolist() == [0, 2, 3, 4]
    assert step.indices[:4].tolist() == [*backend.req_to_token[1, :2].tolist(), 0, 0]
    assert step.rows.tolist() == [1, 0, 0]


def test_a_bucket_above_the_kernels_limit_is_captured_with_triton(monkeypatch, stock):
    """A server without speculation may run more requests than the kernel takes."""
    backend = make_backend(monkeypatch, algorithm=None, width=1)
    backend.max_batch = 2
    backend.init_cuda_graph_state(3, 3)
    decode = ForwardMode.DECODE
    for bucket, served in ((3, False), (2, True)):
        batch = batch_of([], [], None, mode=decode, bucket=bucket)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(None)
        assert (backend.step is not None) == served
    assert backend.fallbacks == {"more than 2 requests": 1}
    batch = batch_of([5, 2, 1], [9, 30, 4], None, mode=decode, bucket=3)
    backend.init_forward_metadata_out_graph(batch)
    assert backend.kv_indptr[:4].tolist() == [0, 9, 39, 43]  # what Triton reads


# Host syncs.


class NoHostSync(TorchDispatchMode):
    """Raises on what would wait for the device, or have a shape that depends on data."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "is_nonzero",
        "equal",
        "repeat_interleave.Tensor",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        assert not name.startswith(self.FORBIDDEN), f"host sync: {func}"
        if name.startswith("index.Tensor"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean index syncs"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_sync(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("host sync: a tensor was read on the host")

    with monkeypatch.context() as patch, NoHostSync():
        for name in ("tolist", "item", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.parametrize("sync", [lambda t: int(t.sum()), lambda t: t[t > 0], lambda t: t.tolist()])
def test_the_guard_notices_a_sync(monkeypatch, sync):
    with pytest.raises(AssertionError, match="sync"), no_host_sync(monkeypatch):
        sync(torch.ones(3))


@pytest.mark.parametrize("mode", ["on", "validate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_prepared_without_a_host_sync(monkeypatch, mode, layout):
    backend = make_backend(monkeypatch, mode=mode)
    backend.init_cuda_graph_state(5, 5 * N)
    monkeypatch.setattr(backend.kv_index_translator, "pack_read_stream", lambda plan, **kwargs: None)
    prefixes = [7, 0, 3]
    spec_info = layout(TREE.expand(3, N, N).clone(), prefixes, backend)
    batch = batch_of([1, 2, 3], prefixes, spec_info, bucket=5)
    monkeypatch.setattr(backend, "validation", None)  # its tick reads pinned host memory
    capture(backend, 5)
    with no_host_sync(monkeypatch):
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(None)
        backend.update_verify_buffers_to_fill_after_draft(spec_info, 5)


@pytest.mark.parametrize("layout", [tree_in_place, tree_full, chain])
def test_an_eager_step_is_prepared_without_a_host_sync(monkeypatch, layout):
    backend = make_backend(monkeypatch)
    monkeypatch.setattr(backend.kv_index_translator, "pack_read_stream", lambda plan, **kwargs: None)
    batch = batch_of([1, 2], [7, 0], layout(TREE.expand(2, N, N).clone(), [7, 0], backend))
    with no_host_sync(monkeypatch):
        backend.init_forward_metadata(batch)


# Sizes.

BIG = dict(width=64, heads=16, context=131_072, requests=48, cores=188)


def graph_state_bytes(monkeypatch, mode):
    backend = make_backend(monkeypatch, mode=mode, **BIG)
    monkeypatch.setattr(backend, "device", "meta")
    own = tensor_bytes(backend) - backend.req_to_token.nbytes + (backend.masks.nbytes if backend.masks else 0)
    backend.init_cuda_graph_state(48, 48 * 64)
    # On a GPU also the workspace; the CPU's is empty.
    workspace = workspace_bytes(batch=48, tree_size=64, heads=16)
    return own + backend.graph_bytes + workspace, backend


def test_graph_buffers_of_48_requests_at_131k_are_under_half_a_gigabyte(monkeypatch):
    """The inherited ones would be 29 GB: scratch, lists and masks by token."""
    total, backend = graph_state_bytes(monkeypatch, "on")
    assert total < 0.5e9
    assert backend.graph.indices.numel() >= 48 * (131_072 + 64)
    assert backend.cuda_graph_kv_indices.numel() >= 48 * 131_072


@pytest.mark.parametrize(("mode", "limit"), [("validate", 0.95e9), ("off", 0.95e9)])
def test_modes_that_need_the_stock_mask_add_its_size_alone(monkeypatch, mode, limit):
    total, backend = graph_state_bytes(monkeypatch, mode)
    full = 48 * 64 * (131_072 + 64)
    assert full < total < limit
    assert total - full < 0.5e9


def test_scratch_is_enough_for_both_widths_that_are_served(monkeypatch):
    """A step of one token a request can need more than one of many."""
    sizes = {1: 3000, 4: 1000}
    monkeypatch.setattr(
        kdtree_triton_serving, "mla_tree_verify_workspace_bytes", lambda b, s_q, h_q, device: sizes[s_q] * b
    )
    backend = make_backend(monkeypatch)
    assert backend.workspace.numel() == 3000 * MAX_REQUESTS


@pytest.mark.parametrize("width", [2, 3, 5])
def test_another_width_in_an_eager_step_is_not_the_kernels(monkeypatch, stock, width):
    backend = make_backend(monkeypatch)
    batch = batch_of([3], [5], chain_input(width), width=width, table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    assert backend.step is None and backend.fallbacks == {"neither 1 nor 4 tokens a request": 1}


@pytest.mark.skipif(sgl_kernel_sm120.build_info()["library"] is None, reason="no compiled library")
def test_the_workspace_stays_under_the_bound_that_sizes_it():
    compiled = sgl_kernel_sm120.attention._host_function("workspace_bytes")
    assert compiled(48, 64, 16, 188) <= workspace_bytes(batch=48, tree_size=64, heads=16)


# Modes and fallbacks.


def eager_tree(monkeypatch, mode, layer_fields=None, options=None, spec_info=None):
    backend = make_backend(monkeypatch, mode=mode)
    spec_info = spec_info or tree_apart(TREE.expand(2, N, N), None, None)
    batch = batch_of([3, 1], [5, 2], spec_info, table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    q, k = torch.randn(2 * N, NUM_HEADS * 576), torch.randn(2 * N, 1, 576)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    vars(layer).update(layer_fields or {})
    return backend, backend.forward_extend(q, k, k[..., :512], layer, batch, **(options or {}))


def test_off_is_the_stock_backend(monkeypatch, stock):
    backend, out = eager_tree(monkeypatch, "off", spec_info=chain_input(N))
    assert stock.calls == ["extend"] and (out == 7).all()
    assert backend.verify_mask is None and backend.tree_mask_mode == TreeMaskMode.FULL_MASK


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_off_captures_a_chain_without_the_dummy_mask(monkeypatch, algorithm):
    """A capture brings a dummy mask; DFLASH's replays bring none, so its graph must not read one."""
    backend = make_backend(monkeypatch, mode="off", algorithm=algorithm)
    backend.init_cuda_graph_state(5, 5 * N)
    capture(backend, 2)
    mask = backend.forward_metadata.custom_mask
    assert mask is (None if algorithm == "DFLASH" else backend.verify_mask.buffer)


def test_on_never_calls_the_stock_kernel(monkeypatch, stock):
    backend, out = eager_tree(monkeypatch, "on")
    assert stock.calls == [] and out.abs().max() < 7
    assert backend.tree_mask_mode == backend.verify_mask.mode == TreeMaskMode.QLEN_ONLY
    assert backend.fallbacks == {}


def test_validate_returns_the_stock_result(monkeypatch, stock):
    backend, out = eager_tree(monkeypatch, "validate")
    assert stock.calls == ["extend"] and (out == 7).all()
    (errors,) = backend.validation.errors.summary(backend.validation.errors.counters)
    assert errors.rows == errors.mismatches == 2 * N


def test_validate_gives_the_stock_kernel_the_mask_with_its_prefix(monkeypatch, stock):
    backend, _ = eager_tree(monkeypatch, "validate")
    expected = full_mask(TREE.expand(2, N, N).bool(), torch.tensor([5, 2]), N * (7 + 2 * N))
    assert torch.equal(backend.forward_metadata.custom_mask[: expected.numel()], expected)


def test_validate_in_a_graph_refills_the_stock_mask(monkeypatch):
    backend = make_backend(monkeypatch, mode="validate")
    backend.init_cuda_graph_state(3, 3 * N)
    capture(backend, 3)
    assert backend.forward_metadata.custom_mask is backend.masks.full
    for rows, prefixes in (([1, 2, 3], [30, 20, 10]), ([4], [3])):
        replay(backend, rows, prefixes, tree_apart(TREE.expand(len(rows), N, N), None, None), 3)
        visible = visible_of_full_mask(backend.masks.full, torch.tensor(prefixes), N)
        assert torch.equal(visible, TREE.expand(len(rows), N, N))


UNSERVED = [
    ({"sliding_window_size": 8}, {}, "sliding window"),
    ({"is_cross_attention": True}, {}, "cross attention"),
    ({"xai_temperature_len": 8}, {}, "temperature by length"),
    ({"logit_cap": 5.0, "logit_capping_method": "softsign"}, {}, "logit cap method"),
    ({"v_head_dim": 128}, {}, "head size"),
    ({"tp_k_head_num": 2}, {}, "number of heads"),
    ({"tp_q_head_num": 4}, {}, "number of heads"),
    ({}, {"sinks": torch.ones(2)}, "sinks"),
    ({}, {"score_mod": len}, "score mod"),
]


@pytest.mark.parametrize(("fields", "options", "reason"), UNSERVED)
def test_what_it_cannot_serve_goes_to_triton_and_is_counted(monkeypatch, stock, fields, options, reason):
    backend, out = eager_tree(monkeypatch, "on", fields, options, spec_info=chain_input(N))
    assert stock.calls == ["extend"] and (out == 7).all()
    assert backend.fallbacks == {f"{reason} (layer 0)": 1}


@pytest.mark.parametrize("both", [True, False])
def test_fp8_rows_are_scaled_on_the_way_in_and_out(monkeypatch, stock, both):
    """Written as k / k_scale, read as k * k_scale; without v_scale upstream reads them unscaled, and so do we."""
    backend = make_backend(monkeypatch)
    pool = backend.token_to_kv_pool
    pool.keys = pool.keys.to(torch.float8_e4m3fn)
    pool.values = pool.keys[..., :512]
    rows, prefixes = [3, 1], [5, 2]
    batch = batch_of(rows, prefixes, tree_apart(TREE.expand(2, N, N), None, None), table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2 * N, NUM_HEADS * 576, generator=generator) / 8
    k = torch.randn(2 * N, 1, 576, generator=generator)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    layer.k_scale, layer.k_scale_float = torch.tensor(0.5), 0.5
    layer.v_scale, layer.v_scale_float = (torch.tensor(0.25), 0.25) if both else (None, None)
    out = backend.forward_extend(q, k, k[..., :512], layer, batch)

    written = pool.keys[batch.out_cache_loc].float()
    assert torch.equal(written, (k / 0.5).to(torch.float8_e4m3fn).float())
    scale_k, scale_v = (0.5, 0.25) if both else (1.0, 1.0)
    for i, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        keys = pool.keys[backend.req_to_token[row, : prefix + N].long()].float()
        expected = naive_attention(
            q[i * N : (i + 1) * N].view(N, NUM_HEADS, 576), keys, keys[..., :512] * scale_v,
            lambda a, j, p=prefix: j < p or bool(TREE[a, j - p]), scaling=layer.scaling * scale_k,
        )  # fmt: skip
        found = out[i * N : (i + 1) * N].double()
        torch.testing.assert_close(found, expected.flatten(1), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_with_fp8_kv_both_kernels_are_compared_on_rounded_rows(monkeypatch, scaled):
    """The stock kernel reads a step's rows as they come; what it makes of them is returned, not compared."""
    backend = make_backend(monkeypatch, mode="validate", kv_dtype=torch.float8_e4m3fn)
    pool, rows, prefixes = backend.token_to_kv_pool, [3, 1], [5, 2]
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    scales = (0.5, 0.25) if scaled else (1.0, 1.0)
    if scaled:
        layer.k_scale, layer.k_scale_float = torch.tensor(0.5), 0.5
        layer.v_scale, layer.v_scale_float = torch.tensor(0.25), 0.25

    def stock(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        if save_kv_cache:
            self.write_latent(layer, forward_batch, k, v)
        out = torch.zeros(2 * N, NUM_HEADS * 512)
        for i, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
            own = slice(i * N, (i + 1) * N)
            cached = pool.keys[self.req_to_token[row, :prefix].long()].float()
            found = naive_attention(
                q[own].view(N, NUM_HEADS, 576), torch.cat([cached * scales[0], k[own]]),
                torch.cat([cached[..., :512] * scales[1], v[own]]),
                lambda a, j, p=prefix: j < p or bool(TREE[a, j - p]), scaling=layer.scaling,
            )  # fmt: skip
            out[own] = found.flatten(1).float()
        return out

    monkeypatch.setattr(TritonAttnBackend, "forward_extend", stock)
    batch = batch_of(rows, prefixes, tree_apart(TREE.expand(2, N, N), None, None), table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    generator = torch.Generator().manual_seed(5)
    q = 4 * torch.randn(2 * N, NUM_HEADS * 576, generator=generator)  # sharp: a rounded key moves the weights
    k = torch.randn(2 * N, 1, 576, generator=generator)
    out = backend.forward_extend(q, k, k[..., :512], layer, batch)
    (errors, *_) = VerifyErrors.summary(backend.validation.errors.counters)
    assert errors.rows == 2 * N and errors.mismatches == 0 and errors.max_rel < 1e-4
    assert torch.equal(out, stock(backend, q, k, k[..., :512], layer, batch, save_kv_cache=False))
    held = backend.verifier.run(backend.step, q, pool.keys, layer)
    assert (held - out).abs().max() > 0.02 * out.abs().max()  # what would have been compared


def test_a_tree_never_goes_to_triton_without_its_mask(monkeypatch, stock):
    with pytest.raises(NotImplementedError, match=r"layer 0 here \(sinks .layer 0.\).*--kdtree-verify off"):
        eager_tree(monkeypatch, "on", options={"sinks": torch.ones(2)})


def test_the_mask_is_kept_where_a_layer_is_known_to_go_to_triton(monkeypatch, stock):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_mqa = RadixAttention(NUM_HEADS, 576, 1.0, 1, 4, v_head_dim=512, sliding_window_size=8)
            self.attn_mha = RadixAttention(NUM_HEADS, 192, 1.0, NUM_HEADS, 4, v_head_dim=128)

    assert kdtree_serving.unserved_mla_layers(Model()) == {"sliding window": [4]}
    runner = make_runner()
    runner.model = Model()
    patch_settings(monkeypatch)
    backend = kdtree_triton_backend.KDTreeTritonBackend(runner)
    batch = batch_of([3], [5], tree_apart(TREE[None], None, None), table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    assert visible_of_full_mask(backend.forward_metadata.custom_mask, batch.seq_lens, N).equal(TREE[None].bool())


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND_V2])
def test_prefill_is_inherited_and_leaves_no_step(monkeypatch, stock, mode):
    """MIXED is a chunk of a prefill with the decode tokens of other requests in one batch."""
    backend, _ = eager_tree(monkeypatch, "on")
    monkeypatch.setattr(TritonAttnBackend, "init_forward_metadata", lambda self, batch: None)
    batch = SimpleNamespace(forward_mode=mode, batch_size=1)
    backend.init_forward_metadata(batch)
    assert backend.step is None
    backend.forward_extend(torch.zeros(1, 2 * 576), None, None, make_layer(2, 1, 576, 512), batch)
    assert stock.calls == ["extend"]


# Refusals of the factory.


@pytest.fixture
def factory(monkeypatch):
    """create(**fields of the runner), in the form over Triton; `values` are the settings."""
    values = patch_settings(monkeypatch)
    for name in ("exec", "spec", "parallel", "schedule"):
        monkeypatch.setattr(kdtree_backend, f"get_{name}", lambda name=name: getattr(values, name))
    monkeypatch.setattr(kdtree_torch_backend, "get_parallel", lambda: values.parallel)
    monkeypatch.setattr(kdtree_backend, "require_torch_cpu", lambda user: None)
    monkeypatch.setattr(kdtree_backend, "cuda_available_ops", lambda: ("mla_tree_verify",))
    monkeypatch.setattr(kdtree_backend.AttentionBackendRegistry, "register", lambda *a: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def create(**fields):
        runner = make_runner()
        vars(runner).update(fields)
        return kdtree_backend.create_kdtree_backend(runner)

    return SimpleNamespace(create=create, values=values)


def test_the_interpreter_selects_the_form_over_triton(factory, monkeypatch):
    assert type(factory.create()) is kdtree_triton_backend.KDTreeTritonBackend
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert type(factory.create()) is kdtree_torch_backend.KDTreeVerifyBackend


def test_a_drafter_gets_the_stock_backend(factory):
    assert type(factory.create(is_draft_worker=True)) is TritonAttnBackend


CUDA = dict(device="cuda", dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (CUDA | {"dtype": torch.float16}, "computes in bfloat16.*add --dtype bfloat16"),
        (CUDA | {"kv_cache_dtype": torch.float8_e5m2}, "not in torch.float8_e5m2; change --kv-cache-dtype"),
        (CUDA | {"device": "xpu"}, "not on xpu; use --attention-backend triton"),
        (
            {"req_to_token_pool": SimpleNamespace(size=257)},
            "at most 256 requests at once.*--max-running-requests is 257",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_at_start(factory, fields, message):
    with pytest.raises(ValueError, match=message):
        factory.create(**fields)


def test_a_gpu_without_compiled_kernels_is_refused(factory, monkeypatch):
    monkeypatch.setattr(kdtree_backend, "cuda_available_ops", tuple)
    with pytest.raises(ValueError, match="no CUDA kernels; install its wheel .*doctor"):
        factory.create(**CUDA)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_eagle_needs_no_backend_named_for_its_drafts(factory, algorithm):
    factory.values.spec.speculative_algorithm = algorithm
    assert type(factory.create()) is kdtree_triton_backend.KDTreeTritonBackend


def test_two_batch_overlap_is_refused_where_drafts_are_verified(factory):
    """Upstream splits a mask between the two batches by the FULL layout's offsets."""
    factory.values.exec.overlap.enable_two_batch_overlap = True
    with pytest.raises(ValueError, match="--enable-two-batch-overlap cannot split .*; leave that flag out"):
        factory.create()
    factory.values.spec.speculative_algorithm = None
    factory.create()


def test_a_graph_of_the_metadata_is_refused_where_drafts_are_verified(factory, monkeypatch):
    """NGRAM's mask has another address each step; validate mode has a host side."""
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    with pytest.raises(ValueError, match="SGLANG_ENABLE_METADATA_GLUE_GRAPH would freeze; unset it"):
        factory.create()


def test_batch_invariance_is_not_promised(factory):
    factory.values.exec.deterministic.enable_deterministic_inference = True
    with pytest.raises(ValueError, match="not batch-invariant; use --kdtree-verify off"):
        factory.create()
    factory.values.exec.kernel.kdtree_verify = "off"
    factory.create()


def test_decode_context_parallelism_is_refused(factory):
    factory.values.parallel.attn_dcp_size = 2
    with pytest.raises(ValueError, match="does not support --dcp-size above 1"):
        factory.create()


def test_the_start_up_line_says_what_runs_and_that_no_gpu_has(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        make_backend(monkeypatch, mode="validate").init_cuda_graph_state(5, 5 * N)
    made, line = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    assert "graph buffers 0.0 MB" in made and "graph buffers 0.0 MB" not in line
    for part in (
        "tp rank 0",
        "verify validate",
        "in torch",
        "mask QLEN_ONLY",
        "4 verified tokens",
        " MB",
        "page size 1",
    ):
        assert part in line
    assert line.endswith("page size 1.")


def test_the_start_up_line_names_a_gpu_on_which_this_form_has_not_run():
    assert kdtree_triton_serving.status_on("sm_90") == ""
    assert kdtree_triton_serving.status_on("sm_120") == "; this form has run on sm_90 only, not on sm_120 yet"
