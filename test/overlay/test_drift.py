# SPDX-License-Identifier: Apache-2.0
"""The report on a newer upstream, against a small one that changes in each way."""

import pytest

from overlay import __main__ as cli
from overlay import drift, upstream


@pytest.fixture
def compare(small, tmp_path):
    """-> what drift says about an upstream whose files are these."""

    def run(files, version="1.1"):
        return drift.compare(small.root, small.wheel, small.write_wheel(tmp_path / "newer", files, version))

    return run


def test_formatting_is_no_drift(small, compare):
    text = small.files["sglang/srt/choices.py"].replace("name in NAMES", "( name in\n NAMES)  # moved")
    report, clean = compare(small.files | {"sglang/srt/choices.py": text})
    assert clean and report.splitlines() == [
        "sglang 1.0 -> 1.1",
        "unchanged      sglang/srt/choices.py:pick (replace assign = 'need_sort')",
        "no work needed",
    ]


def test_another_symbol_of_the_module_is_no_drift(small, compare):
    text = small.files["sglang/srt/choices.py"].replace("return default", "return None")
    assert compare(small.files | {"sglang/srt/choices.py": text})[1]


def test_a_changed_symbol_is_shown_as_a_diff(small, compare):
    text = small.files["sglang/srt/choices.py"].replace("    value = lookup(", "    value = look_up(")
    report, clean = compare(small.files | {"sglang/srt/choices.py": text})
    assert not clean and report.endswith("work needed")
    assert "symbol changed" in report and "-    value = lookup(" in report and "+    value = look_up(" in report


def test_a_lost_anchor_is_told_from_a_changed_symbol(small, compare):
    text = small.files["sglang/srt/choices.py"].replace("need_sort", "must_sort")
    report, clean = compare(small.files | {"sglang/srt/choices.py": text})
    assert not clean
    assert (
        "anchor lost" in report
        and "assign = 'need_sort' is lost" in report
        and "+    must_sort = name in NAMES" in report
    )


def test_a_lost_symbol_shows_the_module(small, compare):
    text = small.files["sglang/srt/choices.py"].replace("def pick(", "def pick_one(")
    report, clean = compare(small.files | {"sglang/srt/choices.py": text})
    assert not clean and "did upstream rename it to pick_one?" in report and "+def pick_one(" in report


def test_a_moved_module_is_found_by_its_name(small, compare):
    files = {k: v for k, v in small.files.items() if k != "sglang/srt/choices.py"} | {"sglang/new/choices.py": ""}
    report, clean = compare(files)
    assert not clean and "module gone" in report and "a file of that name: sglang/new/choices.py" in report


def test_a_new_upstream_file_may_shadow_ours(small, compare):
    report, clean = compare(small.files | {"sglang/srt/ours.py": ""})
    assert not clean and "shadowed       sglang/srt/ours.py" in report


@pytest.mark.parametrize("same", [True, False])
def test_the_command_exits_with_the_verdict(small, tmp_path, monkeypatch, capsys, same):
    text = small.files["sglang/srt/choices.py"]
    newer = text if same else text.replace("return value", "return None")
    small.write_wheel(small.wheels, small.files | {"sglang/srt/choices.py": newer}, "1.1")
    monkeypatch.setattr(cli, "FORK", small.root)
    monkeypatch.setattr(cli, "load_pin", lambda fork: small.pin())
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(small.wheels))
    monkeypatch.setattr("sys.argv", ["overlay", "drift", "--to", "1.1"])
    assert cli.main() == (0 if same else 1)
    assert "sglang 1.0 -> 1.1" in capsys.readouterr().out


def test_the_pin_does_not_drift_from_itself(fork, fork_plan, pinned):
    report, clean = drift.compare(fork, pinned, pinned)
    assert clean and report.count("unchanged ") == len(fork_plan.edits)
