# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the draft's candidates, run on the CPU."""

import json

import bench_candidates as bench
import pytest
import report
import torch

pytest.importorskip("sglang")
CPU = ["--device", "cpu", "--vocab", "300", "--batch", "1", "2", "--budget-ms", "1", "--commit", "c"]


def test_it_writes_what_the_table_shows(tmp_path):
    out = tmp_path / "candidates.json"
    assert bench.main([*CPU, "--out", str(out)]) == 0
    data = report.load_any(out)
    assert [(row["arm"], row["bs"]) for row in data["rows"]] == [(arm, b) for b in (1, 2) for arm in bench.ARMS]
    assert len(report.candidates(data).splitlines()) == 4


def test_wrong_candidates_are_not_timed(tmp_path, monkeypatch, capsys):
    from sglang.srt.speculative import ddtree_draft

    best_of = ddtree_draft.best_of

    def second_best(logits, k):
        values, places, norm = best_of(logits, k + 1)
        return values[:, 1:], places[:, 1:], norm

    monkeypatch.setattr(ddtree_draft, "best_of", second_best)
    out = tmp_path / "candidates.json"
    assert bench.main([*CPU, "--out", str(out)]) == 1
    assert json.loads(out.read_text())["rows"] == [] and "WRONG: 300 x 1" in capsys.readouterr().err


def test_the_check_sees_each_kind_of_mistake():
    logits = torch.arange(40.0).flip(0).repeat(2, 1)

    def mistaken(change):
        found = list(bench.torch_best(logits, 4))
        change(found)
        return bench.is_right(logits, 4, lambda logits, k: found)

    assert mistaken(lambda found: None)
    assert not mistaken(lambda found: found.__setitem__(2, found[2] + 0.1))
    assert not mistaken(lambda found: found.__setitem__(1, found[1] + 1))
    assert not mistaken(lambda found: found.__setitem__(0, found[0] - 1))
