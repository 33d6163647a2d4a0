# SPDX-License-Identifier: Apache-2.0
"""Upstream's own Triton kernels and ours on the same steps, in validate mode: trees, chains, plain decoding and the
draft extend, eager and through static buffers. On a GPU as they are; on a CPU as a program of its own with
TRITON_INTERPRET=1, which prints the counters as JSON (Triton's interpreter is chosen while triton is imported)."""

import json
import os

import pytest
import torch
from srt.attention_naive import make_layer
from srt.layers.attention.kdtree_triton_cases import (
    NUM_HEADS,
    batch_of,
    chain_input,
    draft_extend_batch,
    make_backend,
    make_draft_backend,
    tree_input,
)

from sglang.srt.model_executor.forward_batch_info import ForwardMode

N, BUCKET = 4, 4
# Rows of req_to_token and lengths of the prefix; padded to BUCKET where the step is captured.
BATCHES = [([2, 5, 1], [0, 33, 31]), ([6], [44])]
STEPS = ("tree", "chain", "decode", "draft extend")


def tree_mask(count, device):
    generator = torch.Generator().manual_seed(count)
    mask = torch.rand(count, N, N, generator=generator) < 0.5
    return (mask.tril() | torch.eye(N, dtype=torch.bool)).flatten().to(device)


def make_step(kind, rows, prefixes, bucket, backend, device):
    if kind == "draft extend":
        lens = [prefix + N for prefix in prefixes]
        return draft_extend_batch(rows, lens, bucket=bucket, table=backend.req_to_token, device=device)
    if kind == "decode":
        mode, spec_info, lens = ForwardMode.DECODE, None, [prefix + 1 for prefix in prefixes]
    else:
        mode, lens = ForwardMode.TARGET_VERIFY, prefixes
        spec_info = tree_input(N, tree_mask(len(rows), device)) if kind == "tree" else chain_input(N)
    table = backend.req_to_token
    batch = batch_of(rows, lens, spec_info, mode=mode, bucket=bucket, table=table, device=device)
    vars(batch).update(mha_one_shot=False, attn_attend_prefix_cache=None, extend_seq_lens_cpu=None)
    return batch


def compare(kind, captured, device, dtype, kv_dtype=None):
    """-> counters of the one layer after all BATCHES"""
    with pytest.MonkeyPatch.context() as monkeypatch:
        fields = {"mode": "validate", "device": device, "dtype": dtype, "kv_dtype": kv_dtype}
        if device == "cuda":
            fields["cores"] = torch.cuda.get_device_properties(0).multi_processor_count
        if kind == "draft extend":
            backend = make_draft_backend(monkeypatch, **fields)
        else:
            backend = make_backend(monkeypatch, algorithm=None if kind == "decode" else "DDTREE", **fields)
        layer = make_layer(NUM_HEADS, 1, 576, 512)
        static = None
        if captured:
            tokens = 1 if kind == "decode" else N
            backend.init_cuda_graph_state(BUCKET, BUCKET * tokens)
            static = make_step(kind, [], [], BUCKET, backend, device)
            backend.init_forward_metadata_out_graph(static, in_capture=True)
        for seed, (rows, prefixes) in enumerate(BATCHES):
            batch = make_step(kind, rows, prefixes, BUCKET if captured else None, backend, device)
            if captured:
                backend.init_forward_metadata_out_graph(batch)
                backend.init_forward_metadata_in_graph(batch)
            else:
                backend.init_forward_metadata(batch)
            generator = torch.Generator().manual_seed(seed)
            total = batch.batch_size * (1 if kind == "decode" else N)
            q = torch.randn(total, NUM_HEADS * 576, generator=generator).to(device, dtype)
            k = torch.randn(total, 1, 576, generator=generator).to(device, dtype)
            forward = backend.forward_decode if kind == "decode" else backend.forward_extend
            out = forward(q, k, k[..., :512].clone(), layer, batch)
            assert out.isfinite().all()
        (errors,) = backend.validation.errors.summary(backend.validation.errors.counters.cpu())
        return errors


def expected_rows(kind):
    return (1 if kind == "decode" else N) * sum(len(rows) for rows, _ in BATCHES)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    for kind in STEPS:
        for captured in (False, True):
            errors = compare(kind, captured, "cpu", torch.float32)
            row = {"kind": kind, "captured": captured, "rows": errors.rows, "expected": expected_rows(kind)}
            print(json.dumps(row | {"max_rel": errors.max_rel, "mismatches": errors.mismatches}), flush=True)
