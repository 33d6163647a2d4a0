# SPDX-License-Identifier: Apache-2.0
"""A server that cannot do what it is asked stops at start-up and says why. test/srt has every refusal; here the whole
server ends with the message, wherever on its way it is refused, and not in a traceback of something else."""

import json
import shutil

import pytest
from e2e.servers import MODELS, TARGET, speculative

pytestmark = pytest.mark.server

# A server with no limit takes most of the machine's memory, and two of them at once are killed for it.
POOL = ["--max-total-tokens", "4096"]
KDTREE = [*TARGET, *POOL, "--attention-backend", "kdtree_sm120"]
TREE = [*KDTREE, *speculative("DDTREE")]
NODES = "--speculative-num-draft-tokens"

WHILE_ARGUMENTS_ARE_RESOLVED = {
    "unknown mode": (
        [*KDTREE, "--kdtree-verify", "maybe"],
        "argument --kdtree-verify: invalid choice: 'maybe' (choose from ",
    ),
    "more nodes than the kernel has": (
        [*TREE, NODES, "129"],
        "ValueError: DDTREE verifies at most 128 nodes a request; --speculative-num-draft-tokens is 129.",
    ),
    "no node": (
        [*TREE, NODES, "0"],
        "ValueError: DDTREE needs --speculative-num-draft-tokens of 2 at least (the root and a budget of one node), "
        "got 0.",
    ),
    "a budget of no node beside the root": (
        [*TREE, NODES, "1"],
        "ValueError: DDTREE needs --speculative-num-draft-tokens of 2 at least (the root and a budget of one node), "
        "got 1.",
    ),
    "a budget of nothing": (
        [*TREE, "--speculative-ddtree-budget", "0"],
        "ValueError: DDTREE needs --speculative-ddtree-budget between 2 and --speculative-num-draft-tokens, 128; got 0",
    ),
    "a tree smaller than the drafter's block": (
        [*TREE, NODES, "7"],
        "ValueError: DDTREE drafts into the slots of the tree: --speculative-num-draft-tokens is 7, and the drafter's "
        "block needs 8 at least.",
    ),
    "another block size than the drafter's": (
        [*TREE, "--speculative-dflash-block-size", "16"],
        "ValueError: DDTREE: the drafter was trained for blocks of 8 tokens, but --speculative-dflash-block-size is "
        "16.",
    ),
    "a page size that is no power of two": (
        [*TREE, "--page-size", "48", "--chunked-prefill-size", "4800"],
        "ValueError: DDTREE needs a --page-size that is a power of two, got 48.",
    ),
    "a page size that the backend cannot have without DDTREE either": (
        [*KDTREE, "--page-size", "48", "--chunked-prefill-size", "4800"],
        "ValueError: kdtree_sm120 needs a --page-size that is a power of two, got 48.",
    ),
    "an attention backend without a tree mask": (
        [*TARGET, "--attention-backend", "torch_native", *speculative("DDTREE")],
        "ValueError: DDTREE needs an attention backend that carries a tree mask; --attention-backend is torch_native.",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "message"), WHILE_ARGUMENTS_ARE_RESOLVED.values(), ids=list(WHILE_ARGUMENTS_ARE_RESOLVED)
)
def test_arguments_are_refused(servers, arguments, message):
    returncode, log = servers.run(arguments)
    assert returncode != 0
    assert message in log


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 33}, "DDTREE serves drafters with blocks of 2 to 32 tokens (draft depth 31 at most); this one"),
        ({"vocab_size": 4096}, "DDTREE: the drafter does not fit the target: its vocab_size is 4096, the target's is"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(servers, tmp_path, fields, message):
    config = json.loads((MODELS / "drafter" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    returncode, log = servers.run([*KDTREE, *speculative("DDTREE", tmp_path), NODES, "64"])
    assert returncode != 0
    assert f"ValueError: {message}" in log


def run_dense_model(servers, folder, *flags, **fields):
    """(exit code, log) of a server of a small dense model that has a config and no weights."""
    config = {
        "vocab_size": 2048, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "target" / name, folder)
    return servers.run(["--model-path", str(folder), "--load-format", "dummy", "--device", "cpu", *POOL, *flags])


def test_a_model_without_mla_is_refused(servers, tmp_path):
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    returncode, log = run_dense_model(servers, tmp_path, "--attention-backend", "kdtree_sm120", **model)
    assert returncode != 0
    assert (
        "ValueError: kdtree_sm120 serves MLA models (DeepSeek V3, Kimi K2 family), and LlamaForCausalLM is none; use "
        "--attention-backend torch_reference on a CPU, triton on a GPU." in log
    )
    assert "Load weight begin" not in log


def test_a_target_that_gives_no_hidden_states_is_refused(servers, tmp_path):
    """Upstream's own refusal, in the scheduler's process, which logs it before it has its server stopped: DDTREE asks
    for hidden states as DFLASH does."""
    model = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 3}
    flags = ["--attention-backend", "torch_reference", *speculative("DDTREE")]
    returncode, log = run_dense_model(servers, tmp_path, *flags, **model)
    assert returncode != 0
    assert "ValueError: Model Qwen2ForCausalLM implements neither set_dspark_layers_to_capture nor" in log
