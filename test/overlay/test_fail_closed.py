# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong stops the build, says what to do, and leaves nothing half written."""

import pytest

from overlay import backend, pack, tree, upstream
from overlay.errors import Refused


def lose_anchor(small):
    small.edit(
        "srt/choices.py", small.root.joinpath("edits/srt/choices.py.toml").read_text().replace("need_sort", "gone")
    )


def double_anchor(small):
    text = small.root.joinpath("edits/srt/choices.py.toml").read_text()
    small.edit("srt/choices.py", text.replace('{ assign = "need_sort" }', '{ expr = "name" }'))


def shadow(small):
    small.own("srt/choices.py", "")


def unsign(small):
    path = small.root / "edits/srt/choices.py.toml"
    path.write_text(path.read_text().partition("symbol_sha")[0])


def change_signature(small):
    path = small.root / "edits/srt/choices.py.toml"
    path.write_text(path.read_text().partition("symbol_sha")[0] + 'symbol_sha = "000000000000"\n')


def lose_module(small):
    path = small.root / "edits/srt/choices.py.toml"
    path.rename(path.with_name("moved.py.toml"))


def break_toml(small):
    small.edit("srt/choices.py", "[[edit]\n")


def new_package(small):
    small.own("srt/fresh/code.py", "")


FAILURES = {
    lose_anchor: "anchor assign = 'gone' is lost",
    double_anchor: r"anchor expr = 'name' is not unique: \d matches",
    shadow: "sglang/srt/choices.py: shadows an upstream file: give ours another name",
    unsign: "is not signed.*run `python -m overlay sign`",
    change_signature: "symbol hash is .*, signed is 000000000000: review the symbol",
    lose_module: "sglang/srt/moved.py: upstream 1.0 has no such module",
    break_toml: "not valid TOML",
    new_package: "its new package sglang/srt/fresh has no __init__.py",
}


@pytest.mark.parametrize("spoil", FAILURES, ids=lambda spoil: spoil.__name__)
def test_each_failure_stops_the_build(small, spoil, tmp_path):
    small.plan()  # sound before it is spoiled
    spoil(small)
    with pytest.raises(Refused, match=FAILURES[spoil]):
        pack.build(small.root, small.pin(), small.wheel, small.plan(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_failures_are_reported_together(small):
    lose_anchor(small)
    shadow(small)
    new_package(small)
    small.edit("srt/lost.py", small.root.joinpath("edits/srt/choices.py.toml").read_text())
    with pytest.raises(Refused) as refusal:
        small.plan()
    report = "\n".join(refusal.value.reasons)
    assert all(part in report for part in ("is lost", "shadows", "no __init__.py", "no such module"))


def test_a_wheel_with_another_hash_is_refused(small):
    with pytest.raises(Refused, match="sha256 is .*UPSTREAM.toml says 0000.*delete it and try again"):
        upstream.check_hash(small.pin(sha256={small.wheel.tag: "0" * 64}), small.wheel.path)
    upstream.check_hash(small.pin(), small.wheel.path)


def test_a_wheel_tag_without_a_hash_is_refused(small):
    with pytest.raises(Refused, match="has no sha256 for the tag cp3.*-none-any; it has cp399-none-any"):
        upstream.check_hash(small.pin(sha256={"cp399-none-any": "0"}), small.wheel.path)


def test_no_wheel_for_this_interpreter(small, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(tmp_path / "empty"))
    with pytest.raises(Refused, match="no wheel of sglang==1.0 for CPython 3.* in .*empty.*SGLANG_KDTREE_WHEELS"):
        upstream.pinned_wheel(small.pin())


def test_a_local_directory_of_wheels_serves_the_right_one(small, monkeypatch):
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(small.wheels))
    assert upstream.pinned_wheel(small.pin()).path == small.wheel.path


def test_a_changed_metadata_line_is_refused(small, tmp_path):
    with pytest.raises(Refused, match="no single line 'Version: 2.0'"):
        pack.build(small.root, small.pin(version="2.0"), small.wheel, small.plan(), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_a_requirement_that_upstream_dropped_is_refused(small, tmp_path):
    small.write("REQUIREMENTS.toml", 'upstream = ["numpy", "gone"]\nown = []\n[extras]\n')
    with pytest.raises(Refused, match="upstream gone no longer required"):
        pack.build(small.root, small.pin(), small.wheel, small.plan(), tmp_path / "out")


def test_another_version_in_the_tree_is_refused(small, tmp_path):
    (tmp_path / "site" / "sglang-0.9.dist-info").mkdir(parents=True)
    with pytest.raises(Refused, match="holds sglang-0.9.dist-info, not sglang 1.0"):
        tree.install(small.plan(), small.pin(), small.wheel, tmp_path / "site", linked=True)
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["sglang-0.9.dist-info"]


def test_pip_shows_the_reasons(monkeypatch, small):
    """The backend ends with the reasons as its last words, not with a traceback."""
    lose_anchor(small)
    monkeypatch.setattr(backend, "FORK", small.root)
    monkeypatch.setattr(backend, "load_pin", lambda fork: small.pin())
    monkeypatch.setenv(upstream.WHEELS_VARIABLE, str(small.wheels))
    with pytest.raises(SystemExit, match="refused, nothing was written:\n  sglang/srt/choices.py:pick .*is lost"):
        backend.build_wheel(str(small.root))
