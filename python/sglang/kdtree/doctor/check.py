# SPDX-License-Identifier: Apache-2.0
"""A check is a function that yields one or more findings; a crash in one is itself a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

OK, WARN, FAIL = "OK", "WARN", "FAIL"


class Finding(msgspec.Struct, frozen=True):
    name: str
    status: str
    detail: str
    remedy: str = ""


def good(name: str, detail: str) -> list[Finding]:
    return [Finding(name, OK, detail)]


def warn(name: str, detail: str, remedy: str) -> list[Finding]:
    return [Finding(name, WARN, detail, remedy)]


def fail(name: str, detail: str, remedy: str) -> list[Finding]:
    return [Finding(name, FAIL, detail, remedy)]


def run_checks(
    checks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]],
) -> list[Finding]:
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:  # the doctor must not die of what it examines
            findings += fail(
                name,
                f"the check itself failed: {type(error).__name__}: {error}",
                "Report this with the output of: python -m sglang.kdtree doctor --json",
            )
    return findings
