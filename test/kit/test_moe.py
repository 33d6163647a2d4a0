# SPDX-License-Identifier: Apache-2.0
"""Expert imbalance from routing traces: counting, the cost model with hand-made numbers, upstream's load balancer."""

import numpy as np
import pytest
import torch
from kit.scripted import sglang_stream

from sglang.kdtree.errors import KitError
from sglang.kdtree.probe import moe_model, moe_trace
from sglang.kdtree.probe.moe import recording_copies, worst_layers

# Two steps of one token, one layer, 8 experts, top-2, on 4 ranks of 2 experts:
# step 0 chooses experts 0 and 1 (both on rank 0), step 1 experts 0 and 4 (ranks 0 and 2).
IDS = np.array([[[[0, 1]]], [[[0, 4]]]])


@pytest.fixture
def counts():
    return moe_trace.count_ids(IDS, experts=8)


class TestCounting:
    def test_tokens_per_expert(self, counts):
        assert counts.tolist() == [[[1, 1, 0, 0, 0, 0, 0, 0]], [[1, 0, 0, 0, 1, 0, 0, 0]]]

    def test_absent_tokens_and_repeated_experts(self):
        ids = np.array([[[[2, 2], [-1, -1], [2, 0]]]])
        assert moe_trace.count_ids(ids, experts=3).tolist() == [[[1, 0, 3]]]

    def test_replicas_are_counted_as_their_expert(self):
        physical = np.array([[5, 1, 2], [1, 1, 1]])
        to_logical = np.array([[0, 1, 0], [1, 0, 1]])
        assert moe_trace.to_logical_counts(physical, to_logical).tolist() == [[7, 1], [1, 2]]

    def test_layers_without_routing_are_left_out(self):
        tokens = np.zeros((1, 3, 4), dtype=np.int64)
        tokens[0, 2, 1] = 1
        got = moe_trace.routed(tokens, source="x")
        assert got.layers == [2] and got.tokens.shape == (1, 1, 4)

    def test_passes_of_a_dense_drafter_are_no_steps(self, counts):
        """The recorder of a speculating server has an empty pass for each draft."""
        with_drafts = np.zeros((4, 1, 8), dtype=np.int64)
        with_drafts[1::2] = counts
        assert moe_trace.routed(with_drafts, source="x").tokens.tolist() == counts.tolist()


class TestCost:
    def test_experts_in_order(self, counts):
        """Reads per rank: step 0 [2, 0, 0, 0], step 1 [1, 0, 1, 0]; the slowest reads 2 and 1."""
        placement = moe_model.contiguous(layers=1, experts=8, ranks=4)
        activated = moe_model.activated_per_rank(counts, placement)
        assert activated.tolist() == [[[2, 0, 0, 0]], [[1, 0, 1, 0]]]
        got = moe_model.cost("x", activated)
        assert got.activated_mean == 4 / 8
        assert got.slowest_mean == 1.5
        assert got.idle_share == 5 / 8
        assert got.lost_share == (6 + 2) / (4 * 3)
        assert got.time_per_step == 1.5

    def test_tensor_parallel_has_nobody_waiting(self, counts):
        got = moe_model.tensor_parallel_cost(counts, ranks=4)
        assert (got.time_per_step, got.lost_share, got.idle_share) == (0.5, 0.0, 0.0)

    def test_a_larger_batch_shares_the_reads(self, counts):
        """Both steps together: experts 0, 1, 4, so ranks read [2, 0, 1, 0] once for two steps."""
        merged = moe_model.merge_steps(counts, 2)
        assert merged.tolist() == [[[2, 1, 0, 0, 1, 0, 0, 0]]]
        activated = moe_model.activated_per_rank(merged, moe_model.contiguous(layers=1, experts=8, ranks=4))
        assert moe_model.cost("x", activated, steps_merged=2).time_per_step == 1.0

    def test_merging_drops_the_remainder(self):
        assert moe_model.merge_steps(np.ones((5, 1, 2)), 2).tolist() == [[[2, 2]], [[2, 2]]]

    def test_replicas_take_turns(self):
        """Expert 0 twice, on both ranks: a single token alternates, two tokens read both."""
        placement = moe_model.Placement(name="x", physical_to_logical=np.array([[0, 1, 0, 2]]), ranks=2)
        one = np.array([[[1, 0, 0]]] * 3)
        assert moe_model.activated_per_rank(one, placement).tolist() == [[[1, 0]], [[0, 1]], [[1, 0]]]
        two = np.array([[[2, 0, 0]]])
        assert moe_model.activated_per_rank(two, placement).tolist() == [[[1, 1]]]

    def test_no_read_is_invented_or_lost_by_a_placement(self):
        """Whatever the placement, a step of one token reads exactly top-k experts in each layer."""
        rng = np.random.default_rng(0)
        ids = np.stack([[[rng.choice(16, 4, replace=False)] for _ in range(3)] for _ in range(20)])
        many = moe_trace.count_ids(ids, experts=16)
        for extra in (0, 4):
            activated = moe_model.activated_per_rank(many, moe_model.eplb(many, ranks=4, redundant=extra))
            assert (activated.sum(axis=2) == 4).all()

    def test_upstreams_balancer_parts_what_always_comes_together(self):
        """Experts 0 and 1 always together: in order they share a rank, balanced they do not."""
        ids = np.tile(np.array([[[[0, 1]]]]), (10, 1, 1, 1))
        many = moe_trace.count_ids(ids, experts=4)
        in_order = moe_model.cost(
            "x", moe_model.activated_per_rank(many, moe_model.contiguous(layers=1, experts=4, ranks=2))
        )
        balanced = moe_model.cost("x", moe_model.activated_per_rank(many, moe_model.eplb(many, ranks=2, redundant=0)))
        assert (in_order.time_per_step, balanced.time_per_step) == (2.0, 1.0)

    def test_the_lost_time_in_microseconds(self, counts):
        got = moe_model.cost(
            "x", moe_model.activated_per_rank(counts, moe_model.contiguous(layers=1, experts=8, ranks=4))
        )
        assert moe_model.time_lost_us(got, expert_us=12.0) == pytest.approx(1.5 * 8 / 12 * 12.0)
        assert moe_model.time_lost_us(got, expert_us=None) is None

    def test_worst_layers_first(self):
        activated = np.array([[[1, 1], [4, 0]]])
        assert worst_layers(activated, [7, 9]) == [{"layer": 9, "lost_share": 0.5}, {"layer": 7, "lost_share": 0.0}]

    def test_uneven_division_is_refused(self):
        with pytest.raises(KitError, match="384 \\+ 10 on 8 ranks"):
            moe_model.check_ranks(384, 8, 10)


class TestRecordings:
    """The three forms that upstream's recorder writes, made with torch.save as it does."""

    def test_stat(self, tmp_path, counts):
        buffer = torch.zeros(4, 1, 8, dtype=torch.int32)
        buffer[:2] = torch.from_numpy(counts)
        torch.save(
            {"rank": 0, "logical_count": buffer, "average_utilization_rate_over_window": None}, tmp_path / "r.pt"
        )
        got = moe_trace.load_counts(moe_trace.trace_files(tmp_path), experts=None)
        assert got.tokens.tolist() == counts.tolist()  # the unused half of the ring is left out

    def test_per_pass_sums_the_ranks_and_orders_the_passes(self, tmp_path, counts):
        mapping = torch.arange(8)[None]
        for rank in (0, 1):
            records = [
                {
                    "forward_pass_id": 11 - step,
                    "rank": rank,
                    "global_physical_count": torch.from_numpy(counts[1 - step]) * (rank == step),
                }
                for step in (0, 1)
            ]
            torch.save({"records": records, "last_physical_to_logical_map": mapping}, tmp_path / f"r{rank}.pt")
        got = moe_trace.load_counts(moe_trace.trace_files(tmp_path), experts=None)
        assert got.tokens.tolist() == counts.tolist()

    def test_upstreams_own_accumulators_write_what_is_read(self):
        """Should the recorder's keys change, this turns red before an operator's recording does."""
        import inspect

        from sglang.srt.eplb import expert_distribution

        source = inspect.getsource(expert_distribution)
        for key in (
            "logical_count=",
            "records=",
            "last_physical_to_logical_map=",
            "forward_pass_id=",
            "global_physical_count=",
        ):
            assert key in source

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 truncated", b"not a pickle"])
    def test_damaged_files(self, tmp_path, cli_error, content):
        for name in ("r.pt", "r.npz"):
            (tmp_path / name).write_bytes(content)
            error = cli_error("probe", "moe", "--trace", tmp_path / name)
            assert error["what"] == f"--trace {tmp_path / name}"
            assert error["got"] == f"{len(content)} bytes that begin with {content[:16]!r}"

    def test_foreign_files_are_described_in_words(self, tmp_path, cli_error):
        """Not in those of torch's unpickler or numpy's reader."""
        torch.save({"weights": Exception("an object")}, tmp_path / "objects.pt")
        torch.save([torch.ones(2)], tmp_path / "list.pt")
        np.savez(tmp_path / "other.npz", logits=np.ones(2))
        np.save(tmp_path / "array.npy", np.ones(2))
        (tmp_path / "array.npy").rename(tmp_path / "array.npz")
        got = {
            name: cli_error("probe", "moe", "--trace", tmp_path / name)["got"]
            for name in ("objects.pt", "list.pt", "other.npz", "array.npz", "none.pt", "none.npz")
        }
        assert got["objects.pt"].startswith("an archive of objects/data.pkl")
        assert got["list.pt"] == "neither records nor logical_count in it"
        assert got["other.npz"] == "an archive of logits.npy"
        assert got["array.npz"].startswith("144 bytes that begin with b") and "NUMPY" in got["array.npz"]
        assert got["none.pt"] == got["none.npz"] == "No such file or directory"

    @pytest.mark.parametrize(
        "documents",
        [
            [{"logical_count": torch.ones(2, 1, 8)}, {"records": []}],  # two modes in one folder
            [{"logical_count": torch.ones(2, 1, 8)}, {"logical_count": torch.ones(2, 3, 8)}],
            [{"logical_count": "none"}],
            [{"records": [{"forward_pass_id": 0}]}],
            [{"records": [], "last_physical_to_logical_map": torch.arange(8)[None]}],
            [{"logical_count": torch.zeros(2, 1, 8)}],
            [{"logical_count": torch.tensor([[[1, -1], [1, 1]]])}],
            [{"logical_count": torch.full((2, 1, 8), float("nan"))}],
            [{"logical_count": torch.full((2, 1, 8), 1 << 62)}],
        ],
    )
    def test_recordings_that_do_not_belong_together_or_are_empty(self, tmp_path, cli_error, documents):
        for index, document in enumerate(documents):
            torch.save(document, tmp_path / f"{index}.pt")
        assert cli_error("probe", "moe", "--trace", tmp_path)["what"].startswith("--trace ")

    def test_an_empty_folder(self, tmp_path, cli_error):
        assert "no .pt file" in cli_error("probe", "moe", "--trace", tmp_path)["got"]

    def test_a_trace_of_another_shape(self, tmp_path, cli_error):
        np.savez(tmp_path / "t.npz", topk_ids=np.zeros((2, 3), dtype=np.int64))
        assert "shape (2, 3)" in cli_error("probe", "moe", "--trace", tmp_path / "t.npz")["got"]


class TestVerb:
    def test_a_trace_of_kimis_shape(self, tmp_path, cli, data):
        """Random routing of 8 of 384 on 8 ranks: a rank is idle with probability C(336, 8) / C(384, 8) = 0.341."""
        rng = np.random.default_rng(1)
        ids = rng.permuted(np.broadcast_to(np.arange(384), (40, 20, 1, 384)), axis=3)[..., :8]
        np.savez(tmp_path / "t.npz", topk_ids=ids)
        code, document = cli(
            "probe", "moe", "--trace", tmp_path / "t.npz", "--experts", 384, "--model-config", data / "kimi_k2_6.json",
            "--plot", tmp_path / "m.png", "--redundant", "16", "--batches", "4",
        )  # fmt: skip
        rows = {row["name"]: row for row in document["scenarios"]}
        base = rows["expert parallel, in order"]
        assert code == 1 and base["relative_time"] == 1.0
        assert base["idle_share"] == pytest.approx(0.341, abs=0.02)
        assert base["activated_mean"] == 1.0 and document["tokens_per_step"] == 8.0
        assert rows["in order, batch x4"]["relative_time"] < 1.0 and "EPLB deepseek, 16 redundant" in rows
        # 3 x 7168 x 2048 weights at 4.5 bits at 1,792 GB/s.
        assert document["expert_read_us"] == pytest.approx(3 * 7168 * 2048 * 4.5 / 8 / 1792e9 * 1e6)
        assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG"

    def test_recording_on_a_server(self, tmp_path, scripted, cli, counts):
        dumped = {"rank": 0, "logical_count": torch.from_numpy(counts)}
        for name in ("start", "stop"):
            scripted.pages[f"/{name}_expert_distribution_record"] = (200, "ok")
        scripted.pages["/dump_expert_distribution_record"] = (
            200,
            lambda body: torch.save(dumped, tmp_path / "expert_distribution_recorder_1.pt") or "ok",
        )
        scripted.pages["/generate"] = (200, sglang_stream([1, 2, 3], prompt_tokens=9))
        scripted.pages["/tokenize"] = (200, lambda body: {"count": len(body["prompt"].split())})
        code, document = cli(
            "probe", "moe", "--url", scripted.url, "--record-dir", tmp_path, "--ranks", 4,
            "--redundant", "", "--batches", "2",
        )  # fmt: skip
        assert code == 1 and document["steps"] == 2 and document["scenarios"][0]["time_per_step"] == 1.5
        # The prefill, which chooses every expert, is over when the recording starts.
        paths = [path.strip("/").partition("_")[0] for path, _ in scripted.requests]
        assert paths[-4:] == ["generate", "start", "stop", "dump"]

    def test_every_rank_of_a_recording_is_read(self, tmp_path, scripted, cli, counts):
        """per_pass writes one file a rank; two ranks with the same tokens are counted once."""
        scripted.pages["/server_info"][1]["tp_size"] = 2
        mapping = torch.arange(8)[None]

        def dump(body):
            for rank in (0, 1):
                records = [
                    {"forward_pass_id": step, "rank": rank, "global_physical_count": torch.from_numpy(counts[step])}
                    for step in (0, 1)
                ]
                torch.save({"records": records, "last_physical_to_logical_map": mapping}, tmp_path / f"r_{rank}.pt")
            return "ok"

        for name in ("start", "stop"):
            scripted.pages[f"/{name}_expert_distribution_record"] = (200, "ok")
        scripted.pages["/dump_expert_distribution_record"] = (200, dump)
        scripted.pages["/generate"] = (200, sglang_stream([1, 2, 3], prompt_tokens=9))
        scripted.pages["/tokenize"] = (200, lambda body: {"count": len(body["prompt"].split())})
        _, document = cli(
            "probe", "moe", "--url", scripted.url, "--record-dir", tmp_path, "--ranks", 4, "--redundant", "",
            "--batches", "",
        )  # fmt: skip
        assert document["tokens_per_step"] == 2.0 and document["scenarios"][0]["time_per_step"] == 1.5
        assert document["source"] == f"{tmp_path / 'r_0.pt'}, {tmp_path / 'r_1.pt'}"

    def test_a_server_without_a_recorder_is_not_asked_to_record(self, tmp_path, scripted, cli_error):
        """Upstream's scheduler ends on that request."""
        scripted.pages["/server_info"][1]["expert_distribution_recorder_mode"] = None
        scripted.pages["/start_expert_distribution_record"] = (200, "ok")
        error = cli_error("probe", "moe", "--url", scripted.url, "--record-dir", tmp_path)
        assert error["what"].endswith("/server_info: expert_distribution_recorder_mode")
        assert "--expert-distribution-recorder-mode per_pass" in error["remedy"]
        assert not any("expert_distribution" in path for path, _ in scripted.requests)

    def test_a_server_that_writes_nothing(self, tmp_path, scripted, cli_error):
        for name in ("start", "stop", "dump"):
            scripted.pages[f"/{name}_expert_distribution_record"] = (200, "ok")
        scripted.pages["/generate"] = (200, sglang_stream([1, 2, 3], prompt_tokens=9))
        scripted.pages["/tokenize"] = (200, {"count": 1000})
        error = cli_error("probe", "moe", "--url", scripted.url, "--record-dir", tmp_path)
        assert "--expert-distribution-recorder-mode" in error["remedy"]

    def test_ranks_that_saw_the_same_tokens_are_counted_once(self, tmp_path, cli, cli_error, counts):
        """TP 2: the recorder's sum over ranks holds every token twice."""
        torch.save({"rank": 0, "logical_count": torch.from_numpy(counts * 2)}, tmp_path / "r.pt")
        common = ("probe", "moe", "--trace", tmp_path / "r.pt", "--ranks", 4, "--redundant", "", "--batches", "")
        assert cli(*common)[1]["tokens_per_step"] == 4.0
        assert cli(*common, "--copies", 2)[1]["tokens_per_step"] == 2.0
        assert cli_error(*common, "--copies", 3)["what"] == "--copies"

    @pytest.mark.parametrize(
        ("info", "copies"),
        [
            ({"tp_size": 8, "dp_size": 1, "enable_dp_attention": False}, 8),
            ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, 2),
            ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 1),
            ({}, 1),
        ],
    )
    def test_the_server_says_how_many_ranks_share_their_tokens(self, info, copies):
        assert recording_copies(info) == copies

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("--ranks", 0),
            ("--ranks", 3),
            ("--copies", 0),
            ("--experts", -8),
            ("--redundant", "-4"),
            ("--redundant", 3),
            ("--batches", "0"),
            ("--bandwidth", "nan"),
            ("--output-tokens", 0),
        ],
    )
    def test_numbers_out_of_range(self, tmp_path, cli_error, argument, value):
        np.savez(tmp_path / "t.npz", topk_ids=IDS)
        common = {"--experts": 8, "--ranks": 4, "--redundant": "", "--batches": ""} | {argument: value}
        flags = [f"{name}={text}" for name, text in common.items()]
        assert cli_error("probe", "moe", "--trace", tmp_path / "t.npz", *flags)["what"] == argument

    @pytest.mark.parametrize(
        "ids", [np.zeros((0, 1, 1, 2), int), np.full((2, 1, 1, 2), -1), np.full((1, 1, 1, 1), 2**40)]
    )
    def test_traces_without_sense(self, tmp_path, cli_error, ids):
        np.savez(tmp_path / "t.npz", topk_ids=ids)
        assert cli_error("probe", "moe", "--trace", tmp_path / "t.npz")["what"].startswith("--trace ")

    @pytest.mark.parametrize("arguments", [[], ["--trace", "a", "--record-dir", "b"]])
    def test_one_source_is_needed(self, cli_error, arguments):
        assert cli_error("probe", "moe", *arguments)["expected"] == "exactly one"

    def test_a_list_of_something_else(self, tmp_path, cli_error):
        np.savez(tmp_path / "t.npz", topk_ids=IDS)
        error = cli_error("probe", "moe", "--trace", tmp_path / "t.npz", "--experts", 8, "--redundant", "many")
        assert error["what"] == "--redundant"

    def test_fewer_experts_than_the_trace_names(self, tmp_path, cli_error):
        np.savez(tmp_path / "t.npz", topk_ids=IDS)
        assert cli_error("probe", "moe", "--trace", tmp_path / "t.npz", "--experts", 4)["got"] == "4"
