# SPDX-License-Identifier: Apache-2.0
"""Validate mode of kdtree_sm120: what is counted, what is logged and exported, and a mismatch as a file that
`python -m sglang.kdtree probe verify` can recompute."""

from types import SimpleNamespace

import pytest
import torch
from srt.attention_naive import make_layer

from sglang.kdtree.probe.reproducer import load_reproducer, recompute
from sglang.srt.layers.attention import kdtree_report
from sglang.srt.layers.attention.kdtree_report import KDTreeMetrics, Validation, is_report_step
from sglang.srt.layers.attention.kdtree_verify import TreeVerifier, VerifyErrors, VerifyStep
from sglang.srt.managers import idle_calls

N, H, ROW_WIDTH, PREFIXES, ROWS = 3, 2, 40, [11, 0, 5], [2, 1, 0]
TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.uint8)
LAYER = 6  # of a pipeline stage that begins at layer 4


def make_case(monkeypatch, tmp_path, kv_dtype=torch.bfloat16, dump=True, metrics=None, seed=0):
    """Two requests and one row of padding, whose inputs are given; the stock result is what compare() is told."""
    monkeypatch.setattr(kdtree_report.atexit, "register", lambda function: None)
    monkeypatch.setattr(idle_calls, "_calls", [])
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(3, ROW_WIDTH, dtype=torch.int32)
    table[1:] = (torch.randperm(99, generator=generator)[: 2 * ROW_WIDTH] + 1).view(2, ROW_WIDTH)
    kv = torch.randn(100, 1, 576, generator=generator).to(kv_dtype)
    lists = [table[row, : p + N] for row, p in zip(ROWS, PREFIXES, strict=True)]
    begins = torch.tensor([0, *torch.tensor([len(x) for x in lists]).cumsum(0).tolist()], dtype=torch.int32)
    case = SimpleNamespace(
        table=table, kv=kv, layer=make_layer(H, 1, 576, 512, layer_id=LAYER),
        q=torch.randn(len(ROWS) * N, H * 576, generator=generator).bfloat16(),
        step=VerifyStep(
            num_tokens=N, indptr=begins, indices=torch.cat(lists), tree_mask=TREE.expand(3, N, N).contiguous(),
            rows=torch.tensor(ROWS),
        ),
        validation=Validation(
            first_layer=4, num_layers=3, num_tokens=N, num_heads=H, dtype=torch.bfloat16, kv_dtype=kv_dtype,
            device=torch.device("cpu"), page_size=1, req_to_token=table, tp_rank=1,
            metrics=metrics or KDTreeMetrics(None), dump_dir=str(tmp_path / "dumps") if dump else None,
        ),
    )  # fmt: skip
    verifier = TreeVerifier(req_to_token=table, page_size=1)
    case.ours = verifier.run(case.step, case.q, kv, case.layer)
    return case


def compare(case, reference):
    case.validation.compare(case.layer, case.step, case.q, case.kv, case.ours, reference)


def errors_of(case):
    return VerifyErrors.summary(case.validation.errors.counters)[LAYER - 4]


def test_padding_is_not_counted(monkeypatch, tmp_path):
    case = make_case(monkeypatch, tmp_path)
    reference = case.ours.clone()
    reference[2 * N :] = torch.nan
    compare(case, reference)
    errors = errors_of(case)
    assert (errors.rows, errors.rows_over_ulp, errors.mismatches, errors.max_abs) == (2 * N, 0, 0, 0.0)


def test_errors_are_those_of_the_definition(monkeypatch, tmp_path):
    case = make_case(monkeypatch, tmp_path)
    reference = case.ours.float()
    reference[1, 7] += 0.25
    reference[4] *= 1 + 2.0**-9
    compare(case, reference)
    error = (case.ours.float() - reference)[: 2 * N].abs()
    size = reference[: 2 * N].abs()
    errors = errors_of(case)
    assert errors.max_abs == error.max().item()
    assert errors.max_rel == pytest.approx((error.amax(1) / size.amax(1)).max().item())
    assert errors.mean_rel == pytest.approx((error.sum() / size.sum()).item())
    # Half a rounding step is within one; 0.25 is not.
    assert (errors.rows, errors.rows_over_ulp, errors.mismatches) == (2 * N, 1, 1)


@pytest.mark.parametrize("largest", [1.0, 1.9921875, 2.0, 3.0e-8, 3.0e8])
@pytest.mark.parametrize(("steps", "over"), [(0, 0), (1, 0), (-1, 0), (2, 1)])
def test_a_row_is_over_the_limit_beyond_one_rounding_step_of_its_largest_element(largest, steps, over):
    reference = torch.tensor([[0.1 * largest, largest, -0.5 * largest]]).bfloat16()
    ours = reference.clone()
    bits = ours.view(torch.int16)
    bits[0, 1] += steps  # neighbouring numbers have neighbouring bits
    errors = VerifyErrors(1, torch.device("cpu"))
    errors.update(0, ours, reference)
    assert VerifyErrors.summary(errors.counters)[0].rows_over_ulp == over


@pytest.mark.parametrize("ours", [torch.inf, -torch.inf, torch.nan, 1.0])
@pytest.mark.parametrize("reference", [torch.inf, torch.nan])
def test_what_is_not_finite_is_a_mismatch(ours, reference):
    errors = VerifyErrors(1, torch.device("cpu"))
    values = [torch.tensor([[1.0, value]]).bfloat16() for value in (ours, reference)]
    for a, b in (values, values[::-1]):
        assert errors.update(0, a, b).tolist() == [True]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_mismatch_is_dumped_so_that_the_probe_can_recompute_it(monkeypatch, tmp_path, caplog, kv_dtype):
    case = make_case(monkeypatch, tmp_path, kv_dtype)
    reference = case.ours.clone()
    reference[1] += 8.0  # the first request, and nothing of the second
    compare(case, reference)
    # The next steps write other KV into the draft slots, and find other mismatches: the first one stays.
    draft = case.table[2, 11 : 11 + N].long()
    latched = case.kv[draft].clone()
    case.kv[draft] = 0
    compare(case, reference + 1)
    with caplog.at_level("ERROR", logger=kdtree_report.__name__):
        case.validation.tick()
        case.validation.tick()
        case.validation.tick()
    (file,) = (tmp_path / "dumps").glob("kdtree-mismatch-*.safetensors")
    (line,) = [r.getMessage() for r in caplog.records]
    assert f"layer {LAYER}, s_q {N}, h_q {H}, context 11" in line and str(file) in line

    found = load_reproducer(file)
    assert (found.layer, found.context, found.s_q, found.h_q) == (LAYER, 11, N, H)
    assert torch.equal(found.tensors["kv_indices"], case.table[2, : 11 + N].long())
    rows = found.tensors["kv_rows"].view(torch.uint8)
    assert torch.equal(rows[11:], latched.view(N, 576).view(torch.uint8))
    assert torch.equal(found.tensors["tree_mask"], TREE)
    torch.testing.assert_close(recompute(found).flatten(1), case.ours[:N].float(), rtol=2.0**-7, atol=1e-3)
    assert torch.equal(found.tensors["out_reference"].flatten(1), reference[:N])


def test_without_a_directory_a_mismatch_is_named_only(monkeypatch, tmp_path, caplog):
    case = make_case(monkeypatch, tmp_path, dump=False)
    compare(case, case.ours + 9)
    case.validation.tick()
    case.validation.tick()
    assert "no reproducer: set --kdtree-dump-dir" in caplog.text


def test_a_reproducer_over_the_limit_is_not_written(monkeypatch, tmp_path):
    case = make_case(monkeypatch, tmp_path)
    compare(case, case.ours + 9)
    reproducer = kdtree_report.build_reproducer(
        case.validation.latch, kv_cache=case.kv, layer=case.layer, page_size=1, tp_rank=0
    )
    assert "at most 1000 are written" in reproducer.save(tmp_path / "none", limit_bytes=1000)
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_ends_no_step(monkeypatch, tmp_path, caplog):
    case = make_case(monkeypatch, tmp_path)
    (tmp_path / "dumps").write_text("a file")
    compare(case, case.ours + 9)
    case.validation.tick()
    case.validation.tick()
    assert f"no reproducer: {tmp_path / 'dumps' / 'kdtree-mismatch-rank1-layer6'}" in caplog.text
    assert "cannot be written: [Errno 17] File exists" in caplog.text


def test_a_drafters_file_has_another_name(monkeypatch, tmp_path):
    for part in ("", "draft extend"):
        case = make_case(monkeypatch, tmp_path)
        case.validation.part = part
        compare(case, case.ours + 9)
        case.validation.dump()
    names = [path.name for path in sorted((tmp_path / "dumps").iterdir())]
    assert names == [f"kdtree-mismatch-{part}rank1-layer6-context11.safetensors" for part in ("draft-extend-", "")]


def test_the_row_of_a_request_may_be_another_ones_by_then(monkeypatch, tmp_path, caplog):
    """The file holds the slots that the request had, and the log says that they may have been written over."""
    case = make_case(monkeypatch, tmp_path)
    row = case.table[2].clone()
    compare(case, case.ours + 9)
    case.validation.tick()
    case.table[2] = case.table[1]
    case.validation.tick()
    assert "of a request that has ended since; reproducer" in caplog.text
    (file,) = (tmp_path / "dumps").iterdir()
    assert torch.equal(load_reproducer(file).tensors["kv_indices"], row[: 11 + N].long())


def test_reports_come_early_and_then_every_256_steps():
    assert [n for n in range(1, 800) if is_report_step(n)] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 768]


def test_the_log_line_and_the_exit_line(monkeypatch, tmp_path, caplog):
    case = make_case(monkeypatch, tmp_path)
    compare(case, case.ours)
    with caplog.at_level("INFO", logger=kdtree_report.__name__):
        case.validation.tick()
        case.validation.tick()
        compare(case, case.ours)  # of the step that was announced last
        idle_calls.run_idle_calls(lambda: None)
        idle_calls.run_idle_calls(lambda: None)
        case.validation.catch_up()
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("kdtree_sm120 validate: 6 rows compared, 0 over the limit")
    assert lines[0].endswith("worst layer 4, 2 steps")  # none has errors: the first
    assert lines[1].startswith("kdtree_sm120 validate: 12 rows compared, 0 over the limit")


def test_the_log_line_has_the_worst_layers_own_number_and_keeps_nan(monkeypatch, tmp_path):
    case = make_case(monkeypatch, tmp_path)
    compare(case, case.ours.clone().fill_(torch.nan))
    said = VerifyErrors.describe(case.validation.errors.counters, first_layer=4)
    assert f"max abs error nan, relative error mean nan max nan, {2 * N} mismatches, worst layer {LAYER}" in said


def test_metrics_add_up(monkeypatch, tmp_path):
    REGISTRY = pytest.importorskip("prometheus_client").REGISTRY
    labels = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    metrics = KDTreeMetrics(labels)
    case = make_case(monkeypatch, tmp_path, metrics=metrics)
    reference = case.ours.clone()
    reference[0] += 9
    for _ in range(3):
        compare(case, reference)
        case.validation.report(case.validation.errors.counters)
    metrics.fell_back("sinks")

    def value(name, **more):
        return REGISTRY.get_sample_value(f"sglang:kdtree_{name}", labels | more)

    assert value("validate_rows_total") == 3 * 2 * N
    assert value("validate_rows_over_ulp_total") == value("validate_mismatches_total") == 3
    assert value("validate_max_abs_error", layer=str(LAYER)) == errors_of(case).max_abs
    assert value("validate_max_rel_error", layer=str(LAYER)) == errors_of(case).max_rel
    assert value("validate_mean_rel_error", layer=str(LAYER)) == errors_of(case).mean_rel
    assert value("fallback_calls_total", reason="sinks") == 1
