# SPDX-License-Identifier: Apache-2.0
"""Bring .venv up to date: the fork, the kernel package and what the tests use. Does nothing where nothing changed.

    environment.py [--set cpu|cuda] [--tests]

Each step has a stamp in .venv: the hash of what the step read. The fork is installed as the wheel that a user gets;
then our files in it are replaced by links to this checkout, so that saving a file is enough.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
LOG = VENV / "setup.log"
FORK, KERNELS, TESTS = ROOT / "python", ROOT / "sgl-kernel-sm120", ROOT / "test" / "requirements.txt"
# What decides which distributions are installed, and with which metadata.
REQUIREMENTS = [
    FORK / "UPSTREAM.toml",
    FORK / "REQUIREMENTS.toml",
    FORK / "constraints-cpu.txt",
    FORK / "pyproject.toml",
]
PROGRESS = ("Collecting ", "Downloading ", "Building wheel", "Installing collected", "Successfully installed")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--set", choices=("cpu", "cuda"), default=None, help="default: cuda where a GPU is found")
    arguments.add_argument("--tests", action="store_true", help="also what the tests and the linters use")
    args = arguments.parse_args()
    chosen = args.set or ("cuda" if has_gpu() else "cpu")
    if sys.version_info < (3, 11):  # noqa: UP036  the interpreter is whatever make was given
        raise SystemExit("setup: Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.11 ...")
    if not PYTHON.exists():
        say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    STAMPS.mkdir(exist_ok=True)
    install(chosen)
    if args.tests:
        step(
            "tests",
            digest(TESTS),
            "installing what the tests use",
            lambda: pip("install", "-r", TESTS, *constraints(chosen)),
        )
    return 0


def install(chosen: str) -> None:
    def whole() -> None:
        remove_fork()
        pip("install", KERNELS, f"{FORK}[{chosen},kit]", *constraints(chosen), chosen=chosen)
        stamp("kernels").write_text(digest(KERNELS))
        stamp("fork").unlink(missing_ok=True)

    def kernels() -> None:
        pip("install", "--no-deps", "--force-reinstall", KERNELS, chosen=chosen)

    step(
        "requirements", chosen + digest(*REQUIREMENTS), f"installing the fork ({chosen} set); takes some minutes", whole
    )
    step("kernels", digest(KERNELS), "building the kernel package", kernels)
    step("fork", digest(FORK / "overlay", FORK / "edits") + names(FORK / "sglang"), "linking the fork", link)


def step(name: str, value: str, message: str, action: Callable[[], None]) -> None:
    """Run the action unless its stamp says that it ran on the same inputs."""
    if stamp(name).exists() and stamp(name).read_text() == value:
        return
    say(message)
    started = time.monotonic()
    stamp(name).unlink(missing_ok=True)
    action()
    stamp(name).write_text(value)
    say(f"done in {time.monotonic() - started:.0f} s")


def stamp(name: str) -> Path:
    return STAMPS / name


def digest(*paths: Path) -> str:
    total = hashlib.sha256()
    for root in paths:
        for path in [root] if root.is_file() else sources(root):
            total.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def names(root: Path) -> str:
    """Linked files need no new link when only their text changes."""
    return hashlib.sha256("\n".join(str(path.relative_to(ROOT)) for path in sources(root)).encode()).hexdigest()


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and is_source(path))


def is_source(path: Path) -> bool:
    parts = set(path.relative_to(ROOT).parts)
    return (
        not parts & {"__pycache__", "build", "dist"}
        and not any(p.endswith(".egg-info") for p in parts)
        and path.suffix != ".so"
    )


def site_packages() -> Path:
    return VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def remove_fork() -> None:
    """pip would leave behind what was linked later than installed."""
    if (site_packages() / "sglang").exists():
        pip("uninstall", "--yes", "sglang")
        shutil.rmtree(site_packages() / "sglang", ignore_errors=True)


def link() -> None:
    command = [PYTHON, "-m", "overlay", "link", site_packages()]
    if subprocess.run(command, cwd=FORK).returncode:
        raise SystemExit("setup: the fork could not be linked")


def constraints(chosen: str) -> list[str | Path]:
    return ["-c", FORK / "constraints-cpu.txt"] if chosen == "cpu" else []


def pip(*arguments: str | Path, chosen: str = "cpu") -> None:
    """pip with its progress shown and its complaints about other people's configuration left in the log."""
    environment = os.environ | {"SGL_KERNEL_SM120_CUDA": "1" if chosen == "cuda" else "0"}
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    if arguments[0] == "install":
        command.append("--no-compile")  # Python compiles the part that is imported, pip would compile everything
    with LOG.open("a") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            log.write(line)
            if line.strip().startswith(PROGRESS):
                print(f"    {line.strip()[:110]}", flush=True)
    if process.wait():
        tail = LOG.read_text().splitlines()[-25:]
        raise SystemExit("\n".join(["setup: pip failed; the end of " + str(LOG) + ":", *tail]))


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
