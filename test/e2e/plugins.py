# SPDX-License-Identifier: Apache-2.0
"""Test aids in the processes of a server, through upstream's entry point for plugins."""

from __future__ import annotations

import os
from pathlib import Path


def plugin_environment(folder: Path, *modules: Path) -> dict[str, str]:
    """The environment of a server that calls ``install()`` of each module. folder: empty, for the entry points."""
    for module in modules:
        name = module.stem
        (folder / module.name).write_text(module.read_text())
        info = folder / f"{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:install\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
