# SPDX-License-Identifier: Apache-2.0
"""Memory arithmetic, with 8 x RTX PRO 6000 serving Kimi K2.6 as the yardstick."""

import itertools
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

from sglang.kdtree.cli import main
from sglang.kdtree.errors import KitError
from sglang.kdtree.model_shape import load_drafter, load_target, target_shape
from sglang.kdtree.plan import buffers, calibrate, kv_pool, machine, weights
from sglang.kdtree.plan.calibrate import Observation

ROOT = Path(__file__).parents[2]
OBSERVED = [Observation(fraction=0.85, tokens=101_134), Observation(fraction=0.93, tokens=195_011)]


@pytest.fixture
def k26(data):
    return load_target(data / "kimi_k2_6.json")


@pytest.fixture
def drafter(data):
    return load_drafter(data / "kimi_k2_6_dflash.json")


def eight_cards(data, *extra):
    """The start that the two pools were seen at: Kimi K2.6 and its drafter, TP 8, stock kernels."""
    return (
        "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json",
        "--gpu", "rtx-pro-6000", "--gpus", 8, "--accounting", "layer-scaled", "--attention-backend", "triton", *extra,
    )  # fmt: skip


class TestShapes:
    def test_kimi_quantises_the_routed_experts_only(self, k26):
        assert k26.quantisation.name == "int4-g32"
        assert k26.quantisation.bits == 4.5
        assert k26.quantisation.quantised == {"experts"}
        assert k26.num_moe_layers == 60

    def test_deepseek_quantises_all_linear_layers(self, data):
        shape = load_target(data / "deepseek_v3.json")
        assert shape.quantisation.bits == 8 + 32 / 128**2
        assert shape.num_moe_layers == 58
        assert shape.vision_params == 0

    def test_a_model_without_mla_is_refused_by_the_missing_key(self, data):
        config = json.loads((data / "deepseek_v3.json").read_text())
        del config["kv_lora_rank"]
        with pytest.raises(KitError, match="'kv_lora_rank'.*no such key"):
            target_shape(config, source="config.json")

    def test_sparse_attention_is_refused(self, data):
        config = json.loads((data / "deepseek_v3.json").read_text()) | {"index_head_dim": 128}
        with pytest.raises(KitError, match="'index_head_dim'.*without sparse attention.*got 128"):
            target_shape(config, source="config.json")

    @pytest.mark.parametrize("value", [0, -3, 1.5, "61", None, True])
    def test_an_odd_value_names_its_key(self, data, value):
        config = json.loads((data / "deepseek_v3.json").read_text()) | {"num_hidden_layers": value}
        with pytest.raises(KitError, match="'num_hidden_layers'"):
            target_shape(config, source="config.json")


class TestWeights:
    def test_checkpoint_sizes_match_the_published_repositories(self, k26, drafter):
        """Published sizes: target 554.30 GiB, drafter 6.48 GiB."""
        target = weights.checkpoint_bytes(weights.target_parts(k26, tp=8, attention_tp=8))
        assert target / 2**30 == pytest.approx(554.30, rel=0.0005)
        assert weights.checkpoint_bytes(weights.drafter_parts(drafter, tp=8)) / 2**30 == pytest.approx(6.48, abs=0.005)

    def test_bytes_of_one_rank(self, k26, drafter):
        parts = {part.name: part.rank_bytes for part in weights.target_parts(k26, tp=8, attention_tp=8)}
        # 60 layers x 384 experts x 3 x 7168 x 2048 weights at 4.5 bits, over 8 ranks.
        assert parts["routed experts"] == 60 * 384 * 3 * 7168 * 2048 * 9 // 16 // 8
        # The down-projections to the latent and to the query rank are whole on every rank.
        assert parts["attention, replicated"] == 61 * 7168 * (1536 + 512 + 64) * 2
        assert sum(parts.values()) == 76_416_677_648
        assert weights.rank_bytes(weights.drafter_parts(drafter, tp=8)) == 1_409_286_144

    def test_attention_data_parallelism_leaves_the_experts_divided(self, k26):
        whole = {p.name: p.rank_bytes for p in weights.target_parts(k26, tp=8, attention_tp=1)}
        split = {p.name: p.rank_bytes for p in weights.target_parts(k26, tp=8, attention_tp=8)}
        assert whole["attention, by heads"] == 8 * split["attention, by heads"]
        assert whole["routed experts"] == split["routed experts"]

    def test_redundant_experts_cost_their_share(self, k26):
        plain, more = (
            weights.target_parts(k26, tp=8, attention_tp=8, redundant_experts=extra)[0].params for extra in (0, 32)
        )
        assert more * 384 == plain * 416


class TestKvPool:
    def test_bytes_per_token(self, k26, drafter):
        assert kv_pool.target_cell_bytes(k26, kv_dtype="bf16") == 70_272
        assert kv_pool.target_cell_bytes(k26, kv_dtype="fp8") == 35_136
        cells = {
            name: kv_pool.drafter_cell_bytes(
                drafter, target=k26, target_cell=70_272, attention_tp=8, kv_dtype="bf16", accounting=name
            )
            for name in kv_pool.ACCOUNTING
        }
        # One of 8 KV heads, K and V of 128, 6 layers; or 6 / 61 of the target's bytes.
        assert cells == {"own-geometry": 2 * 128 * 6 * 2, "layer-scaled": 6_912}

    def test_heads_are_not_divided_below_one(self, k26, drafter):
        cell = kv_pool.drafter_cell_bytes(
            drafter,
            target=k26,
            target_cell=70_272,
            attention_tp=16,
            kv_dtype="bf16",
            accounting="own-geometry",
        )
        assert cell == 3_072

    def test_the_pool_is_rounded_down_to_whole_pages(self):
        sizes = dict(free_bytes=1_000_000, fraction=0.9, resident_bytes=500_000, cell_bytes=1_000)
        assert kv_pool.pool_tokens(**sizes, page_size=1) == 400
        assert kv_pool.pool_tokens(**sizes, page_size=64) == 384

    def test_no_pool_is_left_when_the_weights_fill_the_budget(self):
        assert kv_pool.pool_tokens(free_bytes=100, fraction=0.5, resident_bytes=60, cell_bytes=1, page_size=1) == 0


class TestTwoPools:
    def test_both_pools_within_three_percent_without_calibration(self, cli, data):
        """Only the memory gone before loading is fitted (one number for two pools); all else is derived."""
        planned = {}
        for observation in OBSERVED:
            _, document = cli(*eight_cards(data, "--context", 90_000, "--mem-fraction-static", observation.fraction))
            planned[observation.tokens] = document["pool"]["tokens"]
        assert planned == {101_134: 98_209, 195_011: 200_635}
        for observed_tokens, tokens in planned.items():
            assert abs(tokens / observed_tokens - 1) < 0.03
        assert document["bytes_per_token_per_rank"] == {
            "target": 70_272, "drafter": 6_912, "used_for_the_pool": 77_184,
        }  # fmt: skip
        assert {row["kind"] for row in document["assumptions"]} >= {"derived", "assumed", "calibrated", "left out"}

    def test_the_fitted_reserve_is_what_the_pools_ask_for(self, k26):
        """The constant is not free: it must be the minimax solution for the two pools."""
        resident = weights.rank_bytes(weights.target_parts(k26, tp=8, attention_tp=8))
        free = calibrate.free_from_pools([(o, 77_184) for o in OBSERVED], resident_bytes=resident)
        fitted = machine.KNOWN_GPUS["rtx-pro-6000"].total_bytes - free
        assert abs(fitted - machine.RESERVED_MANY_GPUS) < machine.MIB

    def test_no_free_memory_gives_both_pools_at_one_start(self, k26):
        """What the 2.9 % are: each pool alone asks for another free memory, 0.74 % apart."""
        resident = weights.rank_bytes(weights.target_parts(k26, tp=8, attention_tp=8))
        first, second = ((resident + o.tokens * 77_184) / o.fraction for o in OBSERVED)
        assert (first / 1e9, second / 1e9) == pytest.approx((99.085, 98.353), abs=1e-3)
        missed = [(98_209 - 101_134) * 77_184 / 1e9, (200_635 - 195_011) * 77_184 / 1e9]
        assert missed == pytest.approx([-0.226, 0.434], abs=1e-3)  # the "0.2 and 0.4 GB" of the output

    def test_one_free_memory_gives_both_if_the_first_start_had_no_drafter(self, cli, data, k26):
        """Then they agree to 0.1 %, and the plan is within half a percent of both."""
        resident = weights.rank_bytes(weights.target_parts(k26, tp=8, attention_tp=8))
        free = calibrate.free_from_pools(list(zip(OBSERVED, (70_272, 77_184), strict=True)), resident_bytes=resident)
        reserved = round((machine.KNOWN_GPUS["rtx-pro-6000"].total_bytes - free) / machine.MIB)
        assert reserved == 4_147
        planned = []
        for observation, draft in zip(OBSERVED, (False, True), strict=True):
            arguments = eight_cards(data, "--context", 90_000, "--mem-fraction-static", observation.fraction)
            if not draft:
                arguments = [a for i, a in enumerate(arguments) if not {"--draft"} & {a, arguments[i - 1]}]
            _, document = cli(*arguments, "--reserved", f"{reserved}MiB")
            planned.append(document["pool"]["tokens"] / observation.tokens - 1)
        assert planned == pytest.approx([0.0037, -0.0037], abs=1e-4)

    def test_the_output_says_how_its_constant_was_found(self, cli, data):
        _, document = cli(*eight_cards(data, "--context", 90_000, "--mem-fraction-static", 0.93))
        why = {row["what"]: row["why"] for row in document["assumptions"]}
        assert (
            "101,134 tokens at 0.85, 195,011 at 0.93) by 2.9 % each"
            in why["3,645 MiB gone before the weights are loaded"]
        )
        formula = next(text for what, text in why.items() if what.startswith("77,184 B of KV a token"))
        assert formula.endswith("1 GB a rank more or less resident is 12,956 tokens")
        _, document = cli(*eight_cards(data, "--context", 90_000, "--reserved", "2GiB"))
        assert not any("fitted" in row["why"] for row in document["assumptions"])

    def test_calibrated_by_both_pools_it_is_exact_and_the_free_memory_plausible(self, cli, data):
        """With the derived weights held fixed, the pools ask for 93.2 GiB free of a 95.6 GiB card."""
        observed = [f"--observed={o.fraction}:{o.tokens}" for o in OBSERVED]
        _, document = cli(*eight_cards(data, "--context", 195_000, "--mem-fraction-static", 0.93, *observed))
        assert [row["planned_tokens"] for row in document["observations"]] == pytest.approx([101_134, 195_011], abs=1)
        used = [row for row in document["calibrations"] if row["used"]]
        assert [row["assumed"] for row in used] == ["resident"]
        assert used[0]["free_bytes"] / 2**30 == pytest.approx(93.18, abs=0.01)
        assert used[0]["cell_bytes"] == pytest.approx(85_257, abs=1)
        # The other readings contradict the weights: 70,272 + 6,912 bytes a token are too few.
        contradicted = {
            row["assumed"]: row["resident_bytes"] for row in document["calibrations"] if row["contradiction"]
        }
        assert contradicted["cell"] == pytest.approx(69.18e9, rel=1e-3)
        assert contradicted["free"] == pytest.approx(75.48e9, rel=1e-3)

    @pytest.mark.parametrize(("fraction", "code"), [(0.92, 0), (0.93, 0), (0.94, 1)])
    def test_093_runs_and_094_is_out_of_memory(self, cli, data, fraction, code):
        got, document = cli(*eight_cards(data, "--context", 180_000, "--mem-fraction-static", fraction))
        assert got == code
        assert (document["rank_bytes"]["margin"] < 0) == bool(code)
        said = " ".join(document["warnings"])
        assert ("0.94 ran out of memory at a 32k prefill" in said) == (fraction >= 0.93)
        assert ("0.94 was asked for; test a full-length prefill" in said) == (fraction == 0.94)

    def test_it_does_not_promise_what_lies_within_its_error(self, cli, data):
        """By layer-scaled 200,635 tokens at 0.93: more than 200,000, but the real pool had 195,011."""
        asked = eight_cards(data, "--context", 200_000, "--mem-fraction-static", 0.93)
        code, document = cli(*asked)
        assert code == 1
        assert document["reason"] == (
            "the pool holds 200,635 tokens, the wish needs 200,018 and 3% more, "
            "by which a plan without --observed may be wrong"
        )
        # Once the pool was seen, the plan is as exact as the log.
        for context, fits in ((195_000 - 18, 0), (195_000, 1)):
            asked = eight_cards(data, "--context", context, "--mem-fraction-static", 0.93, "--observed", "0.93:195011")
            assert cli(*asked)[0] == fits

    def test_context_length_does_not_size_the_pool(self, cli, data):
        pools = set()
        for context in (10_000, 90_000):
            _, document = cli(*eight_cards(data, "--context", context, "--mem-fraction-static", 0.93))
            pools.add(document["pool"]["tokens"])
            assert any("--context-length does not size the pool" in text for text in document["warnings"])
        assert pools == {200_635}

    def test_what_fewer_running_requests_really_free(self):
        """64 -> 8 requests: the row table gives 45 MB back, the stock backend's graph buffers 3 GB."""
        rows = [buffers.row_table_bytes(max_requests=n, context=200_000, tree_size=9, page_size=1) for n in (64, 8)]
        assert rows == [65 * 200_018 * 4, 9 * 200_018 * 4]
        graph = [buffers.triton_buffer_bytes(batch=n, context=200_000, tree_size=9, heads=8) for n in (64, 8)]
        assert graph[0] == 64 * 9 * 8 * 256 * 513 * 4 + 64 * 9 * 200_000 * 8 + 64 * 9 * 200_009
        assert graph[0] - graph[1] == pytest.approx(3.03e9, rel=0.01)


class TestBuffers:
    def test_activations_are_scaled_by_the_models_width(self, cli, data, tmp_path):
        config = json.loads((data / "deepseek_v3.json").read_text()) | {"hidden_size": 3584}
        (tmp_path / "config.json").write_text(json.dumps(config))
        sizes = [
            cli("plan", "--model", model, "--context", "1k")[1]["late_allocations"]["prefill activations"]
            for model in (data / "kimi_k2_6.json", data / "deepseek_v3.json", tmp_path)
        ]
        assert sizes == [4096 * 1_150_000, 4096 * 1_150_000, 4096 * 575_000]

    def test_kdtree_is_small_where_the_stock_backend_is_not(self):
        shape = dict(batch=48, context=131_072, tree_size=64, heads=16)
        ours = buffers.kdtree_buffer_bytes(**shape, page_size=1)
        assert ours < 0.2e9 < 29e9 < buffers.triton_buffer_bytes(**shape)

    def test_kdtrees_by_hand(self):
        """8 requests of 200,000 tokens, a tree of 9, 8 heads: rows of 200,018 slots, 12 B a slot."""
        got = buffers.kdtree_buffer_bytes(batch=8, context=200_000, tree_size=9, heads=8, page_size=1)
        lists, partials = 8 * 200_018 * 12 + 9 * 4 + 8 * 8, buffers.workspace_bytes(batch=8, tree_size=9, heads=8)
        assert got == lists + 8 * 81 + 9 * 16 + 8 * 256 * 513 * 4 + partials
        # 72 rows are 9 blocks of 8: two tiles of 40 rows, three of 24, or five of 16, and one SM a tile and column.
        assert partials == max((188 // t + 7) * t * 8 * n * 1056 for t, n in ((2, 5), (3, 3), (5, 2)))

    @pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
    def test_the_workspace_is_the_kernels(self, tmp_path):
        """Against the kernel's own header, compiled here."""
        header = ROOT / "sgl-kernel-sm120" / "csrc" / "mla_tree_verify" / "schedule.h"
        shapes = list(itertools.product((1, 8, 64, 256), (1, 9, 33, 128), (1, 8, 64), (132, 188)))
        program = tmp_path / "workspace"
        (tmp_path / "workspace.cpp").write_text(
            "#include <cstdio>\n#include <initializer_list>\n"
            f'#include "{header}"\n'
            'int main() { int b, q, h, s; while (scanf("%d %d %d %d", &b, &q, &h, &s) == 4)\n'
            '  printf("%lld\\n", (long long)sgl_kernel_sm120::mla_tree_verify_op::workspace_bytes(b, q, h, s)); }\n'
        )
        subprocess.run(["g++", "-std=c++17", "-o", program, program.with_suffix(".cpp")], check=True, timeout=600)
        asked = "\n".join(" ".join(map(str, shape)) for shape in shapes)
        done = subprocess.run([program], input=asked, capture_output=True, text=True, check=True, timeout=600)
        names = ("batch", "tree_size", "heads", "sms")
        ours = [buffers.workspace_bytes(**dict(zip(names, shape, strict=True))) for shape in shapes]
        assert ours == [int(line) for line in done.stdout.split()]


class TestPinnedRelease:
    """What the plan says by default, against the pinned release's own code."""

    @pytest.mark.parametrize("fraction", [0.85, 0.93])
    def test_the_pool(self, cli, data, monkeypatch, tmp_path, fraction):
        """The release's sizing, told that it runs on a machine of the plan's memory, makes the plan's pool."""
        import torch
        from transformers import PretrainedConfig

        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.cp import utils as context_parallel
        from sglang.srt.mem_cache import kv_cache_configurator as upstream
        from sglang.srt.model_executor import pool_configurator
        from sglang.srt.speculative.dflash_utils import dflash_draft_cell_size_per_token

        wish = ("--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json")
        _, document = cli("plan", *wish, "--mem-fraction-static", fraction)
        free = document["rank_bytes"]["free_before_load"]
        loaded = sum(row["rank_bytes"] for row in document["weights"])
        parallel = SimpleNamespace(
            launch_world_size=8, world_group=mock.Mock(), attn_dcp_size=1, attn_tp_size=8,
            enable_dsa_cache_layer_split=False,
        )  # fmt: skip
        schedule = SimpleNamespace(mem_fraction_static=fraction, prefill_max_requests=None, max_total_tokens=None)
        for module in (upstream, pool_configurator, context_parallel):
            monkeypatch.setattr(module, "get_parallel", lambda: parallel)
            monkeypatch.setattr(module, "get_schedule", lambda: schedule, raising=False)
        for name in ("get_exec", "get_disagg", "get_mm"):
            monkeypatch.setattr(upstream, name, mock.MagicMock())
        monkeypatch.setattr(upstream, "get_available_gpu_memory", lambda *_, **__: (free - loaded) / 2**30)
        monkeypatch.setattr(pool_configurator, "compute_page_shard_scratch_bytes", lambda *_, **__: 0)
        monkeypatch.setattr(pool_configurator, "mambaish_config", lambda _: None)
        (tmp_path / "config.json").write_text((data / "kimi_k2_6_dflash.json").read_text())
        draft = ModelConfig(model_path=str(tmp_path), is_draft_model=True)
        target = SimpleNamespace(
            is_multimodal=True, kv_lora_rank=512, qk_rope_head_dim=64, context_len=200_000, hf_config=PretrainedConfig()
        )
        algorithms = {"is_dflash_family.return_value": True, "is_eagle.return_value": False}
        start = SimpleNamespace(
            device="cuda", gpu_id=0, pp_size=1, is_draft_worker=False, mambaish_config=None, use_mla_backend=True,
            spec_algorithm=mock.Mock(**algorithms, **{"is_standalone.return_value": False}),
            model_config=target, kv_cache_dtype_str="auto", kv_cache_dtype=torch.bfloat16,
            layer_info=SimpleNamespace(num_effective_layers=61, start_layer=0, end_layer=61),
            spec_aux_config=SimpleNamespace(dflash_draft_num_layers=draft.num_hidden_layers),
            dflash_draft_cell_size_per_token=dflash_draft_cell_size_per_token(
                draft_model_config=draft, draft_num_layers=6, draft_kv_cache_dtype=torch.bfloat16, tp_size=8
            ),
            fused_entry_bytes=lambda kind: None, server_args=SimpleNamespace(enable_hisparse=False),
        )  # fmt: skip
        budget = upstream.KVCacheConfigurator._profile_available_bytes(start, free / 2**30)
        pool = pool_configurator.DefaultPoolConfigurator(start).calculate_pool_sizes(budget, page_size=1)
        assert pool.max_total_num_tokens == pytest.approx(document["pool"]["tokens"], abs=1)  # GiB as floats

    def test_the_drafter_is_loaded_before_the_pools(self):
        managers = pytest.importorskip("sglang.srt.managers.scheduler")
        scheduler = mock.MagicMock()
        scheduler.init_memory_pools.side_effect = StopIteration  # what comes then does not matter
        with mock.patch.object(managers, "get_model"), pytest.raises(StopIteration):
            managers.Scheduler.init_model_worker(scheduler)
        called = [name for name, _, _ in scheduler.method_calls]
        assert called.index("maybe_init_draft_worker") < called.index("init_memory_pools")


class TestVerb:
    def test_the_recipe_of_200k(self, cli, data):
        """No higher fraction than one that ran, so the context that is sure to fit is a little shorter."""
        code, document = cli(
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json", "--context", 200_000
        )  # fmt: skip
        assert code == 1 and not document["fits"]
        flags = dict(document["command"]["flags"])
        assert flags["--mem-fraction-static"] == "0.93"
        assert flags["--max-running-requests"] == "8"
        assert flags["--chunked-prefill-size"] == "4096"
        assert flags["--context-length"] == "200000"
        assert flags["--speculative-num-draft-tokens"] == "9"
        assert document["command"]["environment"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        assert document["pool"]["tokens"] < document["pool"]["wanted_tokens"] == 200_018
        assert "--context 184320" in {row["change"] for row in document["alternatives"]}
        assert "0.93 did not: plan goes no higher unless --mem-fraction-static asks for it." in " ".join(
            document["warnings"]
        )

    def test_a_multimodal_model_keeps_memory_for_image_embeddings(self, cli, data, tmp_path):
        """SGLang takes SGLANG_VLM_CACHE_SIZE_MB, 100 MiB, out of the KV budget."""
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.kv_cache_configurator import mm_runtime_reservation_gb

        reserved = mm_runtime_reservation_gb(is_multimodal=True, mm_feature_transport=None)
        assert envs.SGLANG_VLM_CACHE_SIZE_MB.get() == 100 and reserved * 2**30 == kv_pool.EMBEDDING_CACHE_BYTES
        config = json.loads((data / "kimi_k2_6.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config["text_config"] | {"model_type": "kimi_k2"}))
        resident = []
        for model in (data / "kimi_k2_6.json", tmp_path):
            _, document = cli("plan", "--model", model, "--weights", "int4-g32", "--context", 20_000)
            parts = sum(row["rank_bytes"] for row in document["weights"])
            resident.append(document["rank_bytes"]["resident"] - parts)
        assert resident == [100 << 20, 0]

    def test_a_wish_that_does_not_fit_says_why_and_what_does(self, cli, data):
        code, document = cli(
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json",
            "--context", 180_000, "--concurrency", 2,
        )  # fmt: skip
        assert code == 1
        assert "the wish needs 360,036" in document["reason"]
        changes = {row["change"]: row for row in document["alternatives"]}
        assert changes["--kv-dtype fp8"]["pool_tokens"] >= 360_036
        assert "--concurrency 1" in changes
        context = next(int(change.split()[1]) for change in changes if change.startswith("--context "))
        assert 80_000 < context < 100_000
        # The longest context is the longest: it fits, and 1024 more does not.
        for extra, fits in ((0, 0), (1024, 1)):
            again, _ = cli(
                "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json",
                "--context", context + extra, "--concurrency", 2,
            )  # fmt: skip
            assert again == fits

    def test_it_says_when_no_single_change_fits(self, data, capsys):
        assert main(["plan", "--model", str(data / "kimi_k2_6.json"), "--gpu", "rtx-5090"]) == 1
        assert "no single change of the wish makes it fit" in capsys.readouterr().out

    def test_a_given_fraction_holds_for_the_nearest_concurrency(self, cli, data):
        """Not for the largest that fits at some other fraction, which would be dropped."""
        wish = (
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json",
            "--mem-fraction-static", 0.85, "--context", 60_000, "--concurrency",
        )  # fmt: skip
        code, document = cli(*wish, 4)
        nearest = [row["change"] for row in document["alternatives"] if row["change"].startswith("--concurrency ")]
        assert code == 1 and len(nearest) == 1
        fits = int(nearest[0].split()[1])
        assert [cli(*wish, n)[0] for n in (fits, fits + 1)] == [0, 1]

    @pytest.mark.parametrize(
        ("context", "given", "offered"),
        [
            ("180k", 0.85, "0.93"),
            ("200k", 0.93, None),
            (90_000, 0.85, "0.86"),
            ("1k", 0.96, "0.93"),
        ],
    )
    def test_the_fraction_next_to_the_one_given_that_fits(self, cli, data, context, given, offered):
        wish = (
            "plan",
            "--model",
            data / "kimi_k2_6.json",
            "--draft",
            data / "kimi_k2_6_dflash.json",
            "--context",
            context,
        )
        code, document = cli(*wish, "--mem-fraction-static", given)
        words = [row["change"].split() for row in document["alternatives"]]
        assert code == 1 and dict(words).get("--mem-fraction-static") == offered
        if offered:
            assert words[0][0] == "--mem-fraction-static" and cli(*wish, *words[0])[0] == 0

    def test_the_pool_is_given_by_both_ways_to_charge_a_drafter(self, cli, data, capsys):
        """The known pools are within 3 % of the one by layers, in the plain call."""
        wish = ["plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json"]
        for observed, fraction in ((101_134, 0.85), (195_011, 0.93)):
            pool = cli(*wish, "--mem-fraction-static", fraction)[1]["pool"]
            assert pool["tokens"] == pool["by_accounting"]["own-geometry"]
            assert abs(pool["by_accounting"]["layer-scaled"] / observed - 1) < 0.03
        assert main([*map(str, wish), "--mem-fraction-static", "0.85"]) == 1
        printed = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
        for name, tokens in (("own-geometry", "82,707"), ("layer-scaled", "98,209")):
            assert f"by {name} {tokens} tokens" in printed
        assert (
            "counted by own-geometry; by layer-scaled it would be 98,209 tokens (+18.7%): drafter loaded after"
            in printed
        )
        (row,) = (row for row in cli(*wish)[1]["assumptions"] if row["what"] == "drafter charged by own-geometry")
        assert row["kind"] == "derived" and row["why"].endswith("as this fork does (--accounting)")
        assert not cli("plan", "--model", data / "kimi_k2_6.json")[1]["pool"]["by_accounting"]

    def test_sizes_as_people_write_them(self, cli, data):
        plans = [
            cli("plan", "--model", data / "kimi_k2_6.json", "--context", context, "--chunked-prefill-size", chunk,
                "--observed", observed)[1]
            for context, chunk, observed in (("150k", "4k", "0.93:195k"), (150_000, 4_000, "0.93:195000"))
        ]  # fmt: skip
        assert plans[0] == plans[1]

    def test_too_few_gpus_for_the_weights(self, cli, data):
        code, document = cli("plan", "--model", data / "kimi_k2_6.json", "--gpus", 4, "--context", 8_000)
        assert code == 1
        assert document["reason"].startswith("the weights take 150.")
        assert "--gpus 8" in {row["change"] for row in document["alternatives"]}

    def test_data_parallel_attention_gives_each_group_its_pool(self, cli, data):
        _, document = cli(
            "plan", "--model", data / "deepseek_v3.json", "--gpu", "h200", "--dp", 8, "--context", 50_000,
            "--concurrency", 16,
        )  # fmt: skip
        assert document["pool"]["wanted_tokens"] == 2 * 50_001
        flags = dict(document["command"]["flags"])
        assert flags["--dp-size"] == "8" and "--enable-dp-attention" in flags

    def test_expert_parallelism_moves_no_bytes_but_redundancy_adds_some(self, cli, data):
        resident = []
        for extra in ([], ["--ep", 8], ["--ep", 8, "--redundant-experts", 32]):
            _, document = cli("plan", "--model", data / "kimi_k2_6.json", "--context", 20_000, *extra)
            resident.append(document["rank_bytes"]["resident"])
        assert resident[0] == resident[1]
        assert resident[2] - resident[1] == 60 * 32 * 3 * 7168 * 2048 * 9 // 16 // 8
        assert dict(document["command"]["flags"])["--ep-num-redundant-experts"] == "32"

    def test_a_folder_becomes_the_model_path(self, cli, data, tmp_path):
        (tmp_path / "config.json").write_text((data / "deepseek_v3.json").read_text())
        _, document = cli("plan", "--model", tmp_path, "--gpu", "h200", "--context", 8_000)
        assert dict(document["command"]["flags"])["--model-path"] == str(tmp_path)

    def test_tables_and_output_file(self, data, tmp_path, capsys):
        out = tmp_path / "sub" / "plan.json"
        assert main(["plan", "--model", str(data / "kimi_k2_6.json"), "--context", "100000", "--output", str(out)]) == 0
        printed = capsys.readouterr().out
        assert "The wish fits" in printed and "python -m sglang.launch_server" in printed
        assert json.loads(out.read_text())["schema"] == "sglang.kdtree/plan/1"


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--gpu", "toaster"], "--gpu"),
            (["--gpu", "96furlongs"], "--gpu"),
            (["--reserved", "much"], "--reserved"),
            (["--gpu", "1"], "--gpu"),
            (["--reserved", "500GB"], "--gpu"),
            (["--page-size", 7], "--page-size"),
            (["--tree-size", 9], "--tree-size"),
            (["--max-running-requests", 1, "--concurrency", 4], "--max-running-requests"),
            (["--max-running-requests", 300], "--max-running-requests"),
            (["--ep", 8, "--redundant-experts", -8], "--redundant-experts"),
            (["--context", 0], "--context"),
            (["--context", 10_000_000], "--context"),
            (["--concurrency", -1], "--concurrency"),
            (["--dp", 3], "--dp"),
            (["--gpus", 5], "--gpus"),
            (["--ep", 3], "--ep"),
            (["--ep", 8, "--redundant-experts", 4], "--ep"),
            (["--redundant-experts", 8], "--redundant-experts"),
            (["--mem-fraction-static", 1.2], "--mem-fraction-static"),
            (["--observed", "0.85"], "--observed"),
            (["--observed", "0.85:0"], "--observed"),
            (["--observed", "0.8:1", "--observed", "0.8:2"], "--observed"),
            (["--observed", "0.8:1", "--observed", "0.9:2", "--observed", "0.7:1"], "--observed"),
        ],
    )
    def test_a_bad_argument_is_named(self, cli_error, data, arguments, named):
        error = cli_error("plan", "--model", data / "kimi_k2_6.json", *arguments)
        assert error["what"].startswith(named)

    def test_a_tree_larger_than_the_kernels(self, cli_error, cli, data):
        arguments = ("plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json")
        arguments += ("--context", 8_000, "--tree-size", 129)
        assert "at most 128" in cli_error(*arguments)["expected"]
        assert (
            "speculative-num-draft-tokens 129"
            in cli(*arguments, "--attention-backend", "triton")[1]["command"]["shell"]
        )
        from sgl_kernel_sm120 import attention

        assert (buffers.MAX_BATCH, buffers.MAX_TREE) == (attention.MAX_B, attention.MAX_S_Q)

    def test_a_wish_far_beyond_any_machine_is_answered_at_once(self, cli, data):
        """The nearest wishes are found by halving, not by counting down."""
        arguments = ("plan", "--model", data / "kimi_k2_6.json", "--context", 1_000, "--attention-backend", "triton")
        code, document = cli(*arguments, "--concurrency", 100_000_000)
        assert code == 1
        changes = [row["change"] for row in document["alternatives"]]
        assert any(change.startswith("--concurrency ") for change in changes) or not changes

    def test_truncated_json(self, cli_error, data, tmp_path):
        cut = tmp_path / "config.json"
        cut.write_text((data / "kimi_k2_6.json").read_text()[:200])
        error = cli_error("plan", "--model", cut)
        assert "200 characters read" in error["got"]

    def test_absent_file(self, cli_error, tmp_path):
        assert "No such file" in cli_error("plan", "--model", tmp_path / "none.json")["got"]

    def test_a_drafter_that_is_none(self, cli_error, data):
        error = cli_error("plan", "--model", data / "kimi_k2_6.json", "--draft", data / "deepseek_v3.json")
        assert "target_layer_ids" in error["what"]

    def test_unknown_quantisation_can_be_stated(self, cli, cli_error, data, tmp_path):
        config = json.loads((data / "deepseek_v3.json").read_text())
        config["quantization_config"] = {"quant_method": "mystery"}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        error = cli_error("plan", "--model", path)
        assert "mystery" in error["got"] and "--weights" in error["remedy"]
        _, document = cli("plan", "--model", path, "--weights", "fp8-block", "--context", 8_000)
        assert {row["part"]: row["bits"] for row in document["weights"]}["routed experts"] == 8 + 32 / 128**2

    @pytest.mark.parametrize(
        ("quantisation", "named"),
        [
            ("fp8", "quant_method"),
            ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
            ({"quant_method": "fp8", "weight_block_size": "128x128"}, "weight_block_size"),
            ({"quant_method": "compressed-tensors"}, "config_groups"),
            ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}}, "config_groups"),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"weights": {"num_bits": 4}}},
                    "ignore": 7,
                },
                "ignore",
            ),
            ({"quant_method": 4}, "quant_method"),
        ],
    )
    def test_a_damaged_quantisation_names_its_key(self, cli_error, data, tmp_path, quantisation, named):
        config = json.loads((data / "deepseek_v3.json").read_text()) | {"quantization_config": quantisation}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert cli_error("plan", "--model", tmp_path)["what"].endswith(f"quantization_config.{named}")

    def test_a_file_that_is_no_text(self, cli_error, tmp_path):
        (tmp_path / "config.json").write_bytes(b"\x80\x02\xff\xfe")
        assert cli_error("plan", "--model", tmp_path)["got"] == r"4 bytes that begin with b'\x80\x02\xff\xfe'"

    def test_observations_that_no_machine_can_make(self, cli_error, data):
        for pair in (("0.85:200000", "0.93:100000"), ("0.5:100000", "0.9:180000")):
            error = cli_error("plan", "--model", data / "kimi_k2_6.json", *(f"--observed={text}" for text in pair))
            assert error["what"] == "--observed" and "grows with the fraction" in error["expected"]

    def test_one_observation_fixes_the_resident_memory(self, cli, data):
        (one,) = calibrate.calibrations(OBSERVED[:1], known=known(free=100_000_000_000, weights=70_000_000_000))
        assert one.resident_bytes == 85_000_000_000 - 101_134 * 70_272 and not one.contradiction
        (one,) = calibrate.calibrations(OBSERVED[:1], known=known(free=90_000_000_000, weights=70_000_000_000))
        assert "less than the weights alone" in one.contradiction
        # A pool that the weights leave no room for is not believed, and that is said.
        _, document = cli("plan", "--model", data / "kimi_k2_6.json", "--context", 8_000, "--observed", "0.85:900000")
        assert "contradicts a known fact" in document["warnings"][0]
        assert not any(row["used"] for row in document["calibrations"])


def known(**changes):
    figures = dict(
        free=98_820_321_818, resident=76_416_677_648, weights=76_416_677_648, cell=70_272, card=102_642_000_000
    )
    return calibrate.Known(**(figures | changes))


def test_sizes_with_units():
    assert machine.parse_bytes("97887MiB", argument="x") == 97_887 << 20
    assert machine.parse_bytes("96 GB", argument="x") == 96_000_000_000
    assert machine.parse_bytes("1.5gib", argument="x") == 3 << 29


def test_a_calibration_does_not_survive_a_change_of_its_machine(k26, drafter):
    """fp8 KV or more GPUs would change what was calibrated, so they are not offered then."""
    from sglang.kdtree.plan.solve import Wish, nearest_wishes

    wish = Wish(
        target=k26, drafter=drafter, gpu=machine.KNOWN_GPUS["rtx-pro-6000"], gpus=8, attention_dp=1,
        expert_parallel=1, redundant_experts=0, context=200_000,
        concurrency=2, max_requests=8, chunk=4096, tree_size=9, page_size=1,
        kv_dtype="bf16", backend="kdtree_sm120", accounting="own-geometry", reserved_bytes=0,
    )  # fmt: skip
    offered = {label for label, _, _ in nearest_wishes(wish)}
    calibrated = msgspec.structs.replace(
        wish, calibration=calibrate.calibrations(OBSERVED[1:], known=known(cell=77_184))[0]
    )
    assert "--kv-dtype fp8" in offered
    assert not {"--kv-dtype fp8", "--gpus 16"} & {label for label, _, _ in nearest_wishes(calibrated)}
