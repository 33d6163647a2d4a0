# SPDX-License-Identifier: Apache-2.0
"""The draft extend of an EAGLE-type MLA drafter on kdtree_sm120, on a CPU: lists of padded and shrinking batches
through static buffers, causal attention over the whole context, and what stays on Triton, whose kernels are
stand-ins."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from srt.attention_naive import make_layer, naive_attention
from srt.layers.attention.kdtree_triton_cases import (
    MAX_REQUESTS,
    NUM_HEADS,
    draft_extend_batch,
    make_draft_backend,
    make_runner,
    patch_settings,
)

from sglang.srt.layers.attention import attention_registry, kdtree_triton_draft
from sglang.srt.layers.attention.kdtree_triton_draft import KDTreeDraftExtendBackend
from sglang.srt.layers.attention.kdtree_triton_serving import tensor_bytes
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import draft_utils

N = 4


@pytest.fixture
def stock(monkeypatch):
    """Triton's kernels: counts calls, writes KV as they do, and gives what the test puts into `answer`, or 7."""
    record = SimpleNamespace(calls=[], answer=None)

    def stand_in(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        record.calls.append(forward_batch.forward_mode.name)
        KDTreeDraftExtendBackend.write_latent(self, layer, forward_batch, k, v)
        return record.answer if record.answer is not None else q.new_full((q.shape[0], NUM_HEADS * 512), 7.0)

    monkeypatch.setattr(TritonAttnBackend, "forward_extend", stand_in)
    return record


def run_layer(backend, batch, rows=None, seed=3):
    generator = torch.Generator().manual_seed(seed)
    total = (rows or batch.batch_size) * N
    q = torch.randn(total, NUM_HEADS * 576, generator=generator)
    k = torch.randn(total, 1, 576, generator=generator)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    return q, layer, backend.forward_extend(q, k, k[..., :512], layer, batch)


def naive(backend, rows, lens, q, layer):
    parts = []
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        keys = backend.token_to_kv_pool.keys[backend.req_to_token[row, :length].long()]
        parts.append(
            naive_attention(
                q[i * N : (i + 1) * N].view(N, NUM_HEADS, 576), keys, keys[..., :512],
                lambda a, j, p=length - N: j <= p + a, scaling=layer.scaling,
            ).flatten(1)
        )  # fmt: skip
    return torch.cat(parts)


def poison_all_but(backend, rows, lens):
    keys = backend.token_to_kv_pool.keys
    used = torch.zeros(len(keys), dtype=torch.bool)
    used[0] = True
    for row, length in zip(rows, lens, strict=True):
        used[backend.req_to_token[row, :length].long()] = True
    keys[~used] = torch.nan


@pytest.mark.parametrize("known_sum", [True, False])
def test_an_eager_draft_extend_is_causal_over_the_whole_context(monkeypatch, stock, known_sum):
    backend = make_draft_backend(monkeypatch)
    rows, lens = [2, 5, 1], [N, 37, 11]
    batch = draft_extend_batch(rows, lens, table=backend.req_to_token)
    if known_sum:
        batch.seq_lens_sum = sum(lens) - N * len(rows)  # upstream leaves the sum of before the window there
    backend.init_forward_metadata(batch)
    poison_all_but(backend, rows, lens)
    q, layer, out = run_layer(backend, batch)
    torch.testing.assert_close(out.double(), naive(backend, rows, lens, q, layer), rtol=2e-5, atol=2e-5)
    assert stock.calls == [] and backend.fallbacks == {}


@pytest.mark.parametrize("mode", ["on", "validate"])
def test_a_replayed_draft_extend_follows_its_batch(monkeypatch, stock, mode):
    backend = make_draft_backend(monkeypatch, mode=mode)
    backend.init_cuda_graph_state(4, 4 * N)
    capture_batch = draft_extend_batch([], [], bucket=4)
    capture_batch.spec_info.extend_seq_lens_tensor = None  # as upstream's capture leaves it
    backend.init_forward_metadata_out_graph(capture_batch, in_capture=True)
    step = backend.step
    assert step.tree_mask is None and step.batch_size == 4
    for rows, lens in (([1, 2, 3, 4], [50, 40, 30, 7]), ([6, 5], [N, 33])):
        batch = draft_extend_batch(rows, lens, bucket=4, table=backend.req_to_token)
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(None)
        table = backend.req_to_token.clone()
        backend.req_to_token.fill_(-1)  # the scheduler may use it again
        q, layer, out = run_layer(backend, batch)
        backend.req_to_token.copy_(table)
        expected = naive(backend, rows, lens, q, layer)
        real = len(rows) * N
        if mode == "validate":
            assert stock.calls.pop() == "DRAFT_EXTEND_V2" and (out == 7).all()
            out = backend.verifier.run(step, q, backend.token_to_kv_pool.keys, layer)
        torch.testing.assert_close(out[:real].double(), expected, rtol=2e-5, atol=2e-5)
        assert out.isfinite().all()
        assert step.rows.tolist() == rows + [0] * (4 - len(rows))
    if mode == "validate":
        (errors,) = backend.validation.errors.summary(backend.validation.errors.counters)
        assert errors.rows == errors.mismatches == 6 * N
        assert backend.validation.title == "kdtree_sm120 validate, draft extend"


@given(
    st.lists(
        st.integers(1, 4).flatmap(
            lambda size: st.tuples(
                st.permutations(range(1, MAX_REQUESTS + 1)).map(lambda rows: rows[:size]),
                st.lists(st.integers(N, 48), min_size=size, max_size=size),
            )
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_replay_reads_its_own_lists(captured, batches):
    backend, step = captured
    for rows, lens in batches:
        backend.init_forward_metadata_out_graph(draft_extend_batch(rows, lens, bucket=4))
        expected = [backend.req_to_token[row, :n].tolist() for row, n in zip(rows, lens, strict=True)]
        expected += [[0] * N] * (4 - len(rows))  # padding: the sink, as often as the window is wide
        begins = step.indptr.tolist()
        assert [step.indices[a:b].tolist() for a, b in zip(begins, begins[1:], strict=False)] == expected
        # What Triton would read, for layers that are not served: the committed tokens alone.
        stock_begins = backend.kv_indptr[: len(rows) + 1].tolist()
        stock = [
            backend.cuda_graph_kv_indices[a:b].tolist() for a, b in zip(stock_begins, stock_begins[1:], strict=False)
        ]
        assert stock == [entry[: n - N] for entry, n in zip(expected, lens, strict=False)]


@pytest.fixture
def captured(monkeypatch):
    backend = make_draft_backend(monkeypatch)
    backend.init_cuda_graph_state(4, 4 * N)
    backend.init_forward_metadata_out_graph(draft_extend_batch([], [], bucket=4), in_capture=True)
    return backend, backend.step


def test_a_batch_padded_by_data_parallelism_stays_finite(monkeypatch, stock):
    backend = make_draft_backend(monkeypatch)
    batch = draft_extend_batch([3], [21], table=backend.req_to_token)
    batch.batch_size = 2
    for name, value in (("req_pool_indices", 0), ("seq_lens", 1), ("extend_seq_lens", N), ("extend_prefix_lens", 0)):
        setattr(batch, name, torch.cat([getattr(batch, name), torch.tensor([value])]))
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(N, dtype=torch.int64)])
    batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = [N, N], [17, 0]
    backend.init_forward_metadata(batch)
    q, layer, out = run_layer(backend, batch)
    torch.testing.assert_close(out[:N].double(), naive(backend, [3], [21], q, layer), rtol=2e-5, atol=2e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_tokens_per_req": 3}, "another width than the tree's"),
        ({"num_front_tokens": 2}, "tokens before the window"),
    ],
)
def test_windows_of_another_shape_stay_on_triton(monkeypatch, stock, fields, reason):
    backend = make_draft_backend(monkeypatch)
    batch = draft_extend_batch([2], [9], table=backend.req_to_token)
    vars(batch.spec_info).update(fields)
    backend.init_forward_metadata(batch)
    _, _, out = run_layer(backend, batch)
    assert stock.calls == ["DRAFT_EXTEND_V2"] and (out == 7).all()
    assert backend.fallbacks == {reason: 1}


def test_the_drafters_prefill_is_tritons(monkeypatch, stock):
    backend = make_draft_backend(monkeypatch)
    batch = draft_extend_batch([2], [9], table=backend.req_to_token)
    backend.init_forward_metadata(batch)
    batch.forward_mode = ForwardMode.EXTEND
    backend.init_forward_metadata(batch)
    _, _, out = run_layer(backend, batch)
    assert backend.step is None and stock.calls == ["EXTEND"] and backend.fallbacks == {}


def test_graph_buffers_are_sized_by_requests(monkeypatch):
    """Upstream's would hold splits of partial sums for every draft token: 25.8 GB."""
    backend = make_draft_backend(monkeypatch, width=64, heads=16, context=131_072, requests=48, cores=188)
    monkeypatch.setattr(backend, "device", "meta")
    before = tensor_bytes(backend)
    backend.init_cuda_graph_state(48, 48 * 64)
    assert backend.graph.indices.numel() >= 48 * (131_072 + 64)
    assert backend.graph_bytes == tensor_bytes(backend) - before < 0.2e9


# Which drafters, and how upstream's factory finds it.


@pytest.mark.parametrize(
    ("fields", "kv", "reason"),
    [
        ({"use_mla_backend": False}, {}, "no MLA model"),
        ({}, {"kv_lora_rank": 256}, r"MLA heads of 320 \(latent 256\)"),
        ({"device": "cuda", "dtype": torch.float16}, {}, "runs in torch.float16"),
        (
            {"device": "cuda", "dtype": torch.bfloat16, "kv_cache_dtype": torch.float8_e5m2}, {},
            "KV in torch.float8_e5m2",
        ),
    ],
)  # fmt: skip
def test_other_drafters_keep_triton_and_the_log_says_why(monkeypatch, caplog, fields, kv, reason):
    patch_settings(monkeypatch, algorithm="EAGLE3")
    monkeypatch.setattr(kdtree_triton_draft, "TritonAttnBackend", lambda runner: "triton's")
    runner = make_runner()
    vars(runner).update(fields)
    vars(runner.model_config).update(kv)
    with caplog.at_level("INFO", logger=kdtree_triton_draft.__name__):
        assert kdtree_triton_draft.create_draft_extend_backend(runner) == "triton's"
    assert "the draft extend stays on Triton" in caplog.text
    assert re.search(reason, caplog.text)


def test_off_is_the_stock_draft_extend(monkeypatch):
    assert type(make_draft_backend(monkeypatch, mode="off")) is TritonAttnBackend


@pytest.fixture
def factory(monkeypatch):
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("kdtree_sm120", "kdtree_sm120"))
    monkeypatch.setattr(kdtree_triton_draft, "create_draft_extend_backend", lambda runner: SimpleNamespace(of=runner))
    monkeypatch.setattr(attention_registry, "attn_backend_wrapper_for_draft_decode", lambda runner, backend: backend)
    runner = SimpleNamespace(draft_attention_backend=None)
    return draft_utils.DraftBackendFactory(runner, topk=2, speculative_num_steps=3)


def test_an_eagle_drafter_may_follow_its_target(factory):
    extend = factory._create_backend("prefill_attention_backend", {"triton": None}, "{backend_type}")
    assert extend.of is factory.draft_model_runner
    assert extend.prefill_attention_backend_str == extend.decode_attention_backend_str == "kdtree_sm120"


def test_the_draft_steps_of_an_eagle_drafter_stay_on_triton(factory):
    steps = SimpleNamespace(attn_backends=[SimpleNamespace()])
    backends = {"triton": lambda: ("triton", steps)}
    got = factory._create_backend("decode_attention_backend", backends, "{backend_type}", stamps_children=True)
    assert got is steps and steps.attn_backends[0].decode_attention_backend_str == "triton"


def test_a_named_draft_backend_goes_first(factory):
    factory.draft_attn_backend = "triton"
    chosen = SimpleNamespace()
    got = factory._create_backend("prefill_attention_backend", {"triton": lambda: ("triton", chosen)}, "{backend_type}")
    assert got is chosen and chosen.prefill_attention_backend_str == "triton"
