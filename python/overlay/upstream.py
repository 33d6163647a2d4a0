# SPDX-License-Identifier: Apache-2.0
"""The pin, and the pinned wheel: from a local directory, our cache, or the package index. Its hash always decides."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import Refused

WHEELS_VARIABLE = "SGLANG_KDTREE_WHEELS"  # a directory of upstream wheels, instead of the package index
CACHE_VARIABLE = "SGLANG_KDTREE_CACHE"


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    local: str
    sha256: dict[str, str]  # by wheel tag

    @property
    def fork_version(self) -> str:
        return f"{self.version}+{self.local}"


def load_pin(fork: Path) -> Pin:
    return Pin(**tomllib.loads((fork / "UPSTREAM.toml").read_text(encoding="utf-8")))


class Wheel:
    """An upstream wheel, read only."""

    def __init__(self, path: Path):
        self.path = path
        self.archive = zipfile.ZipFile(path)
        self.names = frozenset(name for name in self.archive.namelist() if not name.endswith("/"))
        self.distribution, self.version, *_ = path.name.removesuffix(".whl").split("-")

    @property
    def tag(self) -> str:
        return tag_of(self.path)

    @property
    def info(self) -> str:
        return f"{self.distribution}-{self.version}.dist-info"

    def read(self, name: str) -> bytes:
        return self.archive.read(name)


def tag_of(path: Path) -> str:
    return "-".join(path.name.removesuffix(".whl").split("-")[2:])


def pinned_wheel(pin: Pin) -> Wheel:
    """The pinned wheel for the running interpreter, its sha256 checked."""
    path = obtain(pin.name, pin.version)
    check_hash(pin, path)
    return Wheel(path)


def check_hash(pin: Pin, path: Path) -> None:
    expected = pin.sha256.get(tag_of(path))
    if expected is None:
        raise Refused(
            f"{path.name}: UPSTREAM.toml has no sha256 for the tag {tag_of(path)}; it has {', '.join(pin.sha256)}. "
            "Use one of these interpreters, or add the tag after reviewing that wheel"
        )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise Refused(
            f"{path}: sha256 is {found}, UPSTREAM.toml says {expected}. The file is damaged or is not the pinned one: "
            "delete it and try again; if it stays, do not install it"
        )


def obtain(name: str, version: str) -> Path:
    """pip picks the wheel for this interpreter: from the local directory if one is named, else from cache or index."""
    local = os.environ.get(WHEELS_VARIABLE)
    if local:
        with tempfile.TemporaryDirectory() as scratch:
            chosen = download(name, version, Path(scratch), "--no-index", "--find-links", local)
            return Path(local).resolve() / chosen.name
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        try:
            chosen = download(name, version, Path(scratch), "--no-index", "--find-links", str(cache))
        except Refused:
            chosen = download(name, version, Path(scratch))
        kept = cache / chosen.name
        os.replace(chosen, kept)
    return kept


def cache_directory() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "sglang-kdtree"


def download(name: str, version: str, target: Path, *source: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(target), *source, f"{name}=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(target.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        python = f"CPython {sys.version_info.major}.{sys.version_info.minor} on {os.uname().machine}"
        where = f"in {source[-1]}" if source else "on the package index"
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise Refused(
            f"no wheel of {name}=={version} for {python} {where}. Use a Python that UPSTREAM.toml lists, or point "
            f"{WHEELS_VARIABLE} to a directory that holds the wheel",
            *errors,
        )
    return wheels[0]
