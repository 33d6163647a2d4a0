# SPDX-License-Identifier: Apache-2.0
"""Runs one line of a document as a reader does, and records that it ran: for the lines that no test runs.

    python test/docs/record.py --at CLONE [--cwd FOLDER] [--venv FOLDER] [--set NAME=VALUE] [--put OLD=>NEW]
                               [--until TEXT] LINE

--at is a fresh clone without changes; --cwd the folder in it where the line is typed; --venv an environment that is
active. --set gives a variable that makes the run shorter, --put what stands for a reader's own path; both are recorded.
--until is for servers: interrupted once they have printed that. An entry of the same line is replaced. A line that
fails is not recorded.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.documents import ROOT, typed

RECORD = ROOT / "docs" / "commands.json"
WHAT = "lines of the documents that no test runs, each run once as it stands by test/docs/record.py"


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def pair(text: str, separator: str) -> tuple[str, str]:
    name, found, value = text.partition(separator)
    if not found:
        raise argparse.ArgumentTypeError(f"expected OLD{separator}NEW, got {text!r}")
    return name, value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("line")
    parser.add_argument("--at", type=Path, required=True)
    parser.add_argument("--cwd", default=".")
    parser.add_argument("--venv", type=Path)
    parser.add_argument("--set", action="append", default=[], type=lambda text: pair(text, "="))
    parser.add_argument("--put", action="append", default=[], type=lambda text: pair(text, "=>"))
    parser.add_argument("--until", default="")
    parser.add_argument("--record", type=Path, default=RECORD)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict:
    """-> the entry; CalledProcessError if the line fails, or ends before it has said what was waited for"""
    line = options.line
    for old, new in options.put:
        line = line.replace(old, new)
    environment = os.environ | dict(options.set)
    if options.venv:
        environment["PATH"] = f"{options.venv.resolve() / 'bin'}:{environment['PATH']}"
    python = subprocess.run(
        ["python", "-c", "import platform; print(platform.python_version())"],
        env=environment,
        capture_output=True,
        text=True,
    ).stdout.strip()
    begin = time.monotonic()
    process = subprocess.Popen(**typed(line, options.at / options.cwd, environment), start_new_session=True)
    seconds = seen = None
    for said in process.stdout:
        print(said, end="", flush=True)
        if options.until and not seen and options.until in said:
            seen, seconds = True, time.monotonic() - begin
            os.killpg(process.pid, signal.SIGINT)
    code = process.wait()
    if not seen and (code or options.until):
        raise subprocess.CalledProcessError(code, options.line)
    entry = {"command": options.line, "in": options.cwd, "commit": git(options.at, "rev-parse", "--short=7", "HEAD")}
    entry |= {"python": python, "seconds": round(seconds or time.monotonic() - begin)}
    entry |= {"until": options.until} if seen else {"exit": code}
    entry |= {"with": dict(options.set)} if options.set else {}
    entry |= {"put": dict(options.put)} if options.put else {}
    return entry


def write(path: Path, entry: dict, *, what: str = WHAT) -> None:
    """One entry a line, in the order of their commands. The same command in the same place is replaced."""

    def key(step: dict) -> tuple[str, str]:
        return step.get("where", ""), step["command"]

    record = json.loads(path.read_text()) if path.exists() else {"what": what, "steps": []}
    record["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    record["machine"] = f"{os.cpu_count()} {platform.machine()} cores, busy with other work, no GPU"
    steps = [step for step in record.pop("steps") if key(step) != key(entry)]
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in record.items())
    rows = ",\n".join(f"  {json.dumps(step)}" for step in sorted([*steps, entry], key=key))
    path.write_text(f'{{\n{head} "steps": [\n{rows}\n ]\n}}\n')


def main() -> int:
    # What a shell starts in the background ignores SIGINT, and so would the server that is ended with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = parse()
    if changed := git(options.at, "status", "--porcelain", "--untracked-files=no"):
        print(f"record.py: {options.at} has changes:\n{changed}", file=sys.stderr)
        return 2
    write(options.record, run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
