# SPDX-License-Identifier: Apache-2.0
"""The fork in an installed tree: the development loop.

`link` puts symlinks to our files, so that saving a file is enough; `lay` copies them. Both write the edited modules.
A file is always unlinked before it is written, so that environments which share it by hard link stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

from .errors import Refused
from .plan import Plan
from .upstream import Pin, Wheel

MANIFEST = "sglang/.kdtree-overlay.json"


def install(plan: Plan, pin: Pin, wheel: Wheel, site: Path, *, linked: bool) -> None:
    check_target(pin, site)
    check_folders(plan, site)
    undo(wheel, site)
    # Written first, so that an interrupted run can be undone.
    write(site / MANIFEST, json.dumps({"own": sorted(plan.own), "edited": sorted(plan.edited)}, indent=1).encode())
    for path, source in plan.own.items():
        target = site / path
        if linked:
            fresh(target).symlink_to(source)
        else:
            write(target, source.read_bytes())
    for path, data in plan.edited.items():
        write(site / path, data)


def check_target(pin: Pin, site: Path) -> None:
    infos = sorted(path.name for path in site.glob(f"{pin.name}-*.dist-info"))
    accepted = {f"{pin.name}-{version}.dist-info" for version in (pin.version, pin.fork_version)}
    if not accepted & set(infos):
        raise Refused(
            f"{site}: holds {', '.join(infos) or 'no ' + pin.name}, not {pin.name} {pin.version}. "
            f"Give the site-packages of an environment with it: pip install --no-deps {pin.name}=={pin.version}"
        )


def check_folders(plan: Plan, site: Path) -> None:
    """A folder that is a link to somewhere else, such as to this checkout: its files would be unlinked and replaced."""
    inside = site.resolve()
    for folder in sorted({(site / path).parent for path in (*plan.own, *plan.edited)}):
        if not folder.resolve().is_relative_to(inside):
            raise Refused(f"{folder} leads out of {site}, to {folder.resolve()}: remove that link first")


def undo(wheel: Wheel, site: Path) -> None:
    """Take back what an earlier link or lay put there."""
    manifest = site / MANIFEST
    if not manifest.exists():
        return
    before = json.loads(manifest.read_text())
    for path in before["own"]:
        (site / path).unlink(missing_ok=True)
    for path in before["edited"]:
        write(site / path, wheel.read(path))
    manifest.unlink()


def fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def write(path: Path, data: bytes) -> None:
    fresh(path).write_bytes(data)
