# SPDX-License-Identifier: Apache-2.0
"""Throughput is measured by SGLang's own serving benchmark; this verb only hands over."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from typing import Any

from sglang.kdtree.errors import EXIT_OK, EXIT_UNUSABLE, KitError
from sglang.kdtree.result import Result

UPSTREAM_MODULE = "sglang.benchmark.serving"
STDERR = 2  # file descriptor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="-- ARGUMENTS",
        help=f"arguments of {UPSTREAM_MODULE}",
    )


def command_line(arguments: list[str]) -> list[str]:
    rest = arguments[1:] if arguments[:1] == ["--"] else arguments
    return [sys.executable, "-m", UPSTREAM_MODULE, *rest]


def check_needs(arguments: list[str]) -> None:
    """Upstream's benchmark imports datasets at its top, whichever data set it reads, and without
    arguments it looks for a server on port 30000 and fetches a data set.
    """
    if not arguments:
        raise KitError(
            what="-- ARGUMENTS",
            expected=f"arguments of {UPSTREAM_MODULE}",
            got="none",
            remedy="For example: -- --backend sglang --dataset-name random-ids --num-prompts 200; -- --help lists them.",
        )
    if importlib.util.find_spec("datasets") is None:
        raise KitError(
            what="Python module datasets",
            expected=f"an importable datasets (needed by {UPSTREAM_MODULE})",
            got="none",
            remedy="Run: python -m pip install datasets",
        )


def run(args: argparse.Namespace, console: Any) -> Result:
    command = command_line(args.arguments)
    check_needs(command[3:])
    console.print(" ".join(command), style="dim", markup=False)
    # Upstream's report goes to stderr with --json, so that stdout stays one document.
    stdout = STDERR if args.json else None
    status = subprocess.run(command, check=False, stdout=stdout).returncode
    data = {"command": command, "returncode": status}
    return Result(
        verb="bench-throughput",
        data=data,
        exit_code=EXIT_OK if status == 0 else EXIT_UNUSABLE,
    )


def render(result: Result, console: Any) -> None:
    if result.data["returncode"]:
        console.print(
            f"{UPSTREAM_MODULE} ended with status {result.data['returncode']}",
            style="red",
        )
