# SPDX-License-Identifier: Apache-2.0
"""Memory arithmetic, with the case study's machine as the yardstick."""

import json

import msgspec
import pytest

from sglang.kdtree.errors import KitError
from sglang.kdtree.model_shape import load_drafter, load_target, target_shape
from sglang.kdtree.plan import buffers, calibrate, kv_pool, machine, weights
from sglang.kdtree.plan.calibrate import Observation

OBSERVED = [Observation(fraction=0.85, tokens=101_134), Observation(fraction=0.93, tokens=195_011)]


@pytest.fixture
def k26(data):
    return load_target(data / "kimi_k2_6.json")


@pytest.fixture
def drafter(data):
    return load_drafter(data / "kimi_k2_6_dflash.json")


def case_study(data, *extra):
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
                drafter, target=k26, target_cell=70_272, attention_tp=8, kv_dtype="bf16", accounting=accounting
            )
            for name, accounting in kv_pool.ACCOUNTING.items()
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
            accounting=kv_pool.ACCOUNTING["own-geometry"],
        )
        assert cell == 3_072

    def test_the_pool_is_rounded_down_to_whole_pages(self):
        sizes = dict(free_bytes=1_000_000, fraction=0.9, resident_bytes=500_000, cell_bytes=1_000)
        assert kv_pool.pool_tokens(**sizes, page_size=1) == 400
        assert kv_pool.pool_tokens(**sizes, page_size=64) == 384

    def test_no_pool_is_left_when_the_weights_fill_the_budget(self):
        assert kv_pool.pool_tokens(free_bytes=100, fraction=0.5, resident_bytes=60, cell_bytes=1, page_size=1) == 0


class TestCaseStudy:
    def test_both_pools_within_three_percent_without_calibration(self, cli, data):
        """Only the memory gone before loading is fitted (one number for two pools); all else is derived."""
        planned = {}
        for observation in OBSERVED:
            _, document = cli(*case_study(data, "--context", 90_000, "--mem-fraction-static", observation.fraction))
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
        free = calibrate.free_from_pools(OBSERVED, resident_bytes=resident, cell_bytes=77_184)
        fitted = machine.KNOWN_GPUS["rtx-pro-6000"].total_bytes - free
        assert abs(fitted - machine.RESERVED_MANY_GPUS) < machine.MIB

    def test_calibrated_by_both_pools_it_is_exact_and_the_free_memory_plausible(self, cli, data):
        """With the derived weights held fixed, the pools ask for 93.2 GiB free of a 95.6 GiB card."""
        observed = [f"--observed={o.fraction}:{o.tokens}" for o in OBSERVED]
        _, document = cli(*case_study(data, "--context", 195_000, "--mem-fraction-static", 0.93, *observed))
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
        got, document = cli(*case_study(data, "--context", 180_000, "--mem-fraction-static", fraction))
        assert got == code
        assert (document["rank_bytes"]["margin"] < 0) == bool(code)
        assert ("0.94, which ran out of memory at a 32k prefill" in " ".join(document["warnings"])) == bool(code)

    def test_context_length_does_not_size_the_pool(self, cli, data):
        pools = set()
        for context in (10_000, 90_000):
            _, document = cli(*case_study(data, "--context", context, "--mem-fraction-static", 0.93))
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
    def test_kdtree_is_small_where_the_stock_backend_is_not(self):
        shape = dict(batch=48, context=131_072, tree_size=64, heads=16)
        assert buffers.kdtree_buffer_bytes(**shape) < 0.5e9 < 29e9 < buffers.triton_buffer_bytes(**shape)

    @pytest.mark.parametrize("batch", [1, 8, 64])
    @pytest.mark.parametrize(("tree_size", "heads"), [(1, 8), (9, 8), (33, 8), (64, 16), (9, 64)])
    def test_the_bound_of_the_workspace_holds(self, batch, tree_size, heads):
        """Against the kernel library's own function, where it is built."""
        import ctypes

        library = pytest.importorskip("sgl_kernel_sm120._library")
        try:
            exact = library.host_function("mla_tree_verify_workspace_bytes", ctypes.c_int64, *[ctypes.c_int32] * 4)
        except AttributeError:
            exact = None  # a library from before this kernel
        if exact is None:
            pytest.skip("the kernel library is not built here")
        bound = buffers.partials_bytes(batch=batch, rows_per_request=tree_size * heads)
        assert exact(batch, tree_size, heads, buffers.SMS) <= bound <= 6 * exact(batch, tree_size, heads, buffers.SMS)


class TestVerb:
    def test_the_recipe_of_200k(self, cli, data):
        code, document = cli(
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json", "--context", 200_000
        )  # fmt: skip
        assert code == 0 and document["fits"]
        flags = dict(document["command"]["flags"])
        assert flags["--mem-fraction-static"] == "0.94"
        assert flags["--max-running-requests"] == "8"
        assert flags["--chunked-prefill-size"] == "4096"
        assert flags["--context-length"] == "200000"
        assert flags["--speculative-num-draft-tokens"] == "9"
        assert document["command"]["environment"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        assert document["pool"]["tokens"] >= document["pool"]["wanted_tokens"] == 200_018

    def test_a_wish_that_does_not_fit_says_why_and_what_does(self, cli, data):
        code, document = cli(
            "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json",
            "--context", 200_000, "--concurrency", 2,
        )  # fmt: skip
        assert code == 1
        assert "the wish needs 400,036" in document["reason"]
        changes = {row["change"]: row for row in document["alternatives"]}
        assert changes["--kv-cache-dtype fp8_e4m3"]["pool_tokens"] >= 400_036
        assert "--concurrency 1" in changes
        context = next(int(change.split()[1]) for change in changes if change.startswith("--context "))
        assert 100_000 < context < 200_000
        # The longest context is the longest: it fits, and 1024 more does not.
        for extra, fits in ((0, 0), (1024, 1)):
            again, _ = cli(
                "plan", "--model", data / "kimi_k2_6.json", "--draft", data / "kimi_k2_6_dflash.json",
                "--context", context + extra, "--concurrency", 2,
            )  # fmt: skip
            assert again == fits

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
        from sglang.kdtree.cli import main

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
        assert "mystery" in cli_error("plan", "--model", path)["got"]

    def test_one_observation_fixes_the_resident_memory(self):
        one = calibrate.with_one(OBSERVED[0], free_bytes=100_000_000_000, cell_bytes=70_272)
        assert one.resident_bytes == 85_000_000_000 - 101_134 * 70_272


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
        kv_dtype="bf16", backend="kdtree_sm120", accounting=kv_pool.ACCOUNTING["own-geometry"], reserved_bytes=0,
    )  # fmt: skip
    offered = {label for label, _, _ in nearest_wishes(wish)}
    calibrated = msgspec.structs.replace(
        wish, calibration=calibrate.with_one(OBSERVED[1], free_bytes=98_820_321_818, cell_bytes=77_184)
    )
    assert "--kv-cache-dtype fp8_e4m3" in offered
    assert not {"--kv-cache-dtype fp8_e4m3", "--gpus 16"} & {label for label, _, _ in nearest_wishes(calibrated)}
