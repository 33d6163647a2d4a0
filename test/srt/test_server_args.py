# SPDX-License-Identifier: Apache-2.0
"""Flags of the fork: they parse, land in upstream's namespaces, and DDTREE resolves or refuses its own."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
from sglang.srt.arg_groups.fields.kdtree.verify import default_verify_mode
from sglang.srt.arg_groups.overrides import record_foreign_defaults, resolving_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ddtree_args import resolve_ddtree_args

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 2048, "hidden_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 512, "q_lora_rank": 128,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 512, "max_position_embeddings": 4096,
    "first_k_dense_replace": 1,
}  # fmt: skip
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "block_size": 8,
    "num_target_layers": 3, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
}  # fmt: skip


@pytest.fixture
def make_args(tmp_path):
    """ServerArgs for a target and a drafter of which only the configurations exist."""

    def make(*, drafter=DRAFTER, target=TARGET, **fields):
        for name, config in (("target", target), ("drafter", drafter)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        defaults = dict(
            model_path=str(tmp_path / "target"), device="cpu", speculative_algorithm="DDTREE",
            speculative_draft_model_path=str(tmp_path / "drafter"),
        )  # fmt: skip
        return ServerArgs(**(defaults | fields))

    return make


def resolve(args):
    record_foreign_defaults(args, "test", resolve_ddtree_args)
    return resolving_view(args)


def test_fields_land_in_their_namespaces():
    namespaces = ServerArgs._NS_BY_FIELD
    assert namespaces["speculative_ddtree_topk"] == "spec"
    assert namespaces["speculative_ddtree_budget"] == namespaces["speculative_ddtree_costs"] == "spec"
    assert namespaces["kdtree_verify"] == "exec.kernel"
    assert namespaces["kv_defrag"] == "memory"


def parse(*arguments):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "x", *arguments])


def test_flags_parse():
    parsed = parse(
        "--attention-backend", "kdtree_sm120", "--speculative-algorithm", "DDTREE", "--speculative-ddtree-topk", "4",
        "--kdtree-verify", "validate", "--speculative-draft-attention-backend", "torch_reference",
    )  # fmt: skip
    assert parsed.attention_backend == "kdtree_sm120"
    assert (parsed.speculative_ddtree_topk, parsed.kdtree_verify) == (4, "validate")
    assert parse().kdtree_verify == "on"
    assert parse().speculative_ddtree_topk is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kdtree-verify", "maybe"),
        ("--attention-backend", "kdtree_sm121"),
        ("--kv-defrag", "tier9"),
        ("--speculative-ddtree-topk", "many"),
    ],
)
def test_unknown_choices_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_the_environment_sets_the_default_of_the_mode(fresh_process, monkeypatch):
    code = "from sglang.srt.server_args import ServerArgs; print(ServerArgs(model_path='x').kdtree_verify)"
    assert fresh_process(code, KDTREE_VERIFY="off").stdout.endswith("off\n")
    monkeypatch.setenv("KDTREE_VERIFY", "maybe")
    with pytest.raises(ValueError, match="KDTREE_VERIFY is 'maybe'; use one of off, validate, on"):
        default_verify_mode()


def test_a_folder_for_mismatches_is_tried_at_start(tmp_path):
    from sglang.srt.layers.attention.kdtree_registry import check_dump_dir

    check_dump_dir(str(tmp_path / "a" / "b"), "validate")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--kdtree-dump-dir \S+/file needs .* a folder to write to: .*File exists"):
        check_dump_dir(str(tmp_path / "file"), "validate")
    with pytest.raises(ValueError, match="--kdtree-dump-dir x needs --kdtree-verify validate; it is on"):
        check_dump_dir("x", "on")


def test_a_drafter_that_names_no_backend_keeps_its_targets():
    """A name that is not in this list becomes flashinfer, with a warning in the log."""
    assert {"torch_reference", "kdtree_sm120"} <= set(DRAFT_ATTENTION_BACKEND_CHOICES)


def test_an_eagle_tree_may_use_pages(make_args, monkeypatch):
    from sglang.srt.arg_groups import speculative_hook

    monkeypatch.setattr(speculative_hook, "_check_oot_speculative_algorithm", lambda **_: None)  # of a CPU

    def resolved(backend):
        args = make_args(
            speculative_algorithm="EAGLE", attention_backend=backend, page_size=64, speculative_num_steps=4,
            speculative_eagle_topk=4, speculative_num_draft_tokens=16,
        )  # fmt: skip
        record_foreign_defaults(args, "test", speculative_hook._handle_eagle_family)
        return resolving_view(args)

    with pytest.raises(ValueError, match="speculative_eagle_topk > 1 with page_size > 1"):
        resolved("torch_native")
    assert resolved("kdtree_sm120").speculative_eagle_topk == 4


def test_ddtree_fills_in_its_defaults(make_args):
    args = resolve(make_args())
    assert args.speculative_dflash_block_size == 8
    assert args.speculative_num_draft_tokens == 16
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    assert args.speculative_draft_attention_backend == "torch_reference"
    assert args.max_running_requests == 48


@pytest.mark.parametrize(
    ("backends", "drafter"),
    [
        ({"attention_backend": "kdtree_sm120"}, "kdtree_sm120"),
        ({"attention_backend": "triton"}, "triton"),
        ({}, "triton"),
        ({"prefill_attention_backend": "triton", "decode_attention_backend": "kdtree_sm120"}, "kdtree_sm120"),
    ],
)
def test_a_ddtree_drafter_follows_a_target_on_kdtree(make_args, backends, drafter):
    assert resolve(make_args(device="cuda", **backends)).speculative_draft_attention_backend == drafter


@pytest.mark.parametrize(
    "split",
    [
        dict(prefill_attention_backend="fa3", speculative_attention_mode="decode"),
        dict(decode_attention_backend="fa3", speculative_attention_mode="prefill"),
    ],
)
def test_ddtree_asks_for_the_mask_where_it_is_verified(make_args, split):
    both = dict(prefill_attention_backend="triton", decode_attention_backend="triton", attention_backend="flashinfer")
    resolve(make_args(device="cuda", **both | split))


def test_ddtree_keeps_what_was_given(make_args):
    args = resolve(
        make_args(
            speculative_num_draft_tokens=128, max_running_requests=256, speculative_draft_attention_backend="triton",
            page_size=16, speculative_ddtree_topk=64,
        )
    )  # fmt: skip
    assert args.speculative_num_draft_tokens == 128
    assert args.max_running_requests == 256
    assert args.speculative_draft_attention_backend == "triton"


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        (dict(speculative_ddtree_budget="24"), 24),
        (dict(speculative_ddtree_budget="4"), 8),  # the draft block needs its slots
        (dict(speculative_ddtree_budget="4", speculative_num_draft_tokens=32), 32),
        (dict(speculative_ddtree_budget="auto"), 32),
        (dict(speculative_ddtree_budget="auto", speculative_num_draft_tokens=64), 64),
    ],
)
def test_the_budget_is_at_most_the_width_that_is_reserved(make_args, fields, nodes):
    args = resolve(make_args(**fields))
    assert args.speculative_num_draft_tokens == nodes
    assert args.speculative_ddtree_budget == fields["speculative_ddtree_budget"]


def test_a_supplied_cost_table_has_the_widths_of_the_server(make_args, tmp_path):
    file = tmp_path / "costs.json"
    table = dict(batch_sizes=[1], contexts=[0], widths=[4, 8, 16], step_ms=[[[1, 2, 3]]], node_ms=[[0]])
    file.write_text(json.dumps(table))
    fields = dict(speculative_ddtree_budget="auto", speculative_ddtree_costs=str(file))
    resolve(make_args(**fields, speculative_num_draft_tokens=16))
    with pytest.raises(ValueError, match=r"it has widths \[4, 8, 16\], and this server also verifies \[32\]"):
        resolve(make_args(**fields))


def test_a_block_larger_than_the_default_tree_makes_the_tree_larger(make_args):
    args = resolve(make_args(drafter=DRAFTER | {"block_size": 24}))
    assert args.speculative_num_draft_tokens == 24


REFUSED = [
    (dict(speculative_draft_model_path=None), "needs a DFlash drafter: set --speculative-draft-model-path"),
    (dict(speculative_num_draft_tokens=0), "--speculative-num-draft-tokens of 2 at least .* got 0"),
    (dict(speculative_num_draft_tokens=1), "--speculative-num-draft-tokens of 2 at least .* got 1"),
    (dict(speculative_num_draft_tokens=-3), "--speculative-num-draft-tokens of 2 at least .* got -3"),
    (dict(speculative_num_draft_tokens=129), "at most 128 nodes a request; --speculative-num-draft-tokens is 129"),
    (dict(speculative_num_draft_tokens=7), "--speculative-num-draft-tokens is 7, and the drafter's block needs 8"),
    (dict(speculative_ddtree_topk=0), "--speculative-ddtree-topk between 1 and 64, got 0"),
    (dict(speculative_ddtree_topk=65), "--speculative-ddtree-topk between 1 and 64, got 65"),
    (dict(max_running_requests=257), "at most 256 requests at once; --max-running-requests is 257"),
    (dict(page_size=12), "--page-size that is a power of two, got 12"),
    (dict(speculative_dflash_block_size=16), "for blocks of 8 tokens, but --speculative-dflash-block-size is 16"),
    (dict(enable_dp_attention=True), "does not support --enable-dp-attention"),
    (dict(attn_cp_size=2), "does not support --attn-cp-size above 1"),
    (dict(dcp_size=2), "does not support --dcp-size above 1"),
    (dict(pp_size=2), "does not support --pp-size above 1"),
    (dict(disaggregation_mode="decode"), "does not support --disaggregation-mode"),
    (dict(enable_pdmux=True), "does not support --enable-pdmux"),
    (dict(enable_lora=True), "does not support LoRA"),
    (dict(enable_hierarchical_cache=True), "does not support --enable-hierarchical-cache"),
    (dict(enable_unified_memory=True), "does not support --enable-unified-memory"),
    (dict(speculative_adaptive=True), "does not support --speculative-adaptive"),
    (dict(enable_return_hidden_states=True), "does not return hidden states"),
    (dict(return_hidden_states_mode="last"), "does not return hidden states"),
    (dict(speculative_draft_window_size=7), "--speculative-draft-window-size is at least .* block of 8 tokens, got 7"),
    (dict(speculative_ddtree_budget="1"), "--speculative-ddtree-budget between 2 and .*, 128; got 1"),
    (dict(speculative_ddtree_budget="17", speculative_num_draft_tokens=16), "budget between 2 and .*, 16; got 17"),
    (dict(speculative_ddtree_budget="129"), "--speculative-ddtree-budget between 2 and .*, 128; got 129"),
    (dict(speculative_ddtree_budget="many"), "--speculative-ddtree-budget is auto or a number, got 'many'"),
    (dict(speculative_ddtree_costs="x.json"), "--speculative-ddtree-costs needs --speculative-ddtree-budget auto"),
    (dict(speculative_ddtree_budget="auto", speculative_ddtree_costs="/no/x.json"), "no cost table in /no/x.json"),
    (dict(speculative_accept_threshold_single=0.5), "accepts exact samples only"),
    (dict(speculative_accept_threshold_acc=0.5), "accepts exact samples only"),
    (dict(device="xpu"), "runs on cuda and cpu, not on xpu"),
    (dict(attention_backend="flashinfer"), "a tree mask; --attention-backend is flashinfer.*: use one of kdtree_sm120"),
    (dict(prefill_attention_backend="torch_native"), r"--prefill-attention-backend is .*-attention-mode is prefill:"),
    (
        dict(decode_attention_backend="fa3", speculative_attention_mode="decode", attention_backend="triton"),
        "a tree mask; --decode-attention-backend is fa3. .* --speculative-attention-mode is decode:",
    ),
    (dict(drafter=DRAFTER | {"vocab_size": 1024}), "its vocab_size is 1024, the target's is 2048"),
    (dict(drafter=DRAFTER | {"hidden_size": 128}), "its hidden_size is 128, the target's is 256"),
    (
        dict(drafter=DRAFTER | {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2]}}),
        r"reads layers \[1, 2\] of a model of 3 layers, the target has 3 and the output of the last one cannot be read",
    ),
    (dict(drafter=DRAFTER | {"num_target_layers": 61}), "of a model of 61 layers, the target has 3"),
    (dict(drafter=DRAFTER | {"block_size": 33}, speculative_num_draft_tokens=64), "blocks of 2 to 32 tokens .* has 33"),
    (dict(drafter=DRAFTER | {"block_size": 1}), "blocks of 2 to 32 tokens .* has 1"),
    (dict(drafter={k: v for k, v in DRAFTER.items() if k != "block_size"}), "the drafter's config names no block_size"),
    (
        dict(drafter=DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | {"selector_rank": 4, "selector_top_k": 4}}),
        "this one has a selector head, which drafts a chain. Use --speculative-algorithm DFLASH",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_ddtree_refuses(make_args, fields, message):
    with pytest.raises(ValueError, match=f"^DDTREE.*{message}"):
        resolve(make_args(**fields))


def test_ddtree_refuses_rocm(make_args, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ValueError, match="DDTREE does not support ROCm"):
        resolve(make_args())


def test_ddtree_refuses_simulated_acceptance(make_args, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(ValueError, match="DDTREE does not support SGLANG_SIMULATE_ACC_LEN"):
        resolve(make_args())


def test_ddtree_refuses_block_verification(make_args):
    """Upstream's own refusal, which names the algorithms that have it and goes before any algorithm's arguments."""
    args = make_args(speculative_use_block_verification=True, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="--speculative-use-block-verification only supports EAGLE .* DSPARK"):
        args.resolve_once()


def test_sparse_attention_is_refused_on_a_cpu(make_args):
    """DeepSeek V3.2: without the refusal, upstream asks a CUDA device that is not there."""
    sparse = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
    args = make_args(target=TARGET | sparse, attention_backend="kdtree_sm120", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"\(DSA\) of DeepseekV3ForCausalLM selects some. Serve this model on a GPU"):
        args.resolve_once()


DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(page_size=48), "kdtree_sm120 needs a --page-size that is a power of two, got 48"),
        (dict(target=DENSE), r"kdtree_sm120 serves MLA models .* LlamaForCausalLM is none"),
        (dict(target=TARGET | {"kv_lora_rank": 256}), r"serves MLA heads of 576 \(latent 512\), and .* heads of 320"),
    ],
)
@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_kdtree_refuses_before_a_model_is_loaded(make_args, flag, fields, message):
    def resolve_all(backend):
        backends = {"attention_backend": "torch_reference", flag: backend}
        plain = dict(speculative_algorithm=None, speculative_draft_model_path=None, skip_tokenizer_init=True)
        make_args(**plain, **backends, **fields).resolve_once()

    resolve_all("torch_reference")
    with pytest.raises(ValueError, match=message):
        resolve_all("kdtree_sm120")


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "DDTREE"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("ours", ["prefill", "decode"])
def test_a_split_that_leaves_kdtree_nothing_to_serve_is_refused(make_args, ours, mode, algorithm):
    split = {f"{phase}_attention_backend": "torch_reference" for phase in ("prefill", "decode")}
    fields = split | {f"{ours}_attention_backend": "kdtree_sm120", "speculative_attention_mode": mode}
    if algorithm is None:
        fields["speculative_draft_model_path"] = None
    args = make_args(**fields, speculative_algorithm=algorithm, skip_tokenizer_init=True, dtype="float32")
    if ours == (mode if algorithm else "decode"):
        args.resolve_once()
        return
    with pytest.raises(ValueError, match="kdtree_sm120 would (serve nothing|verify no draft)") as refusal:
        args.resolve_once()
    message = str(refusal.value)
    assert ("--attention-backend kdtree_sm120" in message) and ("--decode-attention-backend kdtree_sm120" in message)
    assert ("--speculative-attention-mode decode" in message) == (algorithm is not None)


def test_ddtree_on_a_cpu_refuses_the_platform_of_a_gpu(make_args, monkeypatch):
    """Engine(device="cpu") in a process that found a GPU."""
    from sglang.srt import platforms
    from sglang.srt.platforms.cuda import CudaSRTPlatform

    monkeypatch.setattr(platforms, "_current_platform", CudaSRTPlatform())
    with pytest.raises(ValueError, match="--speculative-algorithm DDTREE on device cpu needs the torch CPU platform"):
        resolve(make_args())


def test_the_whole_resolution_arrives_in_the_namespaces(make_args):
    args = make_args(
        attention_backend="kdtree_sm120", speculative_num_draft_tokens=32, kdtree_verify="validate",
        speculative_ddtree_topk=4, skip_tokenizer_init=True, dtype="float32",
    )  # fmt: skip
    args.resolve_once()
    view = resolving_view(args)
    assert view.speculative_algorithm == "DDTREE"
    assert (view.speculative_num_draft_tokens, view.speculative_dflash_block_size) == (32, 8)
    assert (view.kdtree_verify, view.speculative_ddtree_topk, view.attention_backend) == ("validate", 4, "kdtree_sm120")


def test_the_algorithm_has_two_widths(monkeypatch):
    from sglang.srt import runtime_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string("ddtree")
    spec = SimpleNamespace(speculative_dflash_block_size=8, speculative_algorithm="DDTREE")
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    assert algorithm.get_num_tokens_per_req_for_target_verify(32, is_draft_worker=True) == 8
    assert algorithm.get_num_tokens_per_req_for_target_verify(32, is_draft_worker=False) == 32


def test_the_algorithm_answers_all_that_upstream_asks():
    """Every public method of upstream's enum exists, and DFLASH's answers are DDTREE's."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ddtree, dflash = SpeculativeAlgorithm.from_string("DDTREE"), SpeculativeAlgorithm.DFLASH
    names = set(vars(SpeculativeAlgorithm)) - set(SpeculativeAlgorithm.__members__)
    methods = {name for name in names if not name.startswith("_") and callable(getattr(dflash, name))}
    assert {name for name in methods if not hasattr(ddtree, name)} == {"from_string", "register"}
    predicates = {name for name in methods if name.startswith(("is_", "supports_", "has_", "carries_", "need_"))}
    assert [name for name in predicates if getattr(ddtree, name)() != getattr(dflash, name)()] == []
