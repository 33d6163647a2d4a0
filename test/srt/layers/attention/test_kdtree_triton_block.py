# SPDX-License-Identifier: Apache-2.0
"""The block of a DFLASH drafter on kdtree_sm120: folded into decode steps of many heads, against attention written as
loops, with a stand-in for upstream's decode kernel; and upstream's own kernels, folded and not, on the same steps:
interpreted on a CPU by running this file as a program (Triton's interpreter is chosen while triton is imported), in
captured graphs on a GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from srt.attention_naive import make_layer, naive_attention, write_rows
from srt.layers.attention.kdtree_triton_cases import (
    MAX_REQUESTS,
    ROW_WIDTH,
    batch_of,
    chain_input,
    make_block_backend,
    make_runner,
    patch_settings,
)

from sglang.srt.layers.attention import kdtree_backend, kdtree_triton_block, triton_backend
from sglang.srt.layers.attention.kdtree_triton_block import KDTreeDraftBlockBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

# Query heads, KV heads, size of a head, tokens of a block: rows of one tile, of whole tiles, of a tile and a half.
SHAPES = [(4, 2, 32, 4), (8, 1, 32, 8), (6, 2, 16, 8), (2, 2, 16, 3)]
INTERPRETED = SHAPES[2:]


def decode_by_loops(q, keys, values, out, indptr, indices, sums, lses, num_splits, splits, scaling, k_scale, v_scale,
                    *, logit_cap, use_pdl, page_size):  # fmt: skip
    """In the place of upstream's decode kernel, with what it asks of its arguments."""
    group = q.shape[1] // keys.shape[1]
    assert keys.shape[1] == 1 or group <= 16 or group % 16 == 0
    assert sums.shape == (*q.shape[:2], splits, values.shape[2]) and lses.shape == sums.shape[:3]
    assert sums.is_contiguous() and lses.is_contiguous() and (num_splits[: len(q)] == splits).all()
    for i, (begin, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:], strict=False)):
        slots = indices[begin:end]
        out[i] = naive_attention(
            q[i : i + 1], keys[slots] * k_scale, values[slots] * v_scale, lambda a, j: True, scaling=scaling,
            logit_cap=logit_cap,
        )[0]  # fmt: skip


def block_layer(heads, kv_heads, dim, **fields):
    return make_layer(heads, kv_heads, dim, dim, **{"attn_type": AttentionType.ENCODER_ONLY} | fields)


def block_batch(backend, rows, lens, bucket=None):
    batch = batch_of(
        rows, lens, chain_input(backend.width), bucket=bucket, width=backend.width, table=backend.req_to_token,
        device=backend.device,
    )  # fmt: skip
    vars(batch).update(mha_one_shot=False, attn_attend_prefix_cache=None, extend_seq_lens_cpu=None)
    return batch


def inputs_of(batch, layer, width, seed, device="cpu", dtype=torch.float32):
    """q, k and v as the drafter has them: columns of one product."""
    heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(batch.batch_size * width, (heads + 2 * kv_heads) * dim, generator=generator).to(device, dtype)
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return q, k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim))


def expected_of(backend, rows, lens, q, layer):
    pool, width, parts = backend.token_to_kv_pool, backend.width, []
    scales = [getattr(layer, f"{name}_scale_float") or 1.0 for name in "kv"]
    for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
        slots = backend.req_to_token[row, : length + width].long()
        parts.append(
            naive_attention(
                q[i * width : (i + 1) * width].unflatten(-1, (layer.tp_q_head_num, -1)), pool.keys[slots] * scales[0],
                pool.values[slots] * scales[1], lambda a, j: True, scaling=layer.scaling, logit_cap=layer.logit_cap,
            ).flatten(1)
        )  # fmt: skip
    return torch.cat(parts)


@st.composite
def batches(draw, width):
    rows = draw(st.lists(st.integers(1, MAX_REQUESTS), min_size=1, max_size=3, unique=True))
    return rows, draw(st.lists(st.integers(0, 24), min_size=len(rows), max_size=len(rows)))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "width"), SHAPES)
@pytest.mark.parametrize("bucket", [None, 4], ids=["eager", "static buffers"])
@given(data=st.data())
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_position_sees_the_prefix_and_the_whole_block(monkeypatch, heads, kv_heads, dim, width, bucket, data):
    backend = make_block_backend(monkeypatch, heads=heads, kv_heads=kv_heads, dim=dim, width=width)
    backend.decode_attention_fwd = decode_by_loops
    layer = block_layer(heads, kv_heads, dim, logit_cap=data.draw(st.sampled_from([0.0, 3.0])))
    if bucket:
        backend.init_cuda_graph_state(bucket, bucket * width)
        backend.init_forward_metadata_out_graph(block_batch(backend, [], [], bucket), in_capture=True)
    for seed in range(2):
        rows, lens = data.draw(batches(width))
        batch = block_batch(backend, rows, lens, bucket)
        q, k, v = inputs_of(batch, layer, width, seed)
        if bucket:
            backend.init_forward_metadata_out_graph(batch)
        else:
            batch.seq_lens_sum = data.draw(st.sampled_from([None, sum(lens)]))
            backend.init_forward_metadata(batch)
        table = backend.req_to_token.clone()
        backend.req_to_token.fill_(-1)  # the scheduler may use it again
        out = backend.forward_extend(q, k, v, layer, batch)
        backend.req_to_token.copy_(table)
        real = len(rows) * width
        torch.testing.assert_close(
            out[:real].double(), expected_of(backend, rows, lens, q, layer), rtol=2e-5, atol=2e-5
        )
        assert out.isfinite().all() and out.shape == q.shape
        for i, (row, length) in enumerate(zip(rows, lens, strict=True)):
            written = backend.token_to_kv_pool.values[table[row, length : length + width].long()]
            assert (written == v[i * width : (i + 1) * width]).all()
    assert backend.fallbacks == {}


def test_an_fp8_cache_is_scaled_on_the_way_out(monkeypatch):
    backend = make_block_backend(monkeypatch)
    backend.decode_attention_fwd = decode_by_loops
    scale = torch.tensor(0.5)
    layer = block_layer(4, 2, 32, k_scale=scale, v_scale=scale * 2, k_scale_float=0.5, v_scale_float=1.0)

    def set_kv_buffer(layer, loc_info, k, v, k_scale, v_scale):
        write_rows(backend.token_to_kv_pool.keys, loc_info.loc, k / k_scale)
        write_rows(backend.token_to_kv_pool.values, loc_info.loc, v / v_scale)

    backend.token_to_kv_pool.set_kv_buffer = set_kv_buffer
    batch = block_batch(backend, [2, 3], [7, 0])
    backend.init_forward_metadata(batch)
    q, k, v = inputs_of(batch, layer, 4, 1)
    out = backend.forward_extend(q, k, v, layer, batch)
    torch.testing.assert_close(out.double(), expected_of(backend, [2, 3], [7, 0], q, layer), rtol=2e-5, atol=2e-5)


@pytest.fixture
def stock(monkeypatch):
    calls = []

    def stand_in(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        calls.append(forward_batch.forward_mode.name)
        return q.new_full(q.shape, 7.0)

    monkeypatch.setattr(TritonAttnBackend, "forward_extend", stand_in)
    return calls


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"attn_type": AttentionType.DECODER}, {}, "causal block"),
        ({"sliding_window_size": 16}, {}, "sliding window"),
        ({}, {"sinks": torch.zeros(4)}, "sinks"),
        ({"tp_q_head_num": 2}, {}, "heads"),
        ({"xai_temperature_len": 5}, {}, "temperature by length"),
        ({"logit_cap": 1.0, "logit_capping_method": "other"}, {}, "logit cap method"),
        ({}, {"save_kv_cache": False}, "KV from the pool"),
    ],
)
def test_what_cannot_be_folded_is_upstreams_and_counted(monkeypatch, stock, caplog, fields, options, reason):
    backend = make_block_backend(monkeypatch)
    layer = block_layer(4, 2, 32)
    batch = block_batch(backend, [2], [9])
    backend.init_forward_metadata(batch)
    inputs = inputs_of(batch, layer, 4, 1)
    vars(layer).update(fields)
    for _ in range(2):
        assert (backend.forward_extend(*inputs, layer, batch, **options) == 7).all()
    assert stock == ["TARGET_VERIFY"] * 2 and backend.fallbacks == {f"{reason} (layer 0)": 2}
    assert caplog.text.count(f"draft block: to the stock backend: {reason}") == 1


def test_another_width_and_other_steps_are_upstreams(monkeypatch, stock):
    backend = make_block_backend(monkeypatch)
    layer, batch = block_layer(4, 2, 32), block_batch(backend, [2], [9])
    inputs = inputs_of(batch, layer, 4, 1)
    batch.spec_info.num_tokens_per_req = 3
    backend.init_forward_metadata(batch)
    backend.forward_extend(*inputs, layer, batch)
    assert backend.fallbacks == {"another width than the block's (layer 0)": 1}
    batch.forward_mode = ForwardMode.EXTEND
    vars(batch).update(
        extend_prefix_lens=torch.tensor([5]), extend_prefix_lens_cpu=[5], extend_seq_lens=torch.tensor([4]),
        extend_seq_lens_cpu=[4],
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    backend.forward_extend(*inputs, layer, batch)
    assert stock == ["TARGET_VERIFY", "EXTEND"] and len(backend.fallbacks) == 1


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({}, True),
        ({"algorithm": "DDTREE"}, True),
        ({"algorithm": "DSPARK"}, False),
        ({"algorithm": "EAGLE"}, False),
        ({"mode": "validate"}, False),
        ({"mode": "off"}, False),
    ],
)
def test_whose_block_is_folded(monkeypatch, fields, served):
    backend = make_block_backend(monkeypatch, **fields)
    assert type(backend) is (KDTreeDraftBlockBackend if served else TritonAttnBackend)


def test_an_mla_drafter_and_a_runner_of_the_factory(monkeypatch):
    patch_settings(monkeypatch, algorithm="DFLASH")
    monkeypatch.setattr(triton_backend, "get_device_core_count", lambda gpu_id: 0)
    monkeypatch.setattr(kdtree_backend, "require_torch_cpu", lambda flag: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    runner = make_runner()
    runner.is_draft_worker = True
    assert type(kdtree_backend.create_kdtree_backend(runner)) is TritonAttnBackend
    monkeypatch.setattr(kdtree_triton_block, "create_block_backend", lambda runner: ("of", runner))
    assert kdtree_backend.create_kdtree_backend(runner) == ("of", runner)


@pytest.mark.parametrize("cores", [1, 132, 188])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (64, 8), (4, 4)])
def test_the_splits_fill_the_device_once_and_the_scratch_holds_them(monkeypatch, cores, heads, kv_heads):
    requests = 48
    backend = make_block_backend(monkeypatch, heads=heads, kv_heads=kv_heads, width=16, cores=cores, requests=requests)
    tiles = kv_heads * -(-backend.rows // 16)
    for size in range(1, requests + 1):
        splits = backend.splits_of(size)
        assert splits & (splits - 1) == 0 and 1 <= splits <= 64
        assert splits == 1 or size * tiles * splits <= cores
        assert size * kv_heads * backend.rows * splits <= backend.lses.numel() == backend.sums.numel() / 32
        assert backend.num_splits[splits].tolist() == [splits] * requests
    backend.init_cuda_graph_state(4, 64)
    assert backend.cuda_graph_kv_indices.numel() == 4 * backend.row_width


# Upstream's kernels, folded and not.

STEPS = [([2, 5, 1], [0, 33, 31]), ([6], [40])]
BUCKET = 4


def differences(device, dtype, shape, *, captured, kv_dtype=None, page_size=1):
    """-> of each of STEPS the largest difference, over the largest element, and calls that went to the stock kernel"""
    heads, kv_heads, dim, width = shape
    with pytest.MonkeyPatch.context() as monkeypatch:
        backend = make_block_backend(
            monkeypatch, heads=heads, kv_heads=kv_heads, dim=dim, width=width, device=device, dtype=dtype,
            kv_dtype=kv_dtype, page_size=page_size, cores=64,
        )  # fmt: skip
        layer = block_layer(heads, kv_heads, dim)
        static = block_batch(backend, [], [], BUCKET)
        static_inputs = [tensor.contiguous() for tensor in inputs_of(static, layer, width, 9, device, dtype)]
        static_inputs[0] = static_inputs[0].clone()
        graph = outs = None

        def both(inputs, batch):
            folded = backend.forward_extend(*inputs, layer, batch)
            q, *kv = inputs
            if kv_dtype is not None:  # the extend kernel reads the rows of a block before they are rounded
                kv = [rows.to(kv_dtype).to(dtype) for rows in kv]
            return folded, TritonAttnBackend.forward_extend(backend, q, *kv, layer, batch)

        if captured:
            backend.init_cuda_graph_state(BUCKET, BUCKET * width)
            backend.init_forward_metadata_out_graph(static, in_capture=True)
            if device == "cuda":
                stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
                with torch.cuda.stream(stream):
                    both(static_inputs, static)  # kernels load
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph):
                    outs = both(static_inputs, static)
        found = []
        for seed, (rows, lens) in enumerate(STEPS):
            batch = block_batch(backend, rows, lens, BUCKET if captured else None)
            inputs = inputs_of(batch, layer, width, seed, device, dtype)
            if captured:
                for tensor, value in zip(static_inputs, inputs, strict=True):
                    tensor.copy_(value)
                static.out_cache_loc.copy_(batch.out_cache_loc)
                backend.init_forward_metadata_out_graph(batch)
                if graph is None:
                    outs = both(static_inputs, static)
                else:
                    graph.replay()
            else:
                backend.init_forward_metadata(batch)
                outs = both(inputs, batch)
            folded, plain = (out[: len(rows) * width].float() for out in outs)
            found.append(float((folded - plain).abs().max() / plain.abs().max()))
        return found, backend.fallbacks


def test_upstreams_kernels_give_the_same_folded_when_interpreted():
    program = pathlib.Path(__file__)
    paths = [str(program.parents[3]), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2 * len(INTERPRETED)
    for row in rows:
        assert row["fallbacks"] == {} and max(row["differences"]) < 1e-5, row


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("shape", [(8, 1, 128, 8), (64, 8, 128, 16), (12, 2, 64, 10)], ids=str)
def test_upstreams_kernels_give_the_same_folded_on_a_gpu(shape, captured, kv_dtype, page_size):
    """bf16: two roundings of the weights and one of the result. fp8: upstream rounds queries and weights to it."""
    found, fallbacks = differences(
        "cuda", torch.bfloat16, shape, captured=captured, kv_dtype=kv_dtype, page_size=page_size
    )
    assert fallbacks == {} and max(found) < (2.0**-6 if kv_dtype is None else 2.0**-3)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1" and ROW_WIDTH >= 40 + 8
    for shape in INTERPRETED:
        for captured in (False, True):
            found, fallbacks = differences("cpu", torch.float32, shape, captured=captured)
            print(json.dumps({"differences": found, "fallbacks": fallbacks}), flush=True)
