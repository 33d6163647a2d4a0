# SPDX-License-Identifier: Apache-2.0
"""The result file: what is written can be read, and a file that is off is refused with the reason."""

import copy
import json

import pytest
from verify_bench import results

NAMES = ["arm", "bs", "s_q", "h_q", "prefix", "kv_dtype", "page_size", "us_p20", "us_p50", "us_p80", "gbps", "tflops"]


@pytest.fixture
def data(make_result):
    return make_result({("ours", "prefix=189440"): 80.0, ("triton_extend", "prefix=189440"): 36000.0})


def test_save_and_load(tmp_path, data):
    results.add_missing(data, "triton_decode", "no sglang", results.shape_of(data["rows"][0]))
    path = tmp_path / "a" / "r.json"
    results.save(path, data)
    assert results.load(path) == data == json.loads(path.read_text())
    row_lines = [line for line in path.read_text().splitlines() if line.startswith('{"arm": "ours"')]
    assert len(row_lines) == 1, "one line a row"


def test_row_has_the_promised_columns(data):
    row = data["rows"][0]
    assert list(row)[: len(NAMES)] == NAMES
    assert (row["gbps"], row["tflops"]) == (
        pytest.approx(218245.248 / 80, abs=0.01),
        pytest.approx(29681.353728 / 80, abs=0.01),
    )


def test_missing_entries_are_one_per_arm_and_reason(data):
    shape = results.shape_of(data["rows"][0])
    for arm, reason in (("a", "x"), ("a", "x"), ("a", "y"), ("b", "x")):
        results.add_missing(data, arm, reason, shape)
    assert [(m["arm"], m["reason"], len(m["shapes"])) for m in data["not_available"]] == [
        ("a", "x", 2),
        ("a", "y", 1),
        ("b", "x", 1),
    ]
    assert results.problems(data) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("rows"), "not a result file"),
        (lambda d: d["header"].pop("commit"), "no 'commit'"),
        (lambda d: d["header"].update(format="other"), "format 'other'"),
        (lambda d: d["rows"][0].pop("us_p20"), "no 'us_p20'"),
        (lambda d: d["rows"][0].update(us_p50="80"), "'us_p50' is '80'"),
        (lambda d: d["rows"][0].update(s_q=True), "'s_q' is True"),
        (lambda d: d["rows"][0].update(us_p20=90.0), "0 < p20 <= p50 <= p80"),
        (lambda d: d["rows"][0].update(us_p50=79.0), "does not follow"),
        (lambda d: d["rows"][0].update(error=float("nan")), "wrong arm"),
        (lambda d: d["rows"][0].update(prefix=4096), "disagrees with prefixes"),
        (lambda d: d["rows"].append(copy.deepcopy(d["rows"][0])), "occurs twice"),
        (lambda d: d["not_available"].append({"arm": "x"}), "no 'reason'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, data, change, message):
    change(data)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        results.load(path)


def test_commit_of_no_checkout(tmp_path):
    assert results.commit(tmp_path) == "unknown"
