# SPDX-License-Identifier: Apache-2.0
"""Bring .venv up to date: the fork, the kernel package and what the tests use. Does nothing where nothing changed.

    environment.py [--set cpu|cuda] [--tests]

Each step has a stamp in .venv/stamps: the hash of what the step read. Two stamps tell when .venv has to be made anew:
`environment` names the Python and the place that it was made for, `installing` is there from the begin of an
installation to its end. The fork is installed as the wheel that a user gets; then our files in it are replaced by links
to this checkout, so that saving a file is enough.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import installer
import preflight

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


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--set", choices=("cpu", "cuda"), default=None, help="default: cuda where a GPU is found")
    arguments.add_argument("--tests", action="store_true", help="also what the tests and the linters use")
    args = arguments.parse_args()
    chosen = args.set or ("cuda" if has_gpu() else "cpu")
    signal.signal(signal.SIGTERM, stop_once)
    try:
        with only_one() as lock:
            Setup(chosen, args.tests, lock).bring_up_to_date()
    except KeyboardInterrupt:
        raise SystemExit("setup: stopped; make again continues") from None
    return 0


def stop_once(number: int, _) -> None:
    """make hands on what the whole group may have got already; the second one must not disturb the clean-up."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


class Setup:
    def __init__(self, chosen: str, tests: bool, lock: int):
        self.chosen, self.tests, self.lock = chosen, tests, lock

    def bring_up_to_date(self) -> None:
        reason = why_anew()
        complaints = preflight.complaints(self.chosen, tests=self.tests, new=bool(reason), place=VENV)
        if complaints:
            raise SystemExit("\n".join(["setup: not possible here, nothing was changed:", *bulleted(complaints)]))
        if reason:
            self.make_anew(reason)
        self.step(
            "requirements",
            self.chosen + digest(*REQUIREMENTS),
            f"installing the fork ({self.chosen} set); takes some minutes",
            self.install,
        )
        self.step("kernels", digest(KERNELS), "building the kernel package", self.install_kernels)
        self.step("fork", digest(FORK / "overlay", FORK / "edits") + names(FORK / "sglang"), "linking the fork", link)
        if self.tests:
            self.step("tests", digest(TESTS), "installing what the tests use", self.install_tests)

    def make_anew(self, reason: str) -> None:
        say(f"making .venv with Python {platform.python_version()}: {reason}")
        empty()
        made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
        if made.returncode:
            said = (made.stdout + made.stderr).strip().splitlines()[-installer.TAIL_LINES :]
            raise SystemExit("\n".join(["setup: python -m venv failed:", *bulleted(said)]))
        stamp("environment").write_text(identity())

    def step(self, name: str, value: str, message: str, action: Callable[[], None]) -> None:
        """Run the action unless its stamp says that it ran on the same inputs."""
        if stamp(name).exists() and stamp(name).read_text() == value:
            return
        say(message)
        started = time.monotonic()
        stamp(name).unlink(missing_ok=True)
        action()
        stamp(name).write_text(value)
        say(f"done in {time.monotonic() - started:.0f} s")

    def install(self) -> None:
        """Everything in one call, so that pip resolves once."""
        self.remove_fork()
        tests = ["-r", TESTS] if self.tests else []
        self.pip("install", KERNELS, f"{FORK}[{self.chosen},kit]", *tests, *constraints(self.chosen))
        stamp("kernels").write_text(digest(KERNELS))
        if self.tests:
            stamp("tests").write_text(digest(TESTS))
        stamp("fork").unlink(missing_ok=True)

    def install_kernels(self) -> None:
        self.pip("install", "--no-deps", "--force-reinstall", KERNELS)

    def install_tests(self) -> None:
        self.pip("install", "-r", TESTS, *constraints(self.chosen))

    def remove_fork(self) -> None:
        """pip would leave behind what was linked later than installed."""
        if (site_packages() / "sglang").exists():
            self.pip("uninstall", "--yes", "sglang")
            shutil.rmtree(site_packages() / "sglang", ignore_errors=True)

    def pip(self, *arguments: str | Path) -> None:
        command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
        if arguments[0] == "install":
            command.append("--no-compile")  # Python compiles the part that is imported, pip would compile everything
        stamp("installing").touch()
        try:
            note = installer.CUDA_NOTE if self.chosen == "cpu" else ""
            installer.run(command, log=LOG, environment=installer.settings(self.chosen), lock=self.lock, note=note)
        except installer.Failed as failed:
            if not failed.began:
                stamp("installing").unlink()
            raise SystemExit(str(failed)) from None
        stamp("installing").unlink()


def why_anew() -> str | None:
    """Why the environment has to be made from nothing, if it has to."""
    if not os.path.lexists(VENV):
        return "there is none yet"
    if not STAMPS.is_dir():
        raise SystemExit(
            f"setup: {VENV} was not made by make, so it is left alone: move it away, or remove it, then make again"
        )
    if not stamp("environment").exists():
        return "its last set-up did not get far"
    then, now = stamp("environment").read_text().splitlines(), identity().splitlines()
    if then != now:
        return next(f"it was made for {old}, this is {new}" for old, new in zip(then, now) if old != new)
    if stamp("installing").exists():
        return "an installation into it was interrupted"
    if not PYTHON.exists():
        return "its Python is gone"
    return None


def identity() -> str:
    """What an environment cannot change: its links are absolute, and its packages are of one Python."""
    return f"Python {sys.version_info.major}.{sys.version_info.minor}\n{platform.machine()}\n{VENV}\n"


def empty() -> None:
    """Remove the environment but the folder of stamps, by which an interrupted removal is known as ours."""
    STAMPS.mkdir(parents=True, exist_ok=True)
    for path in STAMPS.iterdir():
        path.unlink()
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path != STAMPS:
                shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def only_one() -> Iterator[int]:
    """Two set-ups of one checkout would write the same files: the second waits for the first.

    Not on a file system that has no locks, as some network ones.
    """
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield handle
    finally:
        os.close(handle)


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
    """Files below root that are not made by a build; folders of those are not entered."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in ("__pycache__", "build", "dist")]
        inner[:] = [name for name in inner if not name.endswith(".egg-info")]
        found += [Path(folder, name) for name in files if not name.endswith(".so")]
    return sorted(found)


def site_packages() -> Path:
    return VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def link() -> None:
    command = [PYTHON, "-m", "overlay", "link", site_packages()]
    if subprocess.run(command, cwd=FORK).returncode:
        raise SystemExit("setup: the fork could not be linked")


def constraints(chosen: str) -> list[str | Path]:
    return ["-c", FORK / "constraints-cpu.txt"] if chosen == "cpu" else []


def has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def bulleted(lines: list[str]) -> list[str]:
    return [f"  - {line}" for line in lines]


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
