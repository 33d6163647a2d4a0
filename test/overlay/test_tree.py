# SPDX-License-Identifier: Apache-2.0
"""The development loop: our files linked or copied into an installed tree, and taken back out of it."""

import os

import pytest

from overlay import tree
from overlay.errors import Refused


@pytest.fixture
def site(small, tmp_path):
    """The installed upstream, and a second environment that shares its files by hard link."""
    site, twin = tmp_path / "site", tmp_path / "twin"
    for name in small.wheel.names:
        path, other = site / name, twin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        other.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(small.wheel.read(name))
        os.link(path, other)
    return site


def snapshot(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("linked", [True, False])
def test_the_tree_is_that_of_the_wheel(small, site, linked):
    plan = small.plan()
    tree.install(plan, small.pin(), small.wheel, site, linked=linked)
    found = snapshot(site)
    assert all(found[path] == data for path, data in plan.files().items())
    assert (site / "sglang/srt/ours.py").is_symlink() == linked
    assert b"or name == 'ours'" in found["sglang/srt/choices.py"]


@pytest.mark.parametrize("linked", [True, False])
def test_environments_that_share_files_stay_as_they_are(small, site, linked):
    before = snapshot(site.parent / "twin")
    tree.install(small.plan(), small.pin(), small.wheel, site, linked=linked)
    tree.install(small.plan(), small.pin(), small.wheel, site, linked=linked)
    assert snapshot(site.parent / "twin") == before


def test_a_linked_file_is_the_one_in_the_checkout(small, site):
    tree.install(small.plan(), small.pin(), small.wheel, site, linked=True)
    small.own("srt/ours.py", "VALUE = 2\n")
    assert (site / "sglang/srt/ours.py").read_text() == "VALUE = 2\n"


def test_what_left_the_fork_leaves_the_tree(small, site):
    tree.install(small.plan(), small.pin(), small.wheel, site, linked=True)
    (small.root / "edits/srt/choices.py.toml").unlink()
    (small.root / "sglang/srt/ours.py").unlink()
    tree.install(small.plan(), small.pin(), small.wheel, site, linked=True)
    assert (site / "sglang/srt/choices.py").read_bytes() == small.wheel.read("sglang/srt/choices.py")
    assert not os.path.lexists(site / "sglang/srt/ours.py")


def test_one_edit_can_be_left_out(small, site):
    plan = small.plan(without=["sglang/srt/choices.py:pick"])
    tree.install(plan, small.pin(), small.wheel, site, linked=True)
    assert (site / "sglang/srt/choices.py").read_bytes() == small.wheel.read("sglang/srt/choices.py")
    with pytest.raises(Refused, match=":none: there is no such edit"):
        small.plan(without=["sglang/srt/choices.py:none"])


def test_a_folder_that_leads_out_of_the_tree_is_refused(small, site, tmp_path):
    """Else the files of a checkout that somebody linked there by hand would be replaced by links to themselves."""
    before = snapshot(small.root)
    os.rename(site / "sglang", tmp_path / "old")
    (site / "sglang").symlink_to(small.root / "sglang")
    with pytest.raises(Refused, match="leads out of"):
        tree.install(small.plan(), small.pin(), small.wheel, site, linked=True)
    assert snapshot(small.root) == before
