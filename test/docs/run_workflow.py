# SPDX-License-Identifier: Apache-2.0
"""Runs the `run:` steps of a workflow's job as GitHub does, in a clone, and records that they ran.

    python test/docs/run_workflow.py NAME JOB --at CLONE [--matrix NAME=VALUE] [--set NAME=VALUE]

What a workflow leaves to actions is done before: the clone is its checkout, and where a job wants artifacts they lie
there. Their Python is the one on PATH, or that of the matrix. --set gives a variable that makes a step shorter, and is
recorded. A step that fails ends the job and is not recorded.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs.record import ROOT, git, pair, write

RECORD = ROOT / "docs" / "workflows.json"
WHAT = "steps of the workflows, run in a clean clone by test/docs/run_workflow.py"


def job_of(workflow: str, job: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"][job]


def filled(text: str, matrix: dict[str, str]) -> str:
    """Values of the matrix; a repository's variables are empty where it has none."""
    text = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: matrix[match[1]], text)
    return re.sub(r"\$\{\{ vars\.\w+ \}\}", "", text)


def environment_of(step: dict, matrix: dict[str, str], given: dict[str, str], summary: Path) -> dict[str, str]:
    environment = os.environ | {"CI": "true", "GITHUB_STEP_SUMMARY": str(summary)} | given
    # An empty variable is none, or pip would ask an index without a name.
    environment |= {name: value for name, text in step.get("env", {}).items() if (value := filled(text, matrix))}
    if "python" in matrix:
        where = "import sys; print(sys.base_prefix)"
        prefix = subprocess.run([f"python{matrix['python']}", "-c", where], check=True, capture_output=True, text=True)
        environment["PATH"] = f"{prefix.stdout.strip()}/bin:{environment['PATH']}"
    return environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow")
    parser.add_argument("job")
    parser.add_argument("--at", type=Path, required=True)
    parser.add_argument("--matrix", action="append", default=[], type=lambda text: pair(text, "="))
    parser.add_argument("--set", action="append", default=[], type=lambda text: pair(text, "="))
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    matrix, given = dict(options.matrix), dict(options.set)
    for step in job_of(options.workflow, options.job)["steps"]:
        if "run" not in step:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            script, summary = Path(scratch) / "script.sh", Path(scratch) / "summary.md"
            script.write_text(step["run"])
            begin = time.monotonic()
            code = subprocess.run(
                ["bash", "-e", script],
                cwd=options.at / step.get("working-directory", "."),
                env=environment_of(step, matrix, given, summary),
                stdin=subprocess.DEVNULL,
            ).returncode
            said = len(summary.read_text().splitlines()) if summary.exists() else 0
        if code:
            print(f"run_workflow.py: exit code {code} of {step['run']!r}", file=sys.stderr)
            return 1
        where = " ".join([options.workflow, options.job, *(f"{name}={value}" for name, value in matrix.items())])
        entry = {"command": step["run"], "where": where}
        entry |= {
            "commit": git(options.at, "rev-parse", "--short=7", "HEAD"),
            "seconds": round(time.monotonic() - begin),
        }
        entry |= {"exit": code} | ({"with": given} if given else {}) | ({"summary_lines": said} if said else {})
        write(options.record, entry, what=WHAT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
