# SPDX-License-Identifier: Apache-2.0
"""The delta stays small: capped, counted, and shown in the README as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from overlay import delta
from overlay.errors import Refused

ROOT = Path(__file__).resolve().parents[2]


def test_the_delta_is_below_its_caps(fork, fork_plan):
    delta.check_caps(fork_plan, delta.load_caps(fork))


def test_the_readme_shows_the_delta(fork_plan, pin):
    """`make format` writes the line."""
    assert delta.line(fork_plan, pin) in (ROOT / "README.md").read_text().splitlines()


def test_the_line_is_written_into_a_document(small, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Before.\nDelta over nothing\nAfter.\n")
    delta.write_line(page, small.plan(), small.pin())
    line = "Delta over sglang 1.0: 1 files of ours (1 lines), 1 edits in 1 upstream files (1 lines)."
    assert page.read_text() == f"Before.\n{line}\nAfter.\n"
    page.write_text("Nothing.\n")
    with pytest.raises(Refused, match="0 lines start with 'Delta over'"):
        delta.write_line(page, small.plan(), small.pin())


def test_the_measure_counts(small):
    assert delta.measure(small.plan()) == delta.Delta(files=1, lines=1, edits=1, modules=1, inserted_lines=1)


@pytest.mark.parametrize("name", ["files", "lines", "edits", "inserted_lines"])
def test_each_cap_refuses(small, name):
    caps = {"files": 1, "lines": 1, "edits": 1, "inserted_lines": 1}
    delta.check_caps(small.plan(), caps)
    with pytest.raises(Refused, match=f"^{name} is 1, the cap in CAPS.toml is 0: make the delta smaller"):
        delta.check_caps(small.plan(), caps | {name: 0})


def test_the_report_lists_what_we_would_like_to_lose(fork, fork_plan, pin):
    report = delta.report(fork_plan, pin, delta.load_caps(fork))
    for edit in fork_plan.edits:
        assert edit.place in report and edit.why in report and edit.retire_when in report and edit.upstream in report


def test_a_reader_that_has_seen_enough_is_no_error(fork):
    shown = f"{sys.executable} -m overlay delta | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shown], cwd=fork, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and done.stdout.startswith("Delta over")


def test_the_version_is_written_in_one_place(pin):
    """What builds and starts the fork never names the release."""
    sources = [path for folder in ("python/overlay", "scripts", ".ci") for path in (ROOT / folder).rglob("*")]
    sources += [
        ROOT / name for name in ("Makefile", "pyproject.toml", "python/pyproject.toml", "python/REQUIREMENTS.toml")
    ]
    texts = {path: path.read_text() for path in sources if path.is_file() and path.suffix != ".pyc"}
    assert len(texts) > 15
    assert [str(path) for path, text in texts.items() if pin.version in text] == []
