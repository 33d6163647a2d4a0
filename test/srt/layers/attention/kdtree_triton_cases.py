# SPDX-License-Identifier: Apache-2.0
"""A KDTreeTritonBackend over pools of a few slots, and the batches that a graph runner would hand to it."""

from types import SimpleNamespace

import torch
from srt.attention_naive import Pool

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention import (
    kdtree_report,
    kdtree_serving,
    kdtree_triton_backend,
    kdtree_triton_block,
    kdtree_triton_draft,
    kdtree_triton_serving,
    triton_backend,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode

NUM_HEADS = 2
ROW_WIDTH = 64  # slots of a request
MAX_REQUESTS = 6
NUM_SLOTS = (MAX_REQUESTS + 1) * ROW_WIDTH


class Translator:
    """pack_read_stream entry by entry; row 0 of the table is the dummy of padding."""

    def __init__(self, table):
        self.table = table

    def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out, num_token_blocks=1):
        begins = indptr.tolist()
        for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=False)):
            out[begins[i] : begins[i] + length] = self.table[row, :length].to(out.dtype)


def patch_settings(monkeypatch, *, mode="on", algorithm="DDTREE", width=4, dump_dir=None):
    values = SimpleNamespace(
        exec=SimpleNamespace(
            kernel=SimpleNamespace(
                kdtree_verify=mode, kdtree_dump_dir=dump_dir, enable_lean_attention=None,
                triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None,
            ),
            dllm=SimpleNamespace(dllm_algorithm=None),
            deterministic=SimpleNamespace(enable_deterministic_inference=False),
            overlap=SimpleNamespace(enable_two_batch_overlap=False),
        ),
        spec=SimpleNamespace(
            speculative_algorithm=algorithm, speculative_num_draft_tokens=width if algorithm else None,
            speculative_num_steps=1, speculative_eagle_topk=1, speculative_attention_mode="prefill",
            speculative_draft_attention_backend=None,
        ),
        parallel=SimpleNamespace(
            attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1, tp_rank=0, pp_rank=0
        ),
        schedule=SimpleNamespace(chunked_prefill_size=4096, page_size=1),
        observability=SimpleNamespace(enable_metrics=False),
    )  # fmt: skip
    modules = (
        triton_backend,
        kdtree_serving,
        kdtree_triton_serving,
        kdtree_triton_backend,
        kdtree_triton_block,
        kdtree_triton_draft,
        kdtree_report,
    )
    for module in modules:
        for name in vars(values):
            if hasattr(module, f"get_{name}"):
                monkeypatch.setattr(module, f"get_{name}", lambda name=name: getattr(values, name))
        for name in ("cuda_graph_fully_disabled", "check_cuda_graph_backend"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *a: False)
    monkeypatch.setattr(kdtree_report.atexit, "register", lambda function: None)
    monkeypatch.setattr(triton_backend, "mambaish_config", lambda config: None)
    return values


def make_runner(
    *, width=4, heads=NUM_HEADS, context=ROW_WIDTH - 16, requests=MAX_REQUESTS, device="cpu", dtype=torch.float32,
    kv_dtype=None,
):  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(requests + 1, ROW_WIDTH if requests == MAX_REQUESTS else context + 2 * width, dtype=torch.int32)
    pool = Pool(NUM_SLOTS, 1, 576, 512, mla=True)
    if requests == MAX_REQUESTS:
        # Slot 0 is the sink of padding.
        slots = torch.randperm(NUM_SLOTS - ROW_WIDTH, generator=generator) + 1
        table[1:] = slots[: requests * ROW_WIDTH].view(requests, ROW_WIDTH).int()
        pool.keys[:] = torch.randn(pool.keys.shape, generator=generator)
        pool.keys[0] = 0
    table = table.to(device)
    kv_dtype = kv_dtype or dtype
    pool.keys = pool.keys.to(device, kv_dtype)
    pool.values = pool.keys[..., :512]
    config = SimpleNamespace(
        attention_arch=AttentionArch.MLA, context_len=context, head_dim=576, v_head_dim=512, swa_v_head_dim=512,
        hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
        qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, is_encoder_decoder=False,
        get_max_num_attention_heads=lambda: heads, get_num_kv_heads=lambda *a: 1,
    )  # fmt: skip
    pool_of_rows = SimpleNamespace(size=requests, req_to_token=table)
    return SimpleNamespace(
        req_to_token_pool=pool_of_rows, token_to_kv_pool=pool, token_to_kv_pool_allocator=None, page_size=1,
        kv_index_translator=Translator(table), decode_num_tokens_per_req=lambda: width, model_config=config,
        is_draft_worker=False, spec_algorithm=None, device=device, gpu_id=0, model=torch.nn.Module(),
        dtype=dtype, kv_cache_dtype=kv_dtype, use_mla_backend=True, sliding_window_size=None,
    )  # fmt: skip


def make_backend(monkeypatch, *, width=4, algorithm="DDTREE", mode="on", dump_dir=None, cores=0, **fields):
    patch_settings(monkeypatch, mode=mode, algorithm=algorithm, width=width, dump_dir=dump_dir)
    monkeypatch.setattr(triton_backend, "get_device_core_count", lambda gpu_id: cores)
    return kdtree_triton_backend.KDTreeTritonBackend(make_runner(width=width, **fields))


def make_draft_backend(monkeypatch, *, width=4, mode="on", cores=0, **fields):
    patch_settings(monkeypatch, mode=mode, algorithm="EAGLE", width=width)
    monkeypatch.setattr(triton_backend, "get_device_core_count", lambda gpu_id: cores)
    monkeypatch.setattr(kdtree_triton_draft, "resolve_num_tokens_per_req", lambda phase: width)
    runner = make_runner(width=width, **fields)
    runner.is_draft_worker = True
    return kdtree_triton_draft.create_draft_extend_backend(runner)


def make_block_backend(
    monkeypatch, *, heads=4, kv_heads=2, dim=32, width=4, mode="on", algorithm="DFLASH", cores=8, page_size=1, **fields
):  # fmt: skip
    """Of a DFLASH drafter with layers of ``heads`` x ``dim``; KV of the pool is noise."""
    patch_settings(monkeypatch, mode=mode, algorithm=algorithm, width=width)
    monkeypatch.setattr(triton_backend, "get_device_core_count", lambda gpu_id: cores)
    runner = make_runner(width=width, heads=heads, **fields)
    pool = Pool(NUM_SLOTS, kv_heads, dim, dim)
    generator = torch.Generator().manual_seed(1)
    for name in ("keys", "values"):
        noise = torch.randn(NUM_SLOTS, kv_heads, dim, generator=generator)
        setattr(pool, name, noise.to(runner.device, runner.kv_cache_dtype))
    config = runner.model_config
    config.attention_arch, config.head_dim, config.v_head_dim = AttentionArch.MHA, dim, dim
    config.swa_v_head_dim, config.get_num_kv_heads = dim, lambda *a: kv_heads
    runner.is_draft_worker, runner.use_mla_backend, runner.token_to_kv_pool = True, False, pool
    runner.page_size = page_size
    return kdtree_triton_block.create_block_backend(runner)


def draft_extend_batch(rows, lens, *, width=4, bucket=None, table=None, device="cpu"):
    """What EAGLE's worker hands over after a verification: lens count the committed tokens and the window of N.
    ``bucket``: padded as the draft extend's graph runner pads, whose request buffers are longer than the batch."""
    padding = 0 if bucket is None else bucket - len(rows)
    slots = [] if table is None else [table[r, n - width : n].cpu() for r, n in zip(rows, lens, strict=True)]
    loc = None if table is None else torch.cat([*slots, torch.zeros(padding * width)]).long().to(device)
    longer = 0 if bucket is None else 1
    size = len(rows) + padding
    return SimpleNamespace(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2, batch_size=size, kv_loc_plan=None, encoder_lens=None,
        spec_info=SimpleNamespace(
            num_tokens_per_req=width, num_front_tokens=0, custom_mask=None,
            extend_seq_lens_tensor=torch.full((size,), width, dtype=torch.int32, device=device),
        ),
        req_pool_indices=torch.tensor(list(rows) + [0] * (padding + longer), device=device),
        seq_lens=torch.tensor(list(lens) + [1] * (padding + longer), device=device), seq_lens_sum=None,
        seq_lens_cpu=None, extend_prefix_lens=torch.tensor([n - width for n in lens], device=device),
        extend_prefix_lens_cpu=[n - width for n in lens],
        extend_seq_lens=torch.full((len(rows),), width, device=device), extend_seq_lens_cpu=[width] * len(rows),
        out_cache_loc=loc, out_cache_loc_is_physical=True, mha_one_shot=False, attn_attend_prefix_cache=None,
    )  # fmt: skip


def chain_input(width, mask=None):
    """What DFLASH verifies, and what a graph is captured with (then with a dummy mask)."""
    return DFlashVerifyInput(
        draft_token=torch.empty(0), positions=torch.empty(0), draft_token_num=width, custom_mask=mask
    )


def tree_input(width, mask, mode=TreeMaskMode.QLEN_ONLY):
    return DDTreeVerifyInput(
        draft_token=torch.empty(0),
        positions=torch.empty(0),
        draft_token_num=width,
        custom_mask=mask,
        tree_mask_mode=mode,
    )


def batch_of(rows, lens, spec_info, mode=ForwardMode.TARGET_VERIFY, bucket=None, width=4, table=None, device="cpu"):
    """A batch padded to ``bucket`` as the graph runner pads: row 0, length 1."""
    padding = 0 if bucket is None else bucket - len(rows)
    counted = width if mode.is_target_verify() else 1
    start = [length if mode.is_target_verify() else length - 1 for length in lens]
    slots = [] if table is None else [table[r, s : s + counted].cpu() for r, s in zip(rows, start, strict=True)]
    loc = None if table is None else torch.cat([*slots, torch.zeros(padding * counted)]).long().to(device)
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(rows) + padding, spec_info=spec_info, kv_loc_plan=None, encoder_lens=None,
        req_pool_indices=torch.tensor(list(rows) + [0] * padding, device=device),
        seq_lens=torch.tensor(list(lens) + [1] * padding, device=device),
        seq_lens_sum=sum(lens), seq_lens_cpu=None, out_cache_loc_is_physical=True, out_cache_loc=loc,
    )  # fmt: skip


def capture(backend, bucket):
    """What capturing a step does outside its graph, then inside. -> the step that the graph keeps"""
    width = backend.width
    dummy = torch.ones(bucket * width * (1 + width), dtype=torch.bool)
    backend.init_forward_metadata_out_graph(batch_of([], [], chain_input(width, dummy), bucket=bucket), in_capture=True)
    backend.init_forward_metadata_in_graph(None)
    return backend.step


def replay(backend, rows, lens, spec_info, bucket):
    backend.init_forward_metadata_out_graph(batch_of(rows, lens, spec_info, bucket=bucket))
    backend.init_forward_metadata_in_graph(None)
