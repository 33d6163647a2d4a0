# SPDX-License-Identifier: Apache-2.0
"""The pin, and the pinned wheel: from a local directory, our cache, or the package index. Its hash always decides."""

from __future__ import annotations

import hashlib
import os
import re
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
FIRST_LOCAL = "kdtree.1"  # our part of the version starts anew with each upstream release


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


def pinned_wheel(pin: Pin, tag: str | None = None) -> Wheel:
    """The pinned wheel for the running interpreter, or for another wheel tag; its sha256 checked."""
    path = obtain(pin.name, pin.version, tag)
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


def obtain(name: str, version: str, tag: str | None = None) -> Path:
    """pip picks the wheel, for this interpreter or for a tag: from the local directory if one is named, else from cache
    or index."""
    options = [] if tag is None else options_for(tag)
    local = os.environ.get(WHEELS_VARIABLE)
    if local:
        with tempfile.TemporaryDirectory() as scratch:
            chosen = download(name, version, Path(scratch), *options, "--no-index", "--find-links", local)
            return Path(local).resolve() / chosen.name
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        try:
            chosen = download(name, version, Path(scratch), *options, "--no-index", "--find-links", str(cache))
        except Refused:
            chosen = download(name, version, Path(scratch), *options)
        kept = cache / chosen.name
        os.replace(chosen, kept)
    return kept


def options_for(tag: str) -> list[str]:
    """pip's options for a wheel tag, cp312-cp312-manylinux_2_34_x86_64."""
    python, abi, platform = tag.split("-")
    version = python.removeprefix("cp")
    return ["--implementation", "cp", "--python-version", version, "--abi", abi, "--platform", platform]


def published(name: str) -> list[str]:
    """Every version that pip finds, newest first."""
    local = os.environ.get(WHEELS_VARIABLE)
    source = ["--no-index", "--find-links", local] if local else []
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", *source, name]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = re.search(r"^Available versions: (.+)$", result.stdout, re.MULTILINE)
    if found is None:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise Refused(f"pip finds no version of {name} {'in ' + local if local else 'on the package index'}", *errors)
    return found[1].split(", ")


def repin(fork: Path, pin: Pin, version: str) -> list[str]:
    """Write another version and the sha256 of each of its wheels into UPSTREAM.toml; -> what changed."""
    sums = {tag: hashlib.sha256(obtain(pin.name, version, tag).read_bytes()).hexdigest() for tag in pin.sha256}
    path = fork / "UPSTREAM.toml"
    text = path.read_text(encoding="utf-8")
    for key, old, new in [
        ("version", pin.version, version),
        ("local", pin.local, FIRST_LOCAL),
        *((tag, pin.sha256[tag], value) for tag, value in sums.items()),
    ]:
        line = re.compile(rf'^({re.escape(key)}\s*=\s*)"{re.escape(old)}"', re.MULTILINE)
        text, count = line.subn(lambda match, new=new: f'{match[1]}"{new}"', text)
        if count != 1:
            raise Refused(f"UPSTREAM.toml: {count} lines set {key} to {old}, one is needed")
    path.write_text(text, encoding="utf-8")
    return [f"{pin.fork_version} -> {version}+{FIRST_LOCAL}", *(f"{tag} {value}" for tag, value in sums.items())]


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
        where = f"in {source[-1]}" if "--find-links" in source else "on the package index"
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise Refused(
            f"no wheel of {name}=={version} for {python} {where}. Use a Python that UPSTREAM.toml lists, or point "
            f"{WHEELS_VARIABLE} to a directory that holds the wheel",
            *errors,
        )
    return wheels[0]
