# SPDX-License-Identifier: Apache-2.0
"""The verify probe: offline on reproducers with a known defect, online on scripted counters."""

from types import SimpleNamespace

import pytest
import torch
from kit.scripted import sglang_stream
from safetensors.torch import save_file

from sglang.kdtree.probe import verify
from sglang.kdtree.probe.reproducer import FORMAT, load_reproducer, recompute

S_Q, H_Q, PREFIX = 5, 3, 40


def attention(q, rows, visible, *, scale):
    """Written out row by row: the yardstick is not the kernel package's own code."""
    out = torch.zeros(S_Q, H_Q, 512, dtype=torch.float64)
    for i in range(S_Q):
        for h in range(H_Q):
            scores = scale * (rows.double() @ q[i, h].double())
            scores[PREFIX:][~visible[i]] = float("-inf")
            out[i, h] = torch.softmax(scores, 0) @ rows[:, :512].double()
    return out


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(S_Q, H_Q, 576, generator=generator).bfloat16()
    rows = torch.randn(PREFIX + S_Q, 576, generator=generator).bfloat16()
    visible = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    exact = attention(q, rows, visible, scale=0.05)
    chain = attention(q, rows, torch.tril(torch.ones(S_Q, S_Q)).bool(), scale=0.05)
    return {"q": q, "rows": rows, "visible": visible, "exact": exact.bfloat16(), "chain": chain.bfloat16()}


def write(path, case, *, ours, upstream, layout="QLEN", meta=None, drop=()):
    n = PREFIX + S_Q
    full = torch.cat([torch.ones(S_Q, PREFIX), case["visible"].float()], dim=1).to(torch.uint8)
    words = (case["visible"].long() << torch.arange(S_Q)).sum(dim=1, keepdim=True)
    masks = {"QLEN": case["visible"].to(torch.uint8), "BITS": words, "FULL": full.reshape(-1)}
    tensors = {
        "q": case["q"],
        "kv_rows": case["rows"],
        "kv_indptr": torch.tensor([0, n]),
        "kv_indices": torch.randperm(n) + 100,
        "out_reference": upstream,
        "out_kdtree": ours,
        **({"tree_mask": masks[layout]} if layout in masks else {}),
    }
    metadata = {
        "format": FORMAT, "layer": "7", "context": str(PREFIX), "s_q": str(S_Q), "h_q": str(H_Q), "page_size": "1",
        "mask_layout": layout, "sm_scale": "0.05", "logit_cap": "0", "k_scale": "1", "v_scale": "1",
    }  # fmt: skip
    kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if name not in drop}
    save_file(kept, path, metadata={k: v for k, v in (metadata | (meta or {})).items() if k not in drop})
    return path


class TestOffline:
    @pytest.mark.parametrize("layout", ["QLEN", "BITS", "FULL"])
    def test_the_reference_sees_the_tree_in_every_mask_layout(self, tmp_path, case, layout):
        path = write(tmp_path / "a.safetensors", case, ours=case["exact"], upstream=case["exact"], layout=layout)
        got = recompute(load_reproducer(path))
        assert torch.allclose(got, case["exact"].float(), atol=0.02) and not torch.allclose(
            got, case["chain"].float(), atol=0.02
        )

    def test_a_causal_call_has_no_mask(self, tmp_path, case):
        path = write(tmp_path / "a.safetensors", case, ours=case["chain"], upstream=case["chain"], layout="CAUSAL")
        assert torch.allclose(recompute(load_reproducer(path)), case["chain"].float(), atol=0.02)

    @pytest.mark.parametrize(
        ("ours", "upstream", "verdict", "code"),
        [
            ("exact", "exact", "both-right", 0),
            ("chain", "exact", "kdtree-wrong", 1),  # the tree verified as a chain
            ("exact", "chain", "upstream-wrong", 1),
            ("chain", "chain", "both-wrong", 1),
        ],
    )
    def test_who_is_wrong(self, tmp_path, case, cli, ours, upstream, verdict, code):
        write(tmp_path / "kdtree-mismatch-1.safetensors", case, ours=case[ours], upstream=case[upstream])
        got, document = cli("probe", "verify", "--dump", tmp_path)
        assert got == code
        (row,) = document["reproducers"]
        assert row["verdict"] == verdict and (row["layer"], row["context"]) == (7, PREFIX)
        assert (row["kdtree"]["relative"] < 0.003) == (ours == "exact")
        assert row["kdtree"]["rows_over_ulp"] == (0 if ours == "exact" else pytest.approx(9, abs=3))

    def test_prefix_only_attention_is_wrong_by_about_its_own_size(self, tmp_path, case, cli):
        """A real bug of an earlier integration: the draft tokens were left out."""
        nothing = torch.zeros(S_Q, S_Q).bool()
        ours = attention(case["q"] * 30, case["rows"], nothing, scale=0.05).bfloat16()
        sharp = case | {"q": case["q"] * 30}
        exact = attention(sharp["q"], case["rows"], case["visible"], scale=0.05).bfloat16()
        write(tmp_path / "kdtree-mismatch-1.safetensors", sharp, ours=ours, upstream=exact)
        code, document = cli("probe", "verify", "--dump", tmp_path)
        assert code == 1 and document["reproducers"][0]["kdtree"]["relative"] > 0.1

    def test_nan_is_wrong(self, tmp_path, case, cli):
        broken = case["exact"].clone()
        broken[2, 1, 5] = float("nan")
        write(tmp_path / "kdtree-mismatch-1.safetensors", case, ours=broken, upstream=case["exact"])
        code, document = cli("probe", "verify", "--dump", tmp_path)
        row = document["reproducers"][0]
        assert code == 1 and row["verdict"] == "kdtree-wrong" and not row["kdtree"]["finite"]

    def test_one_ulp_is_the_distance_of_neighbours(self):
        reference = torch.tensor([[1.0, 1.0, -3.0]])
        off = torch.tensor([[1.0 + 2**-7, 1.0, -3.0]])
        assert verify.deviation(off, reference).rows_over_ulp == 0
        assert verify.deviation(off + torch.tensor([[0.0, 2**-6, 0.0]]), reference).rows_over_ulp == 1
        assert verify.deviation(off, reference).max_abs == 2**-7


class TestBackendsDump:
    """The file that validate mode writes is the file that the probe reads."""

    @pytest.mark.parametrize(("ours", "verdict"), [("exact", "both-right"), ("chain", "kdtree-wrong")])
    def test_round_trip(self, tmp_path, case, cli, ours, verdict):
        report = pytest.importorskip("sglang.srt.layers.attention.kdtree_report")
        req_to_token = torch.zeros(4, 64, dtype=torch.int32)
        latch = report.MismatchLatch(
            req_to_token=req_to_token,
            num_tokens=S_Q,
            num_heads=H_Q,
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        latch.q.copy_(case["q"])
        latch.ours.copy_(case[ours])
        latch.reference.copy_(case["exact"])
        latch.draft_kv.copy_(case["rows"][PREFIX:])
        latch.tree_mask.copy_(case["visible"])
        latch.facts.copy_(torch.tensor([1, 17, 2, PREFIX, S_Q]))
        slots = torch.randperm(200)[:PREFIX]
        kv_cache = torch.full((200, 1, 576), float("nan"), dtype=torch.bfloat16)
        kv_cache[slots, 0] = case["rows"][:PREFIX]
        req_to_token[2, :PREFIX] = slots.int()
        latch.slots.copy_(req_to_token[2])
        layer = SimpleNamespace(scaling=0.05, logit_cap=0.0, k_scale=None, v_scale=None)
        dumped = report.build_reproducer(latch, kv_cache=kv_cache, layer=layer, page_size=1, tp_rank=3)
        assert "reproducer" in dumped.save(tmp_path)
        _, document = cli("probe", "verify", "--dump", tmp_path)
        (row,) = document["reproducers"]
        assert (row["verdict"], row["layer"], row["context"]) == (verdict, 17, PREFIX)


class TestDamage:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"drop": ("out_kdtree",)}, "without out_kdtree"),
            ({"drop": ("sm_scale",)}, "without sm_scale"),
            ({"drop": ("tree_mask",)}, "none"),
            ({"meta": {"format": "other-2"}}, "'other-2'"),
            ({"meta": {"layer": "seven"}}, "seven"),
            ({"meta": {"s_q": "4"}}, "(5, 3, 576)"),
            ({"meta": {"mask_layout": "ROUND"}}, "'ROUND'"),
        ],
    )
    def test_what_is_missing_is_named(self, tmp_path, case, cli_error, change, said):
        path = write(tmp_path / "a.safetensors", case, ours=case["exact"], upstream=case["exact"], **change)
        assert said in cli_error("probe", "verify", "--dump", path)["got"]

    def test_a_file_cut_short(self, tmp_path, case, cli_error):
        path = write(tmp_path / "a.safetensors", case, ours=case["exact"], upstream=case["exact"])
        path.write_bytes(path.read_bytes()[:5_000])
        error = cli_error("probe", "verify", "--dump", path)
        assert error["what"] == f"--dump {path}" and error["expected"] == "a complete safetensors file"
        assert error["got"].startswith("5000 bytes that begin with ")

    def test_an_empty_folder(self, tmp_path, cli_error):
        assert cli_error("probe", "verify", "--dump", tmp_path)["got"] == "none"


def metrics(rows, over, mismatches, worst):
    label = '{tp_rank="0",layer="1"}'
    return (
        "\n".join(
            [
                "# TYPE sglang:kdtree_validate_rows_total counter",
                f"sglang:kdtree_validate_rows_total{label} {rows}",
                "# TYPE sglang:kdtree_validate_rows_over_ulp_total counter",
                f"sglang:kdtree_validate_rows_over_ulp_total{label} {over}",
                "# TYPE sglang:kdtree_validate_mismatches_total counter",
                f"sglang:kdtree_validate_mismatches_total{label} {mismatches}",
                "# TYPE sglang:kdtree_validate_max_abs_error gauge",
                f"sglang:kdtree_validate_max_abs_error{label} {worst}",
                "# TYPE sglang:gen_throughput gauge",
                "sglang:gen_throughput 12.0",
            ]
        )
        + "\n"
    )


class TestOnline:
    def serve(self, scripted, *, after):
        scripted.pages["/server_info"][1]["kdtree_verify"] = "validate"
        replies = iter([metrics(100.0, 5.0, 1.0, 0.004), metrics(*after)])
        scripted.pages["/metrics"] = (200, lambda body: next(replies))
        scripted.pages["/generate"] = (200, sglang_stream([1, 5, 9], prompt_tokens=100, verify=2))
        scripted.pages["/tokenize"] = (200, lambda body: {"count": len(body["prompt"].split())})

    def test_growth_is_what_counts(self, scripted, cli):
        self.serve(scripted, after=(1_340.0, 9.0, 1.0, 0.0078))
        code, document = cli("probe", "verify", "--url", scripted.url, "--contexts", "200,64k", "--steps", 7)
        assert code == 0
        assert (document["rows_compared"], document["rows_over_ulp"], document["mismatches"]) == (1_240, 4, 0)
        # A round is three texts of two steps each; the second round reaches the seven.
        assert document["steps"] == 12
        assert document["max_abs_error"] == 0.0078 and document["mean_rel_error"] is None

    def test_a_new_mismatch_is_a_finding(self, scripted, cli):
        self.serve(scripted, after=(1_340.0, 9.0, 3.0, 0.9))
        code, document = cli("probe", "verify", "--url", scripted.url, "--contexts", "200", "--steps", 1)
        assert code == 1 and document["mismatches"] == 2

    def test_comparing_nothing_is_a_finding(self, scripted, cli):
        self.serve(scripted, after=(100.0, 5.0, 1.0, 0.004))
        code, document = cli("probe", "verify", "--url", scripted.url, "--contexts", "200", "--steps", 1)
        assert code == 1 and document["rows_compared"] == 0

    def test_contexts_that_are_all_too_long(self, scripted, cli_error):
        self.serve(scripted, after=(0.0, 0.0, 0.0, 0.0))
        assert cli_error("probe", "verify", "--url", scripted.url, "--contexts", "64k")["what"] == "--contexts"

    def test_another_mode(self, scripted, cli_error):
        assert "--kdtree-verify validate" in cli_error("probe", "verify", "--url", scripted.url)["remedy"]

    @pytest.mark.parametrize(("status", "page"), [(200, "<html>not metrics</html>"), (500, "broken")])
    def test_metrics_that_are_none(self, scripted, cli_error, status, page):
        scripted.pages["/server_info"][1]["kdtree_verify"] = "validate"
        scripted.pages["/metrics"] = (status, page)
        assert cli_error("probe", "verify", "--url", scripted.url)["what"].endswith("/metrics")

    @pytest.mark.parametrize(("argument", "value"), [("--steps", 0), ("--limit", "nan"), ("--output-tokens", 1)])
    def test_numbers_out_of_range(self, scripted, cli_error, argument, value):
        assert cli_error("probe", "verify", "--url", scripted.url, argument, value)["what"] == argument

    def test_without_metrics(self, scripted, cli_error):
        scripted.pages["/server_info"][1]["kdtree_verify"] = "validate"
        assert "--enable-metrics" in cli_error("probe", "verify", "--url", scripted.url)["remedy"]
