# SPDX-License-Identifier: Apache-2.0
"""Run the image's commands without an engine: docker/check.py [--python python3.12] [--full] [--keep FOLDER].

Every command of every RUN is run by the Dockerfile's shell, on a copy of what COPY would take and with /opt/kdtree
moved to a scratch folder. What needs root or Ubuntu is left out, and said; apt's package names are looked up where it
exists. The big installation is resolved, not installed, unless --full is given; then the entry script's doctor runs
as well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "/opt/kdtree"
SOURCES = ("python", "sgl-kernel-sm120")
LEFT_OUT = ("apt-get update", "rm -rf /var/lib/apt/lists/*", "useradd ")
APT_INSTALL = "apt-get install -y --no-install-recommends "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="Ubuntu 24.04 has 3.12 (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help="install it all (11 GB) and build the kernels")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave it there")
    args = parser.parse_args()
    scratch = (args.keep or Path(tempfile.mkdtemp(prefix="kdtree-image-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "bin").mkdir(exist_ok=True)
    python3 = scratch / "bin" / "python3"
    python3.unlink(missing_ok=True)
    python3.symlink_to(shutil.which(args.python) or sys.exit(f"check: no {args.python} here"))
    copy_sources(scratch / "src")
    todo = steps() + ([doctor(scratch)] if args.full else [])
    try:
        failed = [step for step in todo if not run(step, scratch, full=args.full)]
    finally:
        if not args.keep:
            shutil.rmtree(scratch)
    print(f"check: {len(failed)} of {len(todo)} commands failed")
    return 1 if failed else 0


def instructions(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, its text) of a Dockerfile, lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def steps() -> list[str]:
    """The commands of every RUN, one by one: they are joined by && alone."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    runs = [rest for verb, rest in instructions(text) if verb == "RUN"]
    return [re.sub(r"\s+", " ", part).strip() for rest in runs for part in rest.split("&&")]


def copy_sources(target: Path) -> None:
    """As COPY does, without what Dockerfile.dockerignore keeps out of the context."""
    rules = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    ignored = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    shutil.rmtree(target, ignore_errors=True)
    for name in SOURCES:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*ignored))


def doctor(scratch: Path) -> str:
    return f"KDTREE_PYTHON={scratch / 'kdtree' / 'bin' / 'python'} {ROOT / 'docker' / 'entry.sh'} doctor"


def adapted(step: str, scratch: Path, *, full: bool) -> str | None:
    """The step as it is run here; None if it needs the image's own system."""
    if step.startswith(LEFT_OUT):
        return None
    if step.startswith(APT_INSTALL):
        names = step.removeprefix(APT_INSTALL)
        return f"apt-get install --simulate {names}" if shutil.which("apt-get") else None
    if "./python" in step and not full:
        step = step.replace("pip install", "pip install --dry-run --ignore-installed --quiet")
    return step.replace(PREFIX, str(scratch / "kdtree"))


def run(step: str, scratch: Path, *, full: bool) -> bool:
    command = adapted(step, scratch, full=full)
    if command is None:
        print(f"left out  {step}", flush=True)
        return True
    path = f"{scratch / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", command],
        cwd=scratch / "src",
        env=os.environ | {"PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{'ok' if done.returncode == 0 else 'FAILED':<8}  {command}", flush=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
