# SPDX-License-Identifier: Apache-2.0
"""The files of the small model: layout, size, numbers, tokenizer."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from training import architecture as arch
from training.checkpoint import (
    drafter_config,
    drafter_tensors,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
    target_config,
    target_tensors,
)

MODELS = Path(__file__).parent
SIZE_LIMIT = 15_000_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


def read_json(*parts: str) -> dict:
    return json.loads(MODELS.joinpath(*parts).read_text())


def test_both_checkpoints_fit_the_size_limit():
    files = [path for name in ("target", "drafter") for path in (MODELS / name).iterdir()]
    assert len(files) == 7
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMIT


def test_target_has_the_documented_layout():
    config = read_json("target", "config.json")
    assert config == target_config()
    wanted = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,  # so two of the three layers have experts
        "n_routed_experts": 8,
        "hidden_size": 256,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
    }
    assert {key: config[key] for key in wanted} == wanted
    tensors = load_file(MODELS / "target" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (512 + 64, 256)
    assert tensors["model.layers.2.self_attn.kv_b_proj.weight"].shape == (8 * 128, 512)
    assert "model.layers.0.mlp.gate.weight" not in tensors
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (256, 64)


def test_drafter_has_the_documented_layout():
    config = read_json("drafter", "config.json")
    assert config == drafter_config(load_drafter(MODELS / "drafter"))
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 8
    assert config["dflash_config"] == {"mask_token": "<|MASK|>", "mask_token_id": 3, "target_layer_ids": [0, 1]}
    assert (
        max(config["dflash_config"]["target_layer_ids"]) < read_json("target", "config.json")["num_hidden_layers"] - 1
    )


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_weights_are_finite_bfloat16(name):
    for key, tensor in load_file(MODELS / name / "model.safetensors").items():
        wanted = torch.float32 if key.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == wanted, key
        assert tensor.isfinite().all(), key
        assert tensor.float().std() > 0 or tensor.numel() == 1, key


def test_a_round_trip_through_the_modules_keeps_every_bit(tmp_path):
    save_target(load_target(MODELS / "target"), tmp_path / "target", MODELS / "target" / "tokenizer.json")
    save_drafter(load_drafter(MODELS / "drafter"), tmp_path / "drafter")
    for name in ("target", "drafter"):
        for path in (MODELS / name).iterdir():
            if path.suffix == ".json":
                assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()
        shipped, again = (load_file(root / name / "model.safetensors") for root in (MODELS, tmp_path))
        assert shipped.keys() == again.keys()
        assert all(torch.equal(shipped[key], again[key]) for key in shipped)


def test_every_module_weight_has_its_own_name():
    target, drafter = load_target(MODELS / "target"), load_drafter(MODELS / "drafter")
    for tensors, module in ((target_tensors(target), target), (drafter_tensors(drafter), drafter)):
        assert sum(t.numel() for t in tensors.values()) == sum(t.numel() for t in module.state_dict().values())


def test_results_belong_to_these_weights():
    for results in ("expected_steps.json", "acceptance.json"):
        recorded = read_json(results)
        for name in ("target", "drafter"):
            digest = hashlib.sha256((MODELS / name / "model.safetensors").read_bytes()).hexdigest()
            assert recorded[f"{name}_sha256"] == digest, results


def test_special_tokens_have_their_numbers(tokenizer):
    assert tokenizer.get_vocab_size() == arch.VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in arch.SPECIAL_TOKENS] == list(range(len(arch.SPECIAL_TOKENS)))
    assert tokenizer.encode("x").ids[0] == arch.BOS_ID
    for name in ("target", "drafter"):
        config = read_json(name, "config.json")
        ids = [config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]]
        assert ids == [arch.PAD_ID, arch.BOS_ID, arch.EOS_ID]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    # A text that spells a special token out is one: decoding drops it by design.
    if any(token in text for token in arch.SPECIAL_TOKENS):
        return
    ids = tokenizer.encode(text).ids
    assert max(ids) < arch.VOCAB_SIZE
    assert tokenizer.decode(ids) == text
