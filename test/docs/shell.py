# SPDX-License-Identifier: Apache-2.0
"""A shell for the lines of documents: bash, in a copy of the tracked files, with a `python` that has imported already.

    shell = Shell(folder)
    shell.run("cd python && python -m overlay check")            # -> Result
    shell.run("python benchmark/backend_e2e.py", parse_only=True)  # ends where the program's own parser has accepted

`python`, `python3`, `python3.N`, `pip` and .venv/bin/python are a small program that hands its arguments, its folder,
its environment and its three files to a process that has imported torch and sglang; that one forks and runs them. So
each of fifty lines is spared the seconds that these imports take. With parse_only a program runs as far as its
ArgumentParser: what it imports before that is there, and its parser takes the arguments.

Run as a script this file is that process.
"""

import argparse
import array
import contextlib
import gc
import json
import optparse
import os
import runpy
import selectors
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("python", "python3", "python3.11", "python3.12", "python3.13")
PARSE_ONLY = "DOCUMENT_PARSE_ONLY"
# Imports nothing but what it needs: it starts in 20 ms.
SHIM = """#!{python} -IS
import array, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
arguments = {before!r} + sys.argv[1:]
message = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
server.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(message)
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.makefile().read() or 70))
"""
# The environment is there. A rule is printed where programs are only parsed.
MAKE = """#!/bin/sh
exec {make} -o environment -o test-environment ${{{parse_only}:+-n}} "$@"
"""
# What is not here, or must not be done: it says so, and succeeds.
STAND_IN = '#!/bin/sh\necho "stand-in: ${{0##*/}} $*"\n'


class Result(NamedTuple):
    line: str
    returncode: int
    output: str


class Shell:
    """bash in `folder`, which becomes a copy of the tracked files as they are now."""

    def __init__(self, folder: Path, *, stand_ins: tuple[str, ...] = ()):
        self.folder, self.bin = folder / "sglang-kdtree", folder / "bin"
        copy_tracked_files(self.folder)
        self.bin.mkdir()
        path = str(folder / "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.listener.fileno())],
            pass_fds=[self.listener.fileno()],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        modules = {name: ["-m", name] for name in ("pip", "pytest")}
        for name, before in {**dict.fromkeys(PROGRAMS, []), **modules}.items():
            write_program(self.bin / name, SHIM.format(python=sys.executable, socket=path, before=before))
        write_program(self.bin / "make", MAKE.format(make=shutil.which("make"), parse_only=PARSE_ONLY))
        for name in stand_ins:
            write_program(self.bin / name, STAND_IN.format())
        (self.folder / ".venv" / "bin").mkdir(parents=True)
        (self.folder / ".venv" / "bin" / "python").symlink_to(self.bin / "python")

    def run(self, line: str, *, cwd: str = ".", parse_only: bool = False, **environment: str) -> Result:
        from docs.documents import typed  # not there for this file as a script

        variables = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "200"} | environment
        variables |= {PARSE_ONLY: "1"} if parse_only else {}
        done = subprocess.run(**typed(line, self.folder / cwd, variables))
        return Result(line, done.returncode, done.stdout)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.listener.close()


def copy_tracked_files(folder: Path) -> None:
    from docs.documents import tracked_files

    for path in tracked_files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


# In the process that forks


def main(listener: socket.socket) -> None:
    for module in ("torch", "triton", "sglang.kdtree.cli", "sglang.srt.server_args", "sgl_kernel_sm120"):
        with contextlib.suppress(ImportError):
            __import__(module)
    gc.collect()
    gc.freeze()
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is listener:
                pid, connection = start(listener)
                waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), connection:  # who asked may have been ended
                    connection.sendall(str(code if code >= 0 else 128 - code).encode())
                waiting.unregister(key.fileobj)
                os.close(key.fileobj)


def start(listener: socket.socket) -> tuple[int, socket.socket]:
    """A child that becomes what was asked for, and where its exit code is waited for."""
    connection, _ = listener.accept()
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    files = array.array("i", ancillary[0][2])
    request = json.loads(connection.makefile().read())
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 256)  # also what keeps other programs' pipes open
        become(*request)
    for file in files:
        os.close(file)
    return pid, connection


def become(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    code = 0
    try:
        os.chdir(cwd)
        parse_only = environment.pop(PARSE_ONLY, None)
        if not parse_only and has_cuda():  # asked for once, CUDA works in no child
            os.execve(sys.executable, [sys.executable, *arguments], environment)
        os.environ.clear()
        os.environ.update(environment)
        if parse_only:
            os.environ[PARSE_ONLY] = "1"
            arguments = only_parsed(arguments)
        path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[0:1] = path
        run(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def has_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def run(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")


def only_parsed(arguments: list[str]) -> list[str]:
    """What to run instead, so that the program's own parser looks at its arguments and nothing else happens."""
    if arguments[:2] == ["-m", "pytest"]:
        missing = [word for word in arguments if "/" in word and not Path(word.partition("::")[0]).exists()]
        if missing:
            raise SystemExit(f"no such tests: {missing}")
        return [*arguments, "--markers"]
    if "build_ext" in arguments:
        return [*arguments, "--help"]
    stop_behind(argparse.ArgumentParser, "parse_args", lambda parser, parsed: True)
    # The kit says itself what it does not know.
    stop_behind(
        argparse.ArgumentParser,
        "parse_known_args",
        lambda parser, parsed: parser.prog == "python -m sglang.kdtree" and not parsed[1],
    )
    # pip reads its general options first, by a parser of its own.
    stop_behind(optparse.OptionParser, "parse_args", lambda parser, parsed: not parser.get_prog_name().endswith("pip"))
    return arguments


def stop_behind(kind: type, method: str, is_last: Callable[[Any, Any], bool]) -> None:
    parse = getattr(kind, method)

    def parse_and_stop(parser, *arguments, **options):
        parsed = parse(parser, *arguments, **options)
        if is_last(parser, parsed):
            print("accepted by its parser", flush=True)
            os._exit(0)
        return parsed

    setattr(kind, method, parse_and_stop)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
