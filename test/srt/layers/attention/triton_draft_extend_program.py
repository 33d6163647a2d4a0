# SPDX-License-Identifier: Apache-2.0
"""Run with TRITON_INTERPRET=1 by test_kdtree_triton_draft.py: upstream's own Triton extend kernel and ours on the same
draft extend, eager and through static buffers. Prints the counters of validate mode as JSON."""

import json
import os
import sys

import pytest
import torch
from srt.attention_naive import make_layer
from srt.layers.attention.kdtree_triton_cases import NUM_HEADS, draft_extend_batch, make_draft_backend

N = 4


def program() -> list[dict]:
    assert os.environ["TRITON_INTERPRET"] == "1"
    rows = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for graphs in (False, True):
            backend = make_draft_backend(monkeypatch, mode="validate")
            if graphs:
                backend.init_cuda_graph_state(3, 3 * N)
                backend.init_forward_metadata_out_graph(draft_extend_batch([], [], bucket=3), in_capture=True)
            for seed, (requests, lens) in enumerate((([2, 5, 1], [N, 37, 33]), ([6], [48]))):
                batch = draft_extend_batch(requests, lens, bucket=3 if graphs else None, table=backend.req_to_token)
                if graphs:
                    backend.init_forward_metadata_out_graph(batch)
                    backend.init_forward_metadata_in_graph(None)
                else:
                    backend.init_forward_metadata(batch)
                generator = torch.Generator().manual_seed(seed)
                total = batch.batch_size * N
                q = torch.randn(total, NUM_HEADS * 576, generator=generator)
                k = torch.randn(total, 1, 576, generator=generator)
                layer = make_layer(NUM_HEADS, 1, 576, 512)
                backend.forward_extend(q, k, k[..., :512].clone(), layer, batch)
            (errors,) = backend.validation.errors.summary(backend.validation.errors.counters)
            rows.append({"rows": errors.rows, "max_rel": errors.max_rel, "mismatches": errors.mismatches})
    return rows


if __name__ == "__main__":
    print(json.dumps(program()))
    sys.stdout.flush()
