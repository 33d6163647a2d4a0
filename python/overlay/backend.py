# SPDX-License-Identifier: Apache-2.0
"""PEP 517: `pip install ./python` obtains the pinned upstream wheel, checks its hash and repacks it as the fork."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from . import pack
from .errors import Refused
from .plan import FORK, Plan, make_plan
from .upstream import Pin, Wheel, load_pin, pinned_wheel

SOURCES = ["UPSTREAM.toml", "REQUIREMENTS.toml", "CAPS.toml", "series.toml", "constraints-cpu.txt", "pyproject.toml"]
SOURCES += ["NOTICE", "overlay", "edits", "sglang"]


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
    pin = load_pin(FORK)
    name = f"{pin.name}-{pin.fork_version}"
    target = Path(sdist_directory) / f"{name}.tar.gz"
    with tarfile.open(target, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        package_info = f"Metadata-Version: 2.4\nName: {pin.name}\nVersion: {pin.fork_version}\n".encode()
        entry = tarfile.TarInfo(f"{name}/PKG-INFO")
        entry.size = len(package_info)
        archive.addfile(entry, io.BytesIO(package_info))
        for source in SOURCES:
            archive.add(FORK / source, f"{name}/{source}", filter=source_only)
    return target.name


def source_only(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry
