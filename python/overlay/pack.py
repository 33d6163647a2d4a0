# SPDX-License-Identifier: Apache-2.0
"""Phase two: the fork's wheel. The same inputs give the same bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

from . import metadata
from .plan import Plan
from .upstream import Pin, Wheel

TIMESTAMP = (2020, 1, 1, 0, 0, 0)
FILE_MODE = 0o100644 << 16
CHANGES = "CHANGES-kdtree.txt"
NOTICE = "NOTICE"


def build(fork: Path, pin: Pin, wheel: Wheel, plan: Plan, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{pin.name}-{pin.fork_version}-{wheel.tag}.whl"
    scratch = target.with_suffix(".part")
    try:
        pack(fork, pin, wheel, plan, scratch)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return target


def pack(fork: Path, pin: Pin, wheel: Wheel, plan: Plan, target: Path) -> None:
    info = f"{pin.name}-{pin.fork_version}.dist-info"
    ours = plan.files() | info_files(fork, pin, wheel, plan)
    modes = {entry.filename: entry.external_attr for entry in wheel.archive.infolist()}
    rows = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:

        def put(path: str, data: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(path, date_time=TIMESTAMP)
            entry.external_attr, entry.compress_type = mode, zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        for path in sorted(wheel.names | ours.keys()):
            if path == f"{wheel.info}/RECORD":
                continue
            data = ours[path] if path in ours else wheel.read(path)
            name = f"{info}/{path.removeprefix(wheel.info + '/')}" if path.startswith(wheel.info + "/") else path
            put(name, data, modes.get(path, FILE_MODE))
            rows.append(record_row(name, data))
        rows.append((f"{info}/RECORD", "", ""))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        put(f"{info}/RECORD", text.getvalue().encode(), FILE_MODE)


def info_files(fork: Path, pin: Pin, wheel: Wheel, plan: Plan) -> dict[str, bytes]:
    """Our changes to upstream's dist-info, at the paths they have there; its licence text stays beside our notice."""
    text = metadata.rewrite(wheel.read(f"{wheel.info}/METADATA").decode(), pin, fork)
    return {
        f"{wheel.info}/METADATA": text.encode(),
        f"{wheel.info}/{CHANGES}": changes(pin, plan).encode(),
        f"{wheel.info}/licenses/{metadata.NOTICE_FILE}": (fork / NOTICE).read_bytes(),
    }


def changes(pin: Pin, plan: Plan) -> str:
    """The notice of changed files that the Apache License asks for, section 4(b)."""
    lines = [f"{pin.name} {pin.fork_version} is {pin.name} {pin.version} with these changes.", "", "Changed files:"]
    lines += [f"{edit.module} ({edit.symbol or 'module'}): {edit.why}" for edit in plan.edits]
    lines += ["", "Added files:", *plan.own]
    return "\n".join(lines) + "\n"


def record_row(path: str, data: bytes) -> tuple[str, str, int]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return path, f"sha256={digest}", len(data)
