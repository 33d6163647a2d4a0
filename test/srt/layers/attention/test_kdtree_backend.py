# SPDX-License-Identifier: Apache-2.0
"""kdtree_sm120 on a CPU: trees verified over prefix and draft slots, modes, refusals.

Three bugs that a tree verification can have without a wrong shape or a crash are tests of their own here.
"""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from srt.attention_naive import Pool, make_layer, naive_attention

import sgl_kernel_sm120
from sglang.kdtree.probe.reproducer import load_reproducer, recompute
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.layers.attention import (
    kdtree_backend,
    kdtree_report,
    kdtree_serving,
    kdtree_torch_backend,
    kdtree_verify,
)
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.kdtree_metadata import full_mask, full_mask_indptr
from sglang.srt.layers.attention.kdtree_torch_backend import KDTreeVerifyBackend
from sglang.srt.layers.attention.kdtree_verify import VerifyErrors
from sglang.srt.layers.attention.torch_reference_backend import TorchReferenceAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import utils as upstream_lists
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

ROWS, PREFIXES, NUM_HEADS = [3, 1], [17, 2], 2
# Node 0 has the children 1 and 2, node 1 the child 3: two siblings that must not see each other.
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
N = len(TREE)


@pytest.fixture
def settings(monkeypatch):
    """The published configuration that the backend reads."""
    values = SimpleNamespace(
        kernel=SimpleNamespace(kdtree_verify="on", kdtree_dump_dir=None),
        schedule=SimpleNamespace(page_size=1),
        spec=SimpleNamespace(speculative_num_draft_tokens=N, speculative_algorithm="DDTREE"),
        metrics=False,
    )
    parallel = SimpleNamespace(attn_tp_size=1, tp_rank=0, pp_rank=0)
    for module in (kdtree_backend, kdtree_serving):
        monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(kernel=values.kernel))
    for module in (kdtree_serving, kdtree_torch_backend, kdtree_report):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(kdtree_report, "get_observability", lambda: SimpleNamespace(enable_metrics=values.metrics))
    monkeypatch.setattr(kdtree_report, "get_serving", lambda: SimpleNamespace(served_model_name="a-model"))
    monkeypatch.setattr(kdtree_report.atexit, "register", lambda function: None)
    monkeypatch.setattr(kdtree_backend, "get_schedule", lambda: values.schedule)
    monkeypatch.setattr(kdtree_backend, "get_spec", lambda: values.spec)
    return values


def make_case(seed=0, page_size=1):
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(5, 64, dtype=torch.int32)
    pages = torch.randperm(200 // page_size - 1, generator=generator)[: len(ROWS) * 64 // page_size] + 1
    slots = (pages[:, None] * page_size + torch.arange(page_size)).view(len(ROWS), 64)
    table[ROWS] = slots.int()
    pool = Pool(200 + page_size, 1, 576, 512, mla=True)
    for row, prefix in zip(ROWS, PREFIXES, strict=True):
        pool.keys[table[row, :prefix].long()] = torch.randn(prefix, 1, 576, generator=generator)
    total = len(ROWS) * N
    write = [table[row, p : p + N] for row, p in zip(ROWS, PREFIXES, strict=True)]
    return SimpleNamespace(
        table=table, pool=pool, layer=make_layer(NUM_HEADS, 1, 576, 512), out_cache_loc=torch.cat(write).long(),
        q=torch.randn(total, NUM_HEADS * 576, generator=generator), k=torch.randn(total, 1, 576, generator=generator),
        runner=SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=pool, device="cpu",
            page_size=page_size, dtype=torch.float32, decode_num_tokens_per_req=lambda: N,
            model_config=SimpleNamespace(get_max_num_attention_heads=lambda: NUM_HEADS),
        ),
    )  # fmt: skip


def verify(case, mask=TREE, *, backend=None):
    """One TARGET_VERIFY forward; mask None is a DFLASH chain."""
    common = dict(draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=N)
    if mask is None:
        spec_info = DFlashVerifyInput(**common)
    else:
        spec_info = DDTreeVerifyInput(**common, custom_mask=mask.expand(len(ROWS), N, N).flatten())
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=len(ROWS), req_pool_indices=torch.tensor(ROWS),
        seq_lens=torch.tensor(PREFIXES), spec_info=spec_info, out_cache_loc=case.out_cache_loc,
        out_cache_loc_is_physical=True,
    )  # fmt: skip
    backend = backend or KDTreeVerifyBackend(case.runner)
    backend.init_forward_metadata(batch)
    return backend.forward(case.q, case.k, case.k[..., :512], case.layer, batch)


def naive(case, mask=TREE):
    parts = []
    for request, (row, prefix) in enumerate(zip(ROWS, PREFIXES, strict=True)):
        keys = case.pool.keys[case.table[row, : prefix + N].long()]
        q = case.q[request * N : (request + 1) * N].view(N, NUM_HEADS, 576)
        parts.append(
            naive_attention(
                q, keys, keys[..., :512], lambda i, j, p=prefix: j < p or bool(mask[i, j - p]),
                scaling=case.layer.scaling,
            ).flatten(1)
        )  # fmt: skip
    return torch.cat(parts)


def close(out, reference):
    torch.testing.assert_close(out.double(), reference.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["off", "validate", "on"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_mode_gives_the_tree_attention(settings, mode, page_size):
    settings.kernel.kdtree_verify, settings.schedule.page_size = mode, page_size
    case = make_case(page_size=page_size)
    close(verify(case), naive(case))


def test_a_chain_needs_no_mask(settings):
    case = make_case()
    close(verify(case, None), naive(case, torch.ones(N, N).tril()))


def test_on_runs_the_kernel_and_off_does_not(settings, monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["mask_layout"])
        return sgl_kernel_sm120.mla_tree_verify(*args, **kwargs)

    monkeypatch.setattr(kdtree_verify, "mla_tree_verify", counted)
    verify(make_case())
    assert calls == [sgl_kernel_sm120.MaskLayout.QLEN]
    settings.kernel.kdtree_verify = "off"
    verify(make_case())
    assert len(calls) == 1


def decode_batch(case):
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=2, req_pool_indices=torch.tensor(ROWS),
        seq_lens=torch.tensor(PREFIXES) + 1, spec_info=None, out_cache_loc=case.out_cache_loc[::N],
        out_cache_loc_is_physical=True,
    )  # fmt: skip


def decode(case, backend):
    """One token a request: where the root of a tree would be."""
    batch = decode_batch(case)
    backend.init_forward_metadata(batch)
    return backend.forward(case.q[::N], case.k[::N], case.k[::N, :, :512], case.layer, batch)


@pytest.mark.parametrize("mode", ["off", "validate", "on"])
def test_plain_decoding_is_served_after_a_verification(settings, mode):
    settings.kernel.kdtree_verify = mode
    case = make_case()
    backend = KDTreeVerifyBackend(case.runner)
    verify(case, backend=backend)
    close(decode(case, backend), naive(case)[::N])
    if mode != "off":
        assert (backend.step.num_tokens, backend.step.tree_mask) == (1, None)


def test_more_requests_than_the_kernel_takes_decode_on_the_reference(settings):
    count = 257
    case = make_case()
    rows = torch.full((count,), ROWS[0])
    batch = decode_batch(case)
    batch.batch_size, batch.req_pool_indices = count, rows
    batch.seq_lens = torch.full((count,), PREFIXES[0] + 1)
    batch.out_cache_loc = case.out_cache_loc[:1].expand(count)
    backend = KDTreeVerifyBackend(case.runner)
    backend.init_forward_metadata(batch)
    q, k = case.q[:1].expand(count, -1), case.k[:1].expand(count, -1, -1)
    out = backend.forward(q, k, k[..., :512], case.layer, batch)
    close(out, naive(case)[:1].expand(count, -1))
    assert backend.fallbacks == {"more than 256 requests": 1}


def test_every_rank_says_what_it_runs(settings, caplog):
    settings.kernel.kdtree_verify = "validate"
    with caplog.at_level(logging.INFO):
        KDTreeVerifyBackend(make_case(page_size=16).runner)
    assert "kdtree_sm120 in torch, tp rank 0: verify validate" in caplog.text
    assert "4 verified tokens, page size 16" in caplog.text


def test_prefill_is_the_stock_backend_and_leaves_no_step(settings):
    """A step left over from a verification must not catch the next forward."""
    case = make_case()
    backend = KDTreeVerifyBackend(case.runner)
    verify(case, backend=backend)
    batch = decode_batch(case)
    batch.forward_mode, batch.extend_seq_lens = ForwardMode.EXTEND, torch.ones(2, dtype=torch.int64)
    backend.init_forward_metadata(batch)
    out = backend.forward(case.q[::N], case.k[::N], case.k[::N, :, :512], case.layer, batch)
    assert backend.step is None
    close(out, naive(case)[::N])


# Three bugs that change results and nothing else.


def test_draft_slots_are_attended(settings):
    """Bug 1: a list of prefix slots alone. The root's own KV then has no effect on any row."""
    case = make_case()
    before = verify(case)
    case.k = case.k.clone()
    case.k[0] += 1.0  # the root of the first request
    after = verify(case)
    assert not torch.isclose(before[:N], after[:N]).all(dim=1).any()
    assert torch.equal(before[N:], after[N:])


def test_a_sibling_is_not_attended(settings):
    case = make_case()
    before = verify(case)
    case.k = case.k.clone()
    case.k[1] += 1.0  # node 1 of the first request: seen by itself and by node 3
    changed = ~torch.isclose(before, verify(case)).all(dim=1)
    assert changed.tolist() == [False, True, False, True] + [False] * N


@pytest.mark.parametrize("stride_of_prefix_alone", [False, True])
def test_full_mask_rows_are_prefix_plus_draft_apart(stride_of_prefix_alone):
    """Bug 2: the same mask, laid out with rows only `prefix` apart, is another mask."""
    case = make_case()
    case.pool.set_kv_buffer(case.layer, SimpleNamespace(loc=case.out_cache_loc), case.k, None)
    prefixes, visible = torch.tensor(PREFIXES), TREE.expand(len(ROWS), N, N)
    cells = N * (sum(PREFIXES) + len(ROWS) * N)
    mask = full_mask(visible, prefixes, cells)
    indptr = full_mask_indptr(prefixes, N)
    if stride_of_prefix_alone:
        blocks = []
        for prefix in PREFIXES:
            rows = torch.ones(N, prefix + N, dtype=torch.bool)
            rows[:, prefix:] = TREE
            wrong = torch.zeros(N * (prefix + N), dtype=torch.bool)
            for i in range(N):
                wrong[i * prefix : i * prefix + prefix + N] = rows[i]
            blocks.append(wrong)
        mask = torch.cat(blocks)
    slots = torch.cat([case.table[row, : p + N] for row, p in zip(ROWS, PREFIXES, strict=True)])
    starts = torch.tensor([0, PREFIXES[0] + N, sum(PREFIXES) + 2 * N])
    out = sgl_kernel_sm120.mla_tree_verify(
        case.q.view(len(ROWS), N, NUM_HEADS, 576), case.pool.keys, starts, slots, sm_scale=case.layer.scaling,
        tree_mask=mask, mask_layout=sgl_kernel_sm120.MaskLayout.FULL, mask_indptr=indptr,
    )  # fmt: skip
    same = torch.isclose(out.view(len(ROWS) * N, -1).double(), naive(case), rtol=2e-5, atol=2e-5).all()
    assert same == (not stride_of_prefix_alone)


def test_mask_indptr_of_another_batch_size_is_refused():
    """Bug 3: a slice that is one entry too long belongs to another batch."""
    case = make_case()
    prefixes = torch.tensor([*PREFIXES, 0])
    with pytest.raises(sgl_kernel_sm120.ArgumentError, match="mask_indptr"):
        sgl_kernel_sm120.mla_tree_verify(
            case.q.view(len(ROWS), N, NUM_HEADS, 576), torch.zeros(8, 576), torch.zeros(3, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64), sm_scale=1.0, tree_mask=torch.ones(200, dtype=torch.bool),
            mask_layout=sgl_kernel_sm120.MaskLayout.FULL, mask_indptr=full_mask_indptr(prefixes, N),
        )  # fmt: skip


# q and k in two parts.


def parts_of(case):
    """As a layer of an MLA model holds them, some of them views: q, k, q_rope, k_rope"""
    q, k = case.q.view(-1, NUM_HEADS, 576), case.k
    heads_first = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    return heads_first, k[..., :512], q[..., 512:], k[..., 512:]


def batch_of_tree(case):
    mask = TREE.expand(len(ROWS), N, N).flatten()
    spec_info = DDTreeVerifyInput(
        draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=N, custom_mask=mask
    )
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=len(ROWS), req_pool_indices=torch.tensor(ROWS),
        seq_lens=torch.tensor(PREFIXES), spec_info=spec_info, out_cache_loc=case.out_cache_loc,
        out_cache_loc_is_physical=True,
    )  # fmt: skip


def verify_parts(case, backend, **options):
    batch = batch_of_tree(case)
    q, k, q_rope, k_rope = parts_of(case)
    backend.init_forward_metadata(batch)
    return backend.forward(q, k, k, case.layer, batch, q_rope=q_rope, k_rope=k_rope, **options)


def same_kv(case, other):
    torch.testing.assert_close(case.pool.keys, other.pool.keys, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", ["off", "validate", "on"])
def test_parts_are_joined_as_the_model_would(settings, mode):
    settings.kernel.kdtree_verify = mode
    case, again = make_case(), make_case()
    assert torch.equal(verify_parts(case, KDTreeVerifyBackend(case.runner)), verify(again))
    same_kv(case, again)


def test_on_a_gpu_one_launch_joins_q_and_writes_kv(settings, monkeypatch):
    """With upstream's kernel in torch."""

    def fused(kv_buffer, loc, k_nope, k_rope, q_nope, q_rope):
        assert (k_nope.shape, k_rope.shape) == ((2 * N, 512), (2 * N, 64)) and kv_buffer.shape[1:] == (576,)
        kv_buffer[loc] = torch.cat([k_nope, k_rope], dim=-1)
        return torch.cat([q_nope, q_rope], dim=-1)

    kernel = SimpleNamespace(set_mla_kv_concat_q=fused, covered=lambda *rows: True)
    monkeypatch.setattr(kdtree_serving, "mla_rows", kernel)
    case, again = make_case(), make_case()
    expected = verify(again)
    backend = KDTreeVerifyBackend(case.runner)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        joined = backend.write_and_join(case.layer, case.out_cache_loc, *parts_of(case))
        case.layer.k_scale = torch.tensor(2.0)  # k is scaled before it is written
        assert backend.write_and_join(case.layer, case.out_cache_loc, *parts_of(case)) is None
        case.layer.k_scale = None
    assert torch.equal(joined.flatten(1), case.q)
    same_kv(case, again)
    monkeypatch.setattr(backend, "write_latent", None)
    monkeypatch.setattr(backend, "write_and_join", lambda *args: joined)
    assert torch.equal(verify_parts(case, backend), expected)


@pytest.mark.parametrize("option", ["attn_sink", "save_kv_cache"])
def test_parts_with_another_option_are_joined_first(settings, monkeypatch, option):
    case = make_case()
    backend = KDTreeVerifyBackend(case.runner)
    monkeypatch.setattr(backend, "write_and_join", None)
    if option == "save_kv_cache":
        case.pool.keys[case.out_cache_loc] = case.k
        return close(verify_parts(case, backend, save_kv_cache=False), naive(case))
    seen = []
    monkeypatch.setattr(TorchReferenceAttnBackend, "forward_extend", lambda self, q, k, *a, **o: seen.append((q, k)))
    verify_parts(case, backend, attn_sink=torch.ones(NUM_HEADS))
    ((q, k),) = seen
    assert torch.equal(q.flatten(1), case.q) and torch.equal(k, case.k)


def test_a_layer_hands_over_parts_only_where_the_kernel_takes_them(settings, monkeypatch):
    case = make_case()
    backend = KDTreeVerifyBackend(case.runner)
    monkeypatch.setattr(kdtree_backend, "get_attn_backend", lambda: backend)
    registered = {}
    monkeypatch.setattr(kdtree_backend.AttentionBackendRegistry, "register", registered.__setitem__)
    kdtree_backend.register_handler(lambda attn, batch: None)
    handle = registered["kdtree_sm120"]
    served, other = batch_of_tree(case), decode_batch(case)
    other.forward_mode = ForwardMode.EXTEND

    def name_of(batch, layer=case.layer):
        attn = SimpleNamespace(attn_mqa=layer, current_attention_backend="kdtree_sm120")
        handle(attn, batch)
        return attn.current_attention_backend

    assert name_of(served) == "kdtree_sm120"  # nothing is planned yet
    backend.init_forward_metadata(served)
    assert name_of(served) == kdtree_backend.IN_PARTS
    assert kdtree_backend.IN_PARTS in upstream_lists.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    assert name_of(other) == name_of(served, make_layer(NUM_HEADS + 1, 1, 576, 512)) == "kdtree_sm120"
    ours, backend = backend, object.__new__(HybridAttnBackend)
    backend.prefill_backend, backend.decode_backend, backend.spec_attn_is_decode = SimpleNamespace(), ours, True
    assert name_of(served) == kdtree_backend.IN_PARTS and name_of(other) == "kdtree_sm120"
    backend = ours
    backend.mode = "validate"  # the stock kernel wants them joined
    assert name_of(served) == "kdtree_sm120"
    case.runner.model_config.hf_text_config = SimpleNamespace(llama_4_scaling={"beta": 0.1})
    backend = KDTreeVerifyBackend(case.runner)
    backend.init_forward_metadata(served)
    assert name_of(served) == "kdtree_sm120"  # q is scaled where it is joined
    backend = SimpleNamespace()
    assert name_of(served) == "kdtree_sm120"


# Validate mode.


def test_validate_counts_and_returns_the_stock_result(settings, monkeypatch, caplog):
    settings.kernel.kdtree_verify = "validate"
    case = make_case()
    backend = KDTreeVerifyBackend(case.runner)
    verify(case, backend=backend)
    assert "8 rows compared, 0 over the limit" in backend.validation.errors.report()

    right = sgl_kernel_sm120.mla_tree_verify
    monkeypatch.setattr(kdtree_verify, "mla_tree_verify", lambda *a, **k: right(*a, **k).add_(0.25))
    close(verify(case, backend=backend), naive(case))
    assert "16 rows compared, 8 over the limit, max abs error 2.5" in backend.validation.errors.report()

    with caplog.at_level(logging.INFO):
        backend.validation.catch_up()
    assert "kdtree_sm120 validate: mismatch, layer 0, s_q 4" in caplog.text
    assert "kdtree_sm120 validate: 16 rows compared" in caplog.text
    assert caplog.text.rstrip().endswith("2 steps")


def test_a_mismatch_is_written_as_a_file_that_recomputes(settings, monkeypatch, tmp_path):
    settings.kernel.kdtree_verify, settings.kernel.kdtree_dump_dir = "validate", str(tmp_path)
    case = make_case()
    backend = KDTreeVerifyBackend(case.runner)
    right = sgl_kernel_sm120.mla_tree_verify
    with monkeypatch.context() as patch:
        patch.setattr(kdtree_verify, "mla_tree_verify", lambda *a, **k: right(*a, **k).add_(0.25))
        verify(case, backend=backend)
    backend.validation.catch_up()
    (path,) = tmp_path.iterdir()
    dump = load_reproducer(path)
    assert dump.tensors["q"].dtype == dump.tensors["kv_rows"].dtype == torch.float32
    assert (dump.context, dump.s_q) == (PREFIXES[0], N)
    again = recompute(dump)
    torch.testing.assert_close(again.flatten(), dump.tensors["out_reference"].flatten(), rtol=1e-4, atol=1e-4)
    error = (dump.tensors["out_kdtree"] - dump.tensors["out_reference"]).abs()
    torch.testing.assert_close(error, torch.full_like(error, 0.25))


def test_validate_exports_what_the_probe_reads(settings):
    registry = pytest.importorskip("prometheus_client").REGISTRY

    settings.kernel.kdtree_verify, settings.metrics = "validate", True
    labels = {"model_name": "a-model", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}

    def rows():
        return registry.get_sample_value("sglang:kdtree_validate_rows_total", labels) or 0

    before = rows()
    # Two backends of one process, as adaptive speculation makes, add to one counter.
    for _ in range(2):
        case = make_case()
        backend = KDTreeVerifyBackend(case.runner)
        verify(case, backend=backend)
        backend.validation.catch_up()
    assert rows() - before == 2 * len(ROWS) * N
    assert registry.get_sample_value("sglang:kdtree_validate_max_abs_error", labels | {"layer": "0"}) < 1e-4


def test_what_the_reference_serves_in_the_kernels_place_is_counted(settings):
    case = make_case()
    case.layer.sliding_window_size = 1000
    backend = KDTreeVerifyBackend(case.runner)
    close(verify(case, backend=backend), naive(case))  # with the tree's mask
    assert backend.fallbacks == {"sliding window (layer 0)": 1}


def test_a_nan_is_over_the_limit():
    errors = VerifyErrors(2, torch.device("cpu"))
    reference = torch.ones(3, 4)
    ours = reference.clone()
    ours[1, 2] = torch.nan
    errors.update(1, ours, reference)
    assert "3 rows compared, 1 over the limit" in errors.report()
    assert "worst layer 1" in errors.report()


# Refusals.


def make_runner(**config):
    fields = dict(
        attention_arch=AttentionArch.MLA, kv_lora_rank=512, qk_rope_head_dim=64,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    return SimpleNamespace(device="cpu", model_config=SimpleNamespace(**(fields | config)))


def test_an_mla_less_model_is_refused(settings):
    with pytest.raises(ValueError, match="serves MLA models .* and LlamaForCausalLM is none; use --attention-backend"):
        kdtree_backend.create_kdtree_backend(make_runner(attention_arch=AttentionArch.MHA))


def test_other_head_sizes_are_refused(settings):
    with pytest.raises(ValueError, match=r"heads of 320 \(latent 256\)"):
        kdtree_backend.create_kdtree_backend(make_runner(kv_lora_rank=256))


@pytest.mark.parametrize("form", ["torch", "triton"])
def test_sparse_attention_is_refused(settings, tmp_path, monkeypatch, form):
    """DeepSeek V3.2 and GLM 5: the kernel would attend to the keys that the indexer leaves out."""
    model = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 1,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    monkeypatch.setenv("TRITON_INTERPRET", str(int(form == "triton")))
    monkeypatch.setattr(kdtree_backend.AttentionBackendRegistry, "register", lambda *args: None)
    runner = make_runner()
    runner.model_config, runner.is_draft_worker = ModelConfig(str(tmp_path)), False
    with pytest.raises(ValueError, match="sparse attention .DSA. of DeepseekV32ForCausalLM selects some; leave --att"):
        kdtree_backend.create_kdtree_backend(runner)


def test_too_many_draft_tokens_are_refused(settings):
    settings.spec.speculative_num_draft_tokens = 129
    with pytest.raises(ValueError, match="at most 128 tokens a request; --speculative-num-draft-tokens is 129"):
        kdtree_backend.create_kdtree_backend(make_runner())


@pytest.mark.parametrize("page_size", [0, 3, 48])
def test_a_page_size_that_is_no_power_of_two_is_refused(settings, page_size):
    settings.schedule.page_size = page_size
    with pytest.raises(ValueError, match=f"--page-size that is a power of two, got {page_size}"):
        kdtree_backend.create_kdtree_backend(make_runner())
