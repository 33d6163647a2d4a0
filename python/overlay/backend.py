# SPDX-License-Identifier: Apache-2.0
"""PEP 517: `pip install ./python` obtains the pinned upstream wheel, checks its hash and repacks it as the fork."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from . import pack
from .errors import Refused
from .plan import FORK, Plan, make_plan
from .upstream import Pin, Wheel, load_pin, pinned_wheel

SOURCES = ["UPSTREAM.toml", "REQUIREMENTS.toml", "CAPS.toml", "series.toml", "constraints-cpu.txt", "pyproject.toml"]
SOURCES += ["NOTICE", "overlay", "edits", "sglang"]
LICENSE = "LICENSE"


def resolve() -> tuple[Pin, Wheel, Plan]:
    try:
        pin = load_pin(FORK)
        wheel = pinned_wheel(pin)
        return pin, wheel, make_plan(FORK, wheel)
    except Refused as refusal:
        raise SystemExit("\n  ".join(["overlay: refused, nothing was written:", *refusal.reasons])) from None


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    return pack.build(FORK, *resolve(), Path(wheel_directory)).name


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict | None = None) -> str:
    pin, wheel, plan = resolve()
    info = Path(metadata_directory) / f"{pin.name}-{pin.fork_version}.dist-info"
    files = {path: wheel.read(path) for path in wheel.names if path.startswith(wheel.info + "/")}
    files |= pack.info_files(FORK, pin, wheel, plan)
    for path, data in files.items():
        target = info / path.removeprefix(wheel.info + "/")
        if target.name != "RECORD":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return info.name


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    """The same sources give the same bytes."""
    pin = load_pin(FORK)
    name = f"{pin.name}-{pin.fork_version}"
    files = {"PKG-INFO": f"Metadata-Version: 2.4\nName: {pin.name}\nVersion: {pin.fork_version}\n".encode()}
    # Beside this folder in a checkout, in it where an sdist was unpacked.
    licence = FORK / LICENSE
    files[LICENSE] = (licence if licence.exists() else FORK.parent / LICENSE).read_bytes()
    for source in SOURCES:
        files |= {path.relative_to(FORK).as_posix(): path.read_bytes() for path in files_under(FORK / source)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    target = Path(sdist_directory) / f"{name}.tar.gz"
    # Unlike gzip.compress, the same head from every Python.
    with target.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as archive:
        archive.write(packed.getvalue())
    return target.name


def files_under(path: Path) -> list[Path]:
    found = path.rglob("*") if path.is_dir() else [path]
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]
