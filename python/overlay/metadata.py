# SPDX-License-Identifier: Apache-2.0
"""METADATA of the fork: upstream's, with our version and with the requirements that REQUIREMENTS.toml describes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from .errors import Refused
from .upstream import Pin

NOTICE_FILE = "NOTICE-kdtree"  # in the wheel's folder of licences, beside upstream's
FULL_SET = "cuda"  # the extra that holds upstream's unconditional requirements


def rewrite(text: str, pin: Pin, fork: Path) -> str:
    head, separator, body = text.partition("\n\n")
    lines = head.split("\n")
    if lines.count(f"Version: {pin.version}") != 1:
        raise Refused(f"METADATA of the upstream wheel has no single line 'Version: {pin.version}'")
    lines[lines.index(f"Version: {pin.version}")] = f"Version: {pin.fork_version}"
    wanted = tomllib.loads((fork / "REQUIREMENTS.toml").read_text(encoding="utf-8"))
    licence_files = [number for number, line in enumerate(lines) if line.startswith("License-File: ")]
    lines.insert(licence_files[-1] + 1 if licence_files else len(lines), f"License-File: {NOTICE_FILE}")
    required = [value for value in values(lines, "Requires-Dist") if "extra ==" not in value]
    first = next(number for number, line in enumerate(lines) if line.startswith("Requires-Dist:"))
    kept = [line for line in lines if line.removeprefix("Requires-Dist: ") not in required]
    new = [f"Requires-Dist: {requirement}" for requirement in base_set(required, wanted)]
    for extra, requirements in (wanted["extras"] | {FULL_SET: required}).items():
        new += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {conditional(r, extra)}" for r in requirements)]
    return "\n".join(kept[:first] + new + kept[first:]) + separator + body


def values(lines: list[str], field: str) -> list[str]:
    return [line.removeprefix(f"{field}: ") for line in lines if line.startswith(f"{field}: ")]


def base_set(required: list[str], wanted: dict) -> list[str]:
    by_name = {normal(distribution(requirement)): requirement for requirement in required}
    missing = [name for name in wanted["upstream"] if normal(name) not in by_name]
    if missing:
        raise Refused(
            f"REQUIREMENTS.toml: upstream {', '.join(missing)} no longer required: drop it, or move it to `own`"
        )
    return sorted([by_name[normal(name)] for name in wanted["upstream"]] + wanted["own"], key=str.lower)


def distribution(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def conditional(requirement: str, extra: str) -> str:
    """The requirement under the extra, its own marker kept."""
    specifier, _, marker = (part.strip() for part in requirement.partition(";"))
    condition = f'extra == "{extra}"'
    return f"{specifier}; ({marker}) and {condition}" if marker else f"{specifier}; {condition}"
