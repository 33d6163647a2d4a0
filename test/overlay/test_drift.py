# SPDX-License-Identifier: Apache-2.0
"""The report on a newer upstream, against a small one that changes in each way."""

import pytest

from overlay import __main__ as cli
from overlay import drift, upstream
from overlay.errors import Refused


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


# What our files use


USER = """
from sglang.srt.choices import Runner, lookup

class Ours(Runner):
    def go(self):
        return self.ready and lookup(name="a", default=None)
"""


@pytest.fixture
def used(small, compare):
    """-> what drift says of a file of ours that uses the module, after a change of it"""
    small.own("srt/ours.py", USER)

    def run(*change):
        text = small.files["sglang/srt/choices.py"]
        assert change[0] in text
        report, clean = compare(small.files | {"sglang/srt/choices.py": text.replace(*change)})
        return [line for line in report.splitlines() if line.split()[0] in ("import", "words", "used,")], clean

    return run


def test_a_name_that_we_import_is_lost(used):
    assert used("def lookup(name", "def look_up(name") == (
        ["import lost    sglang/srt/ours.py: sglang.srt.choices.lookup"],
        False,
    )


def test_a_module_that_we_import_from_is_gone(small, compare):
    small.own("srt/ours.py", "import sglang.srt.tools\nfrom sglang.srt import tools\nfrom sglang.srt.tools import f\n")
    small.files["sglang/srt/tools.py"] = "def f(): ...\n"
    small.wheel = small.write_wheel(small.wheels, small.files)
    report, clean = compare({k: v for k, v in small.files.items() if "tools" not in k})
    lost = ["sglang.srt.tools.f", "sglang.srt.tools", "sglang.srt.tools"]
    assert not clean and [line.split(": ")[1] for line in report.splitlines() if "import lost" in line] == sorted(lost)


def test_an_attribute_that_we_use_is_renamed(used):
    lines, clean = used("self.ready", "self.is_ready")
    assert not clean and lines == ["words gone     sglang/srt/ours.py: sglang.srt.choices.Runner no longer says ready"]


def test_an_argument_that_we_give_is_renamed(used):
    lines, clean = used(
        "def lookup(name, default):\n    return default", "def lookup(key, default):\n    return default"
    )
    assert not clean and "lookup no longer says name" in lines[0]


def test_another_change_of_what_we_use_is_to_read(used):
    lines, clean = used("and self.ready", "and not self.ready")
    assert clean and lines == ["used, changed  sglang.srt.choices.Runner: sglang/srt/ours.py"]


@pytest.mark.parametrize(
    "binding",
    [
        "try:\n    lookup = None\nexcept ImportError:\n    pass\n",
        "if True:\n    from elsewhere import lookup\n",
        "from elsewhere import *\n",
        "def __getattr__(name): ...\n",
        "import elsewhere.other as lookup\n",
    ],
)
def test_a_name_may_be_bound_in_many_ways(used, binding):
    assert used("def lookup(name, default):\n    return default\n", binding)[1]


# Named versions


def test_newest_and_previous_are_versions(small, monkeypatch):
    for version in ("1.1", "0.9"):
        small.write_wheel(small.wheels, small.files, version)
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(small.wheels))
    assert upstream.published("sglang") == ["1.1", "1.0", "0.9"]
    for name, version in (("newest", "1.1"), ("previous", "0.9")):
        report, clean = drift.report(small.root, small.pin(), name)
        assert clean and report.startswith(f"sglang 1.0 -> {version}\n")
    with pytest.raises(Refused, match="nothing older than 0.9 is published; there is 1.1, 1.0, 0.9"):
        drift.named("previous", small.pin(version="0.9"), ["1.1", "1.0", "0.9"])
    with pytest.raises(Refused, match="pip finds no version of none"):
        upstream.published("none")


def test_pin_writes_version_and_sums_and_nothing_else(small, monkeypatch):
    newer = small.write_wheel(small.wheels, small.files | {"sglang/new.py": ""}, "1.1")
    pin = small.pin(local="kdtree.4")
    before = "# A comment.\n" + "".join(
        f'{key} = "{getattr(pin, key)}"  # why\n' for key in ("name", "version", "local")
    )
    tag, digest = next(iter(pin.sha256.items()))
    path = small.write("UPSTREAM.toml", before + f'[sha256]\n{tag} = "{digest}"\n')
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(small.wheels))
    monkeypatch.setattr(upstream, "options_for", lambda tag: [])  # the small wheel's tag is for any machine
    said = upstream.repin(small.root, upstream.load_pin(small.root), "1.1")
    found = upstream.load_pin(small.root)
    assert (found.fork_version, said[0]) == ("1.1+kdtree.1", "1.0+kdtree.4 -> 1.1+kdtree.1")
    upstream.check_hash(found, newer.path)
    assert path.read_text().count("# why") == 3 and path.read_text().startswith("# A comment.\n")


def test_pip_is_asked_for_the_wheel_of_a_tag():
    options = upstream.options_for("cp312-cp312-manylinux_2_34_x86_64")
    assert options == [
        *("--implementation", "cp", "--python-version", "312", "--abi", "cp312"),
        *("--platform", "manylinux_2_34_x86_64"),
    ]
