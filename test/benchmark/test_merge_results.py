# SPDX-License-Identifier: Apache-2.0
"""Results of two calls in one file: what replaces what, and what is refused."""

import json

import backend_e2e
import merge_results
import pytest
from benchmark.test_one_rank import make_result, make_row
from one_rank import results


@pytest.fixture
def first():
    kernels = {"kernels_us": {"attention": 1.0}}
    return make_result(
        [
            make_row("plain_triton", c, 1, 10.0, **kernels) for c in (4096, 65536)
        ] + [make_row("tree_kdtree", 4096, 9, 8.0), make_row("tree_kdtree", 4096, 17, 9.0, **kernels)]
    )  # fmt: skip


@pytest.fixture
def later():
    profiled = {"kernels_us": {"attention": 5.0}, "profiled_steps": 4}
    data = make_result([make_row("plain_triton", 4096, 1, 11.0, **profiled), make_row("dflash_kdtree", 4096, 8, 7.0)])
    data["header"] |= {"commit": "fedcba9876543210", "date": "2026-01-03T00:00:00Z", "options": ["--arms", "x"]}
    return data


def test_runs_made_later_replace_theirs_and_the_others_stay(first, later, tmp_path, capsys):
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    results.save(paths[0], first)
    results.save(paths[1], later)
    assert merge_results.main([str(p) for p in paths[:2]] + ["--out", str(paths[2])]) == 0
    data = results.load(paths[2])
    found = {(r["arm"], r["s_q"], r["context"]): r for r in data["rows"]}
    assert sorted(found) == [
        ("dflash_kdtree", 8, 4096), ("plain_triton", 1, 4096), ("tree_kdtree", 9, 4096), ("tree_kdtree", 17, 4096)
    ]  # fmt: skip
    assert found["plain_triton", 1, 4096]["ms_per_step_p50"] == 11.0
    assert found["plain_triton", 1, 4096]["kernels_us"] == {"attention": 5.0}
    assert "kernels_us" not in found["tree_kdtree", 17, 4096]  # of a profile that was not cut to steps
    assert data["header"]["commit"] == first["header"]["commit"]
    assert data["header"]["runs"] == [
        {"date": "2026-01-03T00:00:00Z", "commit": "fedcba9876543210", "options": ["--arms", "x"],
         "made": ["plain_triton-1", "dflash_kdtree-8"]}
    ]  # fmt: skip
    assert "plain_triton-1, dflash_kdtree-8" in capsys.readouterr().out


def test_what_is_there_now_is_missing_no_longer(first, later):
    first["not_available"] = [
        {"arm": "dflash_kdtree", "s_q": 8, "reason": "killed"}, {"arm": "eagle_kdtree", "s_q": 9, "reason": "killed"}
    ]  # fmt: skip
    assert [m["arm"] for m in merge_results.merge(first, later)["not_available"]] == ["eagle_kdtree"]
    half = {"arm": "dflash_kdtree", "s_q": 8, "reason": "1 of 2 contexts"}
    later["not_available"] = [half]
    assert half in merge_results.merge(first, later)["not_available"]


@pytest.mark.parametrize("name", ["draft_window", "scale", "model", "device", "format"])
def test_files_that_do_not_belong_together_are_refused(first, later, tmp_path, capsys, name):
    later["header"][name] = "another"
    for file, data in (("a.json", first), ("b.json", later)):
        (tmp_path / file).write_text(json.dumps(data))
    out = tmp_path / "c.json"
    assert merge_results.main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(out)]) == 1
    assert f"the headers differ in '{name}'" in capsys.readouterr().err and not out.exists()


def test_another_gpu_is_refused(first, later):
    later["header"]["gpu"] = {"name": "Other GPU"}
    with pytest.raises(ValueError, match="the first file is of Test GPU, the later one of Other GPU"):
        merge_results.merge(first, later)


def test_engines_of_backend_e2e_are_merged_by_name(tmp_path):
    def file(path, names, missing):
        header = {"format": backend_e2e.FORMAT, "device": "cuda", "gpu": {"name": "G"}, "date": "d", "commit": "c"}
        rows = [{"name": name, "problems": [], "of": path} for name in names]
        data = {"header": header, "rows": rows, "not_run": [{"name": n, "reason": "not ended"} for n in missing]}
        (tmp_path / path).write_text(json.dumps(data))
        return str(tmp_path / path)

    files = [file("a.json", ["x", "y"], ["z", "w"]), file("b.json", ["y", "z"], [])]
    assert merge_results.main([*files, "--out", files[0]]) == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert [(row["name"], row["of"]) for row in data["rows"]] == [("x", "a.json"), ("y", "b.json"), ("z", "b.json")]
    assert [item["name"] for item in data["not_run"]] == ["w"] and data["header"]["runs"][0]["made"] == ["y", "z"]
