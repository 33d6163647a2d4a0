# SPDX-License-Identifier: Apache-2.0
"""Argument parsing and dispatch. A verb is a module with add_arguments, run and render."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang.kdtree.arguments import Parser
from sglang.kdtree.errors import EXIT_UNUSABLE, KitError
from sglang.kdtree.optional import require
from sglang.kdtree.result import Result, dump_json, write_json

# verb -> one line for --help
VERBS = {
    ("doctor",): "check this machine and this installation",
    ("plan",): "memory arithmetic and launch command for a model and a machine",
    ("bench", "longctx"): "decode speed against context length, streaming",
    ("bench", "compare"): "two longctx results side by side",
    ("bench", "throughput"): "hand over to SGLang's own serving benchmark",
    ("probe", "commit-length"): "accept length against context, with a verdict",
    ("probe", "gpu"): "what limits the GPU while it decodes",
    ("probe", "moe"): "expert imbalance between ranks, and what would mend it",
    ("probe", "verify"): "compare the tree-verify kernel with its reference",
    ("schema",): "print the JSON schema of a verb's --json output",
}
ALONE = {"doctor": "doctor.verb", "plan": "plan.verb", "schema": "schemas"}
GROUP_HELP = {
    "bench": "measure a running server",
    "probe": "look into a running server or its recordings",
}


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m sglang.kdtree",
        description="The operator's kit of the kdtree fork of SGLang.",
        epilog="Exit codes: 0 all well, 1 a finding, 2 bad input or unreachable server.",
    )
    names = "|".join(dict.fromkeys(path[0] for path in VERBS))
    top = parser.add_subparsers(dest="verb", metavar=names, required=True)
    groups = {}
    for name, help_text in GROUP_HELP.items():
        group = top.add_parser(name, help=help_text, description=help_text)
        names = "|".join(path[1] for path in VERBS if path[0] == name)
        groups[name] = group.add_subparsers(dest="what", metavar=names, required=True)
    for path, help_text in VERBS.items():
        parent = groups[path[0]] if len(path) == 2 else top
        verb_parser = parent.add_parser(path[-1], help=help_text, description=help_text)
        name = ALONE.get(path[0], ".".join(path).replace("-", "_"))
        module = importlib.import_module(f"sglang.kdtree.{name}")
        module.add_arguments(verb_parser)
        verb_parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON document instead of tables",
        )
        verb_parser.add_argument(
            "--output",
            type=Path,
            metavar="FILE",
            help="also write the JSON document to FILE",
        )
        verb_parser.set_defaults(module=module, verb_parser=verb_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in argv[: argv.index("--") if "--" in argv else None]
    try:
        args, unknown = build_parser().parse_known_args(argv)
        if unknown:
            args.verb_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        rich_console = require("rich.console", needed_for="tables")
    except KitError as error:
        return report_error(error, as_json=as_json)
    progress_console = rich_console.Console(stderr=True)
    try:
        for argument in ("output", "plot", "csv"):
            check_target(argument, getattr(args, argument, None))
        result: Result = args.module.run(args, progress_console)
        if args.output:
            write_json(args.output, result.document())
    except KitError as error:
        return report_error(error, as_json=as_json)
    except KeyboardInterrupt:
        progress_console.print("Interrupted.", style="yellow")
        return 130
    try:
        if args.json:
            print(dump_json(result.document()))
        else:
            args.module.render(result, rich_console.Console())
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, a pager perhaps, has seen enough
        sys.stdout = open(os.devnull, "w")
    except OSError as error:
        print(f"error: standard output: {error}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")
        return EXIT_UNUSABLE
    return result.exit_code


def check_target(argument: str, path: Path | None) -> None:
    """Before minutes of measuring: can the file be written at their end?"""
    if path is None:
        return
    wrong = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        wrong = str(error)
    if path.is_dir():
        wrong = "a folder"
    elif not wrong and argument == "plot" and path.suffix != ".png":
        wrong = f"a name that ends in {path.suffix!r}"
    if wrong:
        raise KitError(
            what=f"--{argument} {path}",
            expected="a file that can be written"
            + (", ending in .png" if argument == "plot" else ""),
            got=wrong,
            remedy="Name another file.",
        )


def report_error(error: KitError, *, as_json: bool) -> int:
    if as_json:
        document = {"schema": "sglang.kdtree/error/1", "exit_code": EXIT_UNUSABLE}
        print(json.dumps(document | {"error": error.to_dict()}))
    else:
        print(f"error: {error.what}", file=sys.stderr)
        for name in ("expected", "got", "remedy"):
            print(f"  {name + ':':<10}{getattr(error, name)}", file=sys.stderr)
    sys.stderr.flush()
    return EXIT_UNUSABLE
