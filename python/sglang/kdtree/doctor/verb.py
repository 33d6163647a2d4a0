# SPDX-License-Identifier: Apache-2.0
"""The doctor verb: the list of checks, and their table."""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from typing import Any

import msgspec

from sglang.kdtree.doctor import install, machine, selftest
from sglang.kdtree.doctor.check import FAIL, OK, WARN, run_checks
from sglang.kdtree.errors import EXIT_FINDING, EXIT_OK, KitError
from sglang.kdtree.result import Result

STYLE = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--port", type=int, default=30000, help="port the server will use"
    )


def checks(args: argparse.Namespace) -> list[tuple[str, Any]]:
    gpus = len(machine.capabilities())
    return [
        ("Python", install.python_version),
        ("fork", install.fork),
        ("backend", install.backend_registration),
        ("plugins", install.plugins),
        ("torch", install.torch_version),
        (
            "kernel package",
            functools.partial(install.kernel_package, machine.capabilities),
        ),
        ("tree core", selftest.tree_core),
        ("verify op", selftest.verify_op),
        ("prefix cache", selftest.prefix_cache_core),
        ("GPU", machine.driver),
        ("peer access", machine.peers),
        ("shared memory, GPU", machine.kernel_shared_memory),
        ("shared memory, host", functools.partial(machine.host_shared_memory, gpus)),
        ("allocator", functools.partial(machine.allocator, os.environ, gpus)),
        ("open files", machine.open_files),
        ("port", functools.partial(machine.port_free, args.port)),
        ("model cache", functools.partial(machine.model_cache, os.environ)),
    ]


def run(args: argparse.Namespace, console: Any) -> Result:
    if not 0 <= args.port < 65536:
        raise KitError(
            what="--port",
            expected="a number from 0 to 65535",
            got=str(args.port),
            remedy="30000 is the server's default.",
        )
    with console.status("examining"):
        findings = run_checks(checks(args))
    counts = Counter(finding.status for finding in findings)
    data = {
        "counts": {status: counts[status] for status in (OK, WARN, FAIL)},
        "checks": [msgspec.to_builtins(finding) for finding in findings],
    }
    return Result(
        verb="doctor", data=data, exit_code=EXIT_FINDING if counts[FAIL] else EXIT_OK
    )


def render(result: Result, console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "finding", box=None, pad_edge=False)
    for row in result.data["checks"]:
        detail = row["detail"] + (
            f"\n-> {row['remedy']}" if row["remedy"] and row["status"] != OK else ""
        )
        table.add_row(
            Text(row["status"], style=STYLE[row["status"]]),
            Text(row["name"]),
            Text(detail),
        )
    console.print(table)
    counts = result.data["counts"]
    console.print(f"{counts[OK]} OK, {counts[WARN]} WARN, {counts[FAIL]} FAIL")
