# SPDX-License-Identifier: Apache-2.0
"""torch_reference against attention written as a double loop, in every forward mode."""

from types import SimpleNamespace

import pytest
import torch
from srt.attention_naive import Pool, make_layer, naive_attention

from sglang.srt.layers.attention.torch_reference_backend import TorchReferenceAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode

ROWS = [4, 0, 2]  # rows of req_to_token, out of order
PREFIXES = [0, 1, 23]
NUM_SLOTS = 400
SHAPES = {"dense": (4, 4, 16, 16), "grouped": (6, 2, 16, 8), "latent": (3, 1, 24, 16)}


def make_case(shape, queries, *, dtype=torch.float32, seed=0):
    """A pool whose prefixes are filled, requests on shuffled slots, and the new tokens' q, k, v."""
    num_heads, num_kv_heads, head_dim, v_head_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(6, 64, dtype=torch.int32)
    slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[: len(ROWS) * 64].view(len(ROWS), 64) + 1
    table[ROWS] = slots.int()
    pool = Pool(NUM_SLOTS, num_kv_heads, head_dim, v_head_dim, mla=shape == "latent", dtype=dtype)
    for row, prefix in zip(ROWS, PREFIXES, strict=True):
        filled = table[row, :prefix].long()
        pool.keys[filled] = torch.randn(prefix, num_kv_heads, head_dim, generator=generator).to(dtype)
        if not pool.mla:
            pool.values[filled] = torch.randn(prefix, num_kv_heads, v_head_dim, generator=generator).to(dtype)
    total = sum(queries)
    q = torch.randn(total, num_heads * head_dim, generator=generator).to(dtype)
    k = torch.randn(total, num_kv_heads, head_dim, generator=generator).to(dtype)
    v = k[..., :v_head_dim] if pool.mla else torch.randn(total, num_kv_heads, v_head_dim, generator=generator).to(dtype)
    write = [table[row, p : p + n] for row, p, n in zip(ROWS, PREFIXES, queries, strict=True)]
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool)
    return SimpleNamespace(
        backend=TorchReferenceAttnBackend(runner), pool=pool, table=table, q=q, k=k, v=v, queries=queries,
        out_cache_loc=torch.cat(write).long(), layer=make_layer(num_heads, num_kv_heads, head_dim, v_head_dim),
    )  # fmt: skip


def run(case, mode, *, spec_info=None):
    counted = 0 if mode.is_target_verify() else 1
    lengths = [p + counted * n for p, n in zip(PREFIXES, case.queries, strict=True)]
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=len(ROWS), req_pool_indices=torch.tensor(ROWS), seq_lens=torch.tensor(lengths),
        extend_seq_lens=torch.tensor(case.queries), spec_info=spec_info, out_cache_loc=case.out_cache_loc,
        out_cache_loc_is_physical=True,
    )  # fmt: skip
    case.backend.init_forward_metadata(batch)
    return case.backend.forward(case.q, case.k, case.v, case.layer, batch)


def expected(case, sees, *, logit_cap=0.0):
    """sees(request, i, j): whether query i sees key j of its request, prefix keys first."""
    parts, start = [], 0
    for request, (row, prefix, n) in enumerate(zip(ROWS, PREFIXES, case.queries, strict=True)):
        slots = case.table[row, : prefix + n].long()
        q = case.q[start : start + n].view(n, case.layer.tp_q_head_num, -1)
        parts.append(
            naive_attention(
                q, case.pool.keys[slots], case.pool.values[slots], lambda i, j, r=request: sees(r, i, j),
                scaling=case.layer.scaling, logit_cap=logit_cap,
            ).flatten(1)
        )  # fmt: skip
        start += n
    return torch.cat(parts)


def causal(request, i, j):
    return j <= PREFIXES[request] + i


def close(out, reference):
    torch.testing.assert_close(out.double(), reference, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_extend_behind_a_cached_prefix(shape):
    case = make_case(shape, [5, 1, 7])
    close(run(case, ForwardMode.EXTEND), expected(case, causal))


@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape):
    case = make_case(shape, [1, 1, 1])
    close(run(case, ForwardMode.DECODE), expected(case, causal))


def chain_input(n, mask=None, cls=DFlashVerifyInput, **fields):
    return cls(draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=n, custom_mask=mask, **fields)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_is_verified_causally(shape):
    case = make_case(shape, [4, 4, 4])
    close(run(case, ForwardMode.TARGET_VERIFY, spec_info=chain_input(4)), expected(case, causal))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_verified_through_its_mask(shape, seed):
    """Random masks, also ones that see later nodes: the mask is the only rule among draft tokens."""
    n = 6
    case = make_case(shape, [n] * 3, seed=seed)
    mask = torch.rand(3, n, n, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[0, 2] = False  # with an empty prefix this row sees nothing
    spec_info = chain_input(n, mask.flatten(), DDTreeVerifyInput)

    out = run(case, ForwardMode.TARGET_VERIFY, spec_info=spec_info)

    def sees(request, i, j):
        prefix = PREFIXES[request]
        return j < prefix or bool(mask[request, i, j - prefix])

    close(out, expected(case, sees))
    assert torch.equal(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize("window", [0, 3, 100])
def test_sliding_window_counts_the_query_itself_extra(window):
    case = make_case("grouped", [5, 2, 6])
    case.layer.sliding_window_size = window

    def sees(request, i, j):
        return causal(request, i, j) and PREFIXES[request] + i - j <= window

    close(run(case, ForwardMode.EXTEND), expected(case, sees))


def test_a_draft_block_sees_itself_both_ways():
    case = make_case("grouped", [4, 4, 4])
    case.layer.attn_type = AttentionType.ENCODER_ONLY
    close(run(case, ForwardMode.TARGET_VERIFY, spec_info=chain_input(4)), expected(case, lambda *_: True))


def test_logit_cap():
    case = make_case("dense", [3, 3, 3])
    case.layer.logit_cap, case.layer.scaling = 1.5, 4.0
    close(run(case, ForwardMode.EXTEND), expected(case, causal, logit_cap=1.5))


def test_bfloat16_rounds_only_inputs_and_the_output():
    case = make_case("latent", [3, 3, 3], dtype=torch.bfloat16)
    out = run(case, ForwardMode.EXTEND)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected(case, causal), rtol=2.0**-8, atol=1e-6)


def test_keys_are_stored_divided_by_their_scale():
    case = make_case("latent", [2, 2, 2])
    case.layer.k_scale, case.layer.k_scale_float = torch.tensor(2.0), 2.0
    case.layer.v_scale, case.layer.v_scale_float = torch.tensor(2.0), 2.0
    run(case, ForwardMode.EXTEND)
    torch.testing.assert_close(case.pool.keys[case.out_cache_loc], case.k / 2)


def test_an_idle_batch_has_no_rows():
    case = make_case("dense", [1, 1, 1])
    case.backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0))
    assert case.backend.forward_metadata == []


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"sinks": torch.ones(1)}, "cannot serve the attention option(s) sinks"),
        ({"is_cross_attention": True}, {}, "serves neither cross attention nor temperature scaling"),
        ({"xai_temperature_len": 8}, {}, "serves neither cross attention nor temperature scaling"),
        ({"logit_cap": 5.0, "logit_capping_method": "softsign"}, {}, "caps logits by tanh only, not by 'softsign'"),
    ],
)
def test_what_it_cannot_serve_is_refused(fields, options, message):
    case = make_case("dense", [1, 1, 1])
    layer = make_layer(*SHAPES["dense"], **fields)
    with pytest.raises(NotImplementedError, match=message.replace("(", r"\(").replace(")", r"\)")):
        case.backend.forward_extend(case.q, case.k, case.v, layer, None, **options)


@pytest.mark.parametrize(
    ("spec_info", "error", "message"),
    [
        (chain_input(3, torch.ones(27)), NotImplementedError, "carries a custom mask of unknown layout"),
        (
            chain_input(3, torch.ones(27), DDTreeVerifyInput, tree_mask_mode=TreeMaskMode.FULL_MASK),
            ValueError,
            "tree mask in layout FULL_MASK, but this attention backend asked for QLEN_ONLY",
        ),
        (chain_input(3, torch.ones(26), DDTreeVerifyInput), ValueError, "26 cells, but 3 requests of 3 tokens need 27"),
    ],
)
def test_a_mask_in_another_layout_is_refused(spec_info, error, message):
    case = make_case("dense", [3, 3, 3])
    with pytest.raises(error, match=message):
        run(case, ForwardMode.TARGET_VERIFY, spec_info=spec_info)
