# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 over Triton through captured steps: capture once, replay for batches that shrink and grow, with trees
and chains, against the op's reference. On a GPU in real CUDA graphs; on a CPU a "graph" is the list of calls that
a graph would hold, so that the same test runs, without the capture itself."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from srt.attention_naive import make_layer
from srt.layers.attention import against_triton
from srt.layers.attention.kdtree_triton_cases import (
    NUM_HEADS,
    batch_of,
    chain_input,
    draft_extend_batch,
    make_backend,
    make_draft_backend,
    tree_input,
)

from sgl_kernel_sm120 import MaskLayout, mla_tree_verify_reference
from sglang.srt.layers.attention import kdtree_serving
from sglang.srt.layers.attention.kdtree_verify import VerifyErrors
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

N, BUCKET, LAYERS = 4, 4, 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# (rows, prefix lengths, a tree or a chain); the pool's rows have 64 slots.
STEPS = [
    ([1, 2, 3, 4], [50, 40, 30, 7], True),
    ([5, 6], [3, 0], True),
    ([6], [44], False),
    ([2, 5, 1], [1, 31, 33], True),
]


class Graph:
    """What is called within ``record`` is called again, on the same tensors, by ``replay``."""

    def __init__(self, device):
        self.graph = torch.cuda.CUDAGraph() if device == "cuda" else None

    def record(self, step):
        self.step = step
        if self.graph is None:
            self.out = step()
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels load, the allocator warms up
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            self.out = step()

    def replay(self):
        if self.graph is None:
            self.out.copy_(self.step())
        else:
            self.graph.replay()
        return self.out


def random_inputs(device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BUCKET * N, NUM_HEADS * 576, generator=generator)
    k = torch.randn(BUCKET * N, 1, 576, generator=generator)
    return q.to(device, dtype), k.to(device, dtype)


def random_tree(count, seed):
    mask = torch.rand(count, N, N, generator=torch.Generator().manual_seed(seed)) < 0.5
    return mask.tril() | torch.eye(N, dtype=torch.bool)


def expected_of(backend, rows, prefixes, q, visible, layer, width=N):
    table = backend.req_to_token.cpu()
    lists = [table[row, : p + width] for row, p in zip(rows, prefixes, strict=True)]
    begins = torch.tensor([0] + [p + width for p in prefixes]).cumsum(0)
    keys = backend.token_to_kv_pool.keys.cpu().float()
    return mla_tree_verify_reference(
        q[: len(rows) * width].cpu().float().view(len(rows), width, NUM_HEADS, 576), keys, begins,
        torch.cat(lists), sm_scale=layer.scaling, tree_mask=visible, mask_layout=MaskLayout.QLEN,
    ).reshape(len(rows) * width, -1)  # fmt: skip


def close_to(out, expected, device):
    # On a GPU each weight is rounded by up to 2^-9 of itself: an error of up to 2^-8 where terms around 2 cancel.
    limit = dict(rtol=2e-5, atol=2e-5) if device == "cpu" else dict(rtol=2.0**-7, atol=2.0**-8)
    torch.testing.assert_close(out.cpu().float(), expected, **limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "in_parts"), [("on", False), ("on", True), ("validate", False)])
def test_one_captured_step_serves_all_batches(monkeypatch, device, mode, in_parts):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    backend = make_backend(monkeypatch, mode=mode, device=device, dtype=dtype)
    backend.init_cuda_graph_state(BUCKET, BUCKET * N)
    layers = [make_layer(NUM_HEADS, 1, 576, 512, layer_id=0) for _ in range(LAYERS)]
    # The stock kernel's part in validate mode: it writes KV, and gives a known result.
    stock_out = torch.zeros(BUCKET * N, NUM_HEADS * 512, device=device, dtype=dtype)

    def stock(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        self.write_latent(layer, forward_batch, k, v)
        return stock_out

    monkeypatch.setattr(TritonAttnBackend, "forward_extend", stock)
    q, k = random_inputs(device, dtype, seed=0)
    dummy = torch.ones(BUCKET * N * (1 + N), dtype=torch.bool, device=device)
    static = batch_of([], [], chain_input(N, dummy), bucket=BUCKET, table=backend.req_to_token, device=device)
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    fused, joined = kdtree_serving.mla_rows.set_mla_kv_concat_q, []
    monkeypatch.setattr(
        kdtree_serving.mla_rows, "set_mla_kv_concat_q", lambda *rows: joined.append(fused(*rows)) or joined[-1]
    )

    def step():
        backend.init_forward_metadata_in_graph(static)
        out = None
        for layer in layers:
            parts = {"q": q, "k": k}
            if in_parts:
                heads = q.view(-1, NUM_HEADS, 576)
                parts = {"q": heads[..., :512], "k": k[..., :512], "q_rope": heads[..., 512:], "k_rope": k[..., 512:]}
            out = backend.forward_extend(v=k[..., :512], layer=layer, forward_batch=static, **parts)
        return out.clone()

    graph = Graph(device)
    graph.record(step)
    assert bool(joined) == (in_parts and device == "cuda")
    for number, (rows, prefixes, is_tree) in enumerate(STEPS):
        visible = random_tree(len(rows), number) if is_tree else torch.ones(len(rows), N, N, dtype=torch.bool).tril()
        mask = visible.flatten().to(device)
        spec_info = tree_input(N, mask) if is_tree else chain_input(N)
        batch = batch_of(rows, prefixes, spec_info, bucket=BUCKET, table=backend.req_to_token, device=device)
        for static_input, value in zip((q, k), random_inputs(device, dtype, number + 1), strict=True):
            static_input.copy_(value)
        static.out_cache_loc.copy_(batch.out_cache_loc)
        backend.init_forward_metadata_out_graph(batch)
        if mode == "validate":
            # KV first, so that the expected result can be put in the stock kernel's place.
            backend.write_latent(layers[0], static, k, None)
            expected = expected_of(backend, rows, prefixes, q, visible, layers[0])
            stock_out[: len(rows) * N].copy_(expected)
        out = graph.replay()
        expected = expected_of(backend, rows, prefixes, q, visible, layers[0])
        close_to(out[: len(rows) * N], expected, device)
        assert out.isfinite().all()
    if mode == "validate":
        (errors,) = VerifyErrors.summary(backend.validation.errors.counters.cpu())
        # The recorded call counts on a CPU: it runs there, on padding alone.
        assert errors.rows == LAYERS * N * sum(len(rows) for rows, _, _ in STEPS)
        assert errors.mismatches == 0


@pytest.mark.parametrize("device", DEVICES)
def test_one_captured_draft_extend_serves_all_batches(monkeypatch, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    backend = make_draft_backend(monkeypatch, device=device, dtype=dtype)
    backend.init_cuda_graph_state(BUCKET, BUCKET * N)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    q, k = random_inputs(device, dtype, seed=0)
    static = draft_extend_batch([], [], bucket=BUCKET, table=backend.req_to_token, device=device)
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def step():
        backend.init_forward_metadata_in_graph(static)
        return backend.forward_extend(q, k, k[..., :512], layer, static).clone()

    graph = Graph(device)
    graph.record(step)
    for number, (rows, prefixes) in enumerate((([1, 2, 3, 4], [44, 40, 30, 7]), ([5, 6], [3, 0]), ([2], [31]))):
        lens = [prefix + N for prefix in prefixes]
        batch = draft_extend_batch(rows, lens, bucket=BUCKET, table=backend.req_to_token, device=device)
        for static_input, value in zip((q, k), random_inputs(device, dtype, number + 1), strict=True):
            static_input.copy_(value)
        static.out_cache_loc.copy_(batch.out_cache_loc)
        backend.init_forward_metadata_out_graph(batch)
        out = graph.replay()
        chains = torch.ones(len(rows), N, N, dtype=torch.bool).tril()
        expected = expected_of(backend, rows, prefixes, q, chains, layer)
        close_to(out[: len(rows) * N], expected, device)
        assert out.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_later_replay_changes_no_result_but_its_own(monkeypatch, device):
    """Of a layer before it in the same graph, of an eager step, of a replay that was copied out."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    backend = make_backend(monkeypatch, device=device, dtype=dtype)
    backend.init_cuda_graph_state(BUCKET, BUCKET * N)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    inputs = [random_inputs(device, dtype, seed=0) for _ in range(LAYERS)]
    static = batch_of([], [], chain_input(N), bucket=BUCKET, table=backend.req_to_token, device=device)
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def attend(batch, q, k):
        return backend.forward_extend(q, k, k[..., :512], layer, batch)

    def step():
        backend.init_forward_metadata_in_graph(static)
        return torch.stack([attend(static, q, k) for q, k in inputs])

    graph = Graph(device)
    graph.record(step)
    kept = []
    for number, (rows, prefixes, is_tree) in enumerate(STEPS):
        count, tokens = len(rows), len(rows) * N
        visible = random_tree(count, number) if is_tree else torch.ones(count, N, N, dtype=torch.bool).tril()
        spec_info = tree_input(N, visible.flatten().to(device)) if is_tree else chain_input(N)
        fields = dict(table=backend.req_to_token, device=device)
        # The eager step first: it leaves its lists and plan behind, which the replay must not read.
        eager = batch_of(rows, prefixes, spec_info, **fields)
        q, k = (value[:tokens] for value in random_inputs(device, dtype, 100 + number))
        backend.init_forward_metadata(eager)
        kept.append((attend(eager, q, k), expected_of(backend, rows, prefixes, q, visible, layer)))
        batch = batch_of(rows, prefixes, spec_info, bucket=BUCKET, **fields)
        static.out_cache_loc.copy_(batch.out_cache_loc)
        # One k, so that one expected result after the replay holds for all layers; q is each layer's own.
        for at, (static_q, static_k) in enumerate(inputs):
            static_q.copy_(random_inputs(device, dtype, 10 * number + at + 1)[0])
            static_k.copy_(random_inputs(device, dtype, number + 1)[1])
        backend.init_forward_metadata_out_graph(batch)
        out = graph.replay()
        for (static_q, _), own in zip(inputs, out, strict=True):
            expected = expected_of(backend, rows, prefixes, static_q, visible, layer)
            kept.append((own[:tokens].clone(), expected))
        for result, expected in kept:
            close_to(result, expected, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", [0, 1, 5])
@pytest.mark.parametrize("kind", ["tree", "decode", "draft extend"])
def test_a_capture_may_fill_lengths_with_anything(monkeypatch, device, kind, fill):
    """The runner captures and pads with the backend's own fill value, upstream's 1. Whatever it is, padding reads the
    sink alone, stays finite, and moves no request's list."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    fields = dict(device=device, dtype=dtype)
    if kind == "draft extend":
        backend = make_draft_backend(monkeypatch, **fields)
    else:
        backend = make_backend(monkeypatch, algorithm=None if kind == "decode" else "DDTREE", **fields)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    width = 1 if kind == "decode" else N
    backend.init_cuda_graph_state(BUCKET, BUCKET * width)
    layer = make_layer(NUM_HEADS, 1, 576, 512)
    forward = backend.forward_decode if kind == "decode" else backend.forward_extend
    q, k = (value[: BUCKET * width] for value in random_inputs(device, dtype, seed=0))

    def filled(rows, prefixes):
        batch = against_triton.make_step(kind, rows, prefixes, BUCKET, backend, device)
        batch.seq_lens[len(rows) :] = fill
        return batch

    static = filled([], [])
    backend.init_forward_metadata_out_graph(static, in_capture=True)

    def step():
        backend.init_forward_metadata_in_graph(static)
        return forward(q, k, k[..., :512], layer, static).clone()

    graph = Graph(device)
    graph.record(step)
    assert graph.replay().isfinite().all()
    for rows, prefixes in (([2, 5, 1], [1, 31, 33]), ([6], [44])):
        batch = filled(rows, prefixes)
        static.out_cache_loc.copy_(batch.out_cache_loc)
        backend.init_forward_metadata_out_graph(batch)
        out = graph.replay()
        assert out.isfinite().all()
        begins = backend.graph.indptr.tolist()
        padding = backend.graph.indices[begins[len(rows)] : begins[BUCKET]]
        assert not padding.any() and begins == sorted(begins)
        count, tokens = len(rows), len(rows) * width
        visible = torch.ones(count, width, width, dtype=torch.bool).tril()
        if kind == "tree":
            visible = against_triton.tree_mask(count, "cpu").view(count, N, N)
        expected = expected_of(backend, rows, prefixes, q, visible, layer, width)
        close_to(out[:tokens], expected, device)


def test_upstreams_own_kernels_give_the_same_when_interpreted():
    program = pathlib.Path(against_triton.__file__)
    paths = [str(program.parents[3]), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(r["kind"], r["captured"]) for r in rows] == [(k, c) for k in against_triton.STEPS for c in (False, True)]
    for row in rows:
        assert row["rows"] == row["expected"] and row["mismatches"] == 0 and row["max_rel"] < 1e-4, row


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "static buffers"])
@pytest.mark.parametrize("kind", against_triton.STEPS)
def test_upstreams_own_kernels_give_the_same_on_a_gpu(kind, captured, kv_dtype):
    errors = against_triton.compare(kind, captured, "cuda", torch.bfloat16, kv_dtype)
    assert errors.rows == against_triton.expected_rows(kind) and errors.mismatches == 0
