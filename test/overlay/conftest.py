# SPDX-License-Identifier: Apache-2.0
"""A small upstream and a small fork of it, so that every failure can be shown in milliseconds; and the real ones."""

import hashlib
import shutil
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from overlay import pack, plan, sign, upstream

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}-none-any"
METADATA = """Metadata-Version: 2.4
Name: sglang
Version: {version}
Requires-Python: >=3.11
Requires-Dist: torch==2.14.1
Requires-Dist: numpy
Requires-Dist: av==1.0; sys_platform == "linux" and (platform_machine == "aarch64" or platform_machine == "arm64")
Provides-Extra: test
Requires-Dist: pytest; extra == "test"

The body.
"""
CHOICES = """
NAMES = [
    "triton",
    "ascend",  # comment, with a comma
]


def pick(name, default=None):
    '''Pick one.'''
    need_sort = name in NAMES
    if name and need_sort:
        return name
    value = lookup(
        name,
        default,
    )
    return value


def lookup(name, default):
    return default


class Runner:
    def start(self):
        self.ready = True
        return lookup("a", None) and self.ready
"""
EDIT = """
[[edit]]
symbol = "pick"
action = "replace"
anchor = { assign = "need_sort" }
text = "$old or name == 'ours'"
why = "a reason"
upstream = "not sent: a reason"
retire_when = "a condition"
test = "test_something.py::test_it"
"""


def write_wheel(folder: Path, files: dict[str, str], version: str = "1.0", tag: str = TAG) -> upstream.Wheel:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sglang-{version}-{tag}.whl"
    info = f"sglang-{version}.dist-info"
    contents = {name: text.encode() for name, text in files.items()}
    contents[f"{info}/METADATA"] = METADATA.format(version=version).encode()
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    rows = [",".join(map(str, pack.record_row(name, data))) for name, data in contents.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return upstream.Wheel(path)


class SmallFork:
    """A fork directory on disk, and the upstream wheel that it is laid over."""

    def __init__(self, root: Path):
        self.root, self.wheels = root / "python", root / "wheels"
        self.files = {
            "sglang/__init__.py": "",
            "sglang/srt/__init__.py": "",
            "sglang/srt/choices.py": CHOICES,
        }
        self.wheel = write_wheel(self.wheels, self.files)
        self.edit("srt/choices.py", EDIT)
        self.own("srt/ours.py", "VALUE = 1\n")
        self.write(
            "REQUIREMENTS.toml",
            'upstream = ["numpy"]\nown = ["torch>=2.11"]\n[extras]\ncpu = []\nkit = ["rich"]\n',
        )
        self.write("NOTICE", "Ours, over theirs.\n")
        self.write(
            "series.toml",
            """
            [[change]]
            title = "Fix the choice"
            motivation = "It is wrong."
            description = "Make it right."
            edits = ["sglang/srt/choices.py:pick"]

            [[change]]
            title = "Add ours"
            motivation = "It is missing."
            description = "Add it."
            files = ["sglang/srt"]
            """,
        )
        self.pin()
        sign.sign(self.root, self.wheel)

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text))
        return target

    def edit(self, module: str, text: str) -> Path:
        return self.write(f"edits/{module}.toml", text)

    def own(self, path: str, text: str) -> Path:
        return self.write(f"sglang/{path}", text)

    write_wheel = staticmethod(write_wheel)

    def pin(self, **changes) -> upstream.Pin:
        digest = hashlib.sha256(self.wheel.path.read_bytes()).hexdigest()
        fields = {"name": "sglang", "version": "1.0", "local": "kdtree.1", "sha256": {TAG: digest}}
        return upstream.Pin(**{**fields, **changes})

    def plan(self, **options) -> plan.Plan:
        return plan.make_plan(self.root, self.wheel, **options)


@pytest.fixture
def small(tmp_path: Path) -> SmallFork:
    return SmallFork(tmp_path)


@pytest.fixture(scope="session")
def fork(tmp_path_factory) -> Path:
    """The real fork's sources as they are now: saving a file while the tests run does not disturb them."""
    root, target = plan.FORK.parent, tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__", "build", "dist")
    for folder in ("python", "test/registered", "docs/upstream"):
        shutil.copytree(root / folder, target / folder, ignore=ignored)
    shutil.copy(root / "LICENSE", target)
    # What the tables of the series are made of.
    (target / "benchmark").symlink_to(root / "benchmark")
    (target / "test" / "models").symlink_to(root / "test" / "models")
    return target / "python"


@pytest.fixture(scope="session")
def pin(fork: Path) -> upstream.Pin:
    return upstream.load_pin(fork)


@pytest.fixture(scope="session")
def pinned(pin: upstream.Pin) -> upstream.Wheel:
    return upstream.pinned_wheel(pin)


@pytest.fixture(scope="session")
def fork_plan(fork: Path, pinned: upstream.Wheel) -> plan.Plan:
    return plan.make_plan(fork, pinned)


@pytest.fixture(scope="session")
def fork_wheel(fork, pin, pinned, fork_plan, tmp_path_factory) -> Path:
    """The real fork, built."""
    return pack.build(fork, pin, pinned, fork_plan, tmp_path_factory.mktemp("fork"))
