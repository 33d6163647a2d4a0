# SPDX-License-Identifier: Apache-2.0
"""A release: the fork's wheel for each of upstream's tags, the kernel package's, and the sums of their bytes.

The same commit gives the same bytes: the fork's wheels hold nothing of the machine, and the kernel package is built
from a copy of the tracked files, with the commit's time in SOURCE_DATE_EPOCH. `check` installs a release into an
environment of its own, compares a server's answers with recorded ones, and writes that environment's bill of materials.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from . import pack
from .errors import Refused
from .plan import make_plan
from .upstream import Pin, pinned_wheel

SUMS = "SHA256SUMS"
KERNELS = "sgl-kernel-sm120"
CHANGELOG = "CHANGELOG.md"
BUILD_TOOL = "setuptools==84.2.1"  # it writes its version into the kernel package's wheels
METADATA_TOOL = "twine==7.0.0"
SBOM_TOOL = "cyclonedx-bom==7.5.0"
READY_WITHIN_S = 900  # a fresh environment compiles what it imports
NUM_TOKENS = 32  # compared with the recorded answers
PROMPTS = 3


def build(fork: Path, pin: Pin, out: Path, tags: Iterable[str], *, cuda: bool, dirty: bool = False) -> list[Path]:
    """-> the wheels and the file of their sums. Refuses a tree that is not the commit, or a version without a text."""
    root = fork.parent
    if not dirty:
        refuse_changes(root)
        check_tag(root, pin)
    check_changelog(root, pin)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for tag in tags:
        wheel = pinned_wheel(pin, tag)
        written.append(pack.build(fork, pin, wheel, make_plan(fork, wheel), out))
    for with_cuda in (False, True) if cuda else (False,):
        written.append(build_kernels(root, out, cuda=with_cuda))
    sums = out / SUMS
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in sorted(written)), encoding="utf-8")
    return [*written, sums]


def refuse_changes(root: Path) -> None:
    changed = git(root, "status", "--porcelain", "--", "python", KERNELS).splitlines()
    if changed:
        raise Refused("a release is of a commit, and these files differ from it:", *changed)


def check_tag(root: Path, pin: Pin) -> None:
    """A commit that is tagged is tagged with this version."""
    tags = [tag for tag in git(root, "tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    if tags and f"v{pin.fork_version}" not in tags:
        raise Refused(f"the commit is tagged {' '.join(tags)}, python/UPSTREAM.toml says {pin.fork_version}")


def check_changelog(root: Path, pin: Pin) -> None:
    """The newest section describes this version of the fork, and names that of the kernel package."""
    text = (root / CHANGELOG).read_text(encoding="utf-8")
    section = re.search(r"^## (\S+)(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None or section[1] != pin.fork_version:
        found = section[1] if section else "none"
        raise Refused(f"{CHANGELOG}: its newest section is {found}, the version is {pin.fork_version}: describe it")
    version = kernel_version(root)
    if f"`{KERNELS}` {version}" not in section[2]:
        raise Refused(f"{CHANGELOG}: the section of {pin.fork_version} does not name `{KERNELS}` {version}")


def kernel_version(root: Path) -> str:
    text = (root / KERNELS / "python" / "sgl_kernel_sm120" / "_version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def build_kernels(root: Path, out: Path, *, cuda: bool) -> Path:
    """The kernel package's wheel, from a copy of its tracked files: always the same times, modes and neighbours."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git(root, "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as scratch:
        source, built, constraint = (Path(scratch) / name for name in (KERNELS, "built", "constraint.txt"))
        constraint.write_text(BUILD_TOOL + "\n", encoding="utf-8")
        environment = os.environ | {
            "SOURCE_DATE_EPOCH": epoch,
            "SGL_KERNEL_SM120_CUDA": str(int(cuda)),
            # What a build environment gets: pip took the first until it had the second.
            "PIP_CONSTRAINT": str(constraint),
            "PIP_BUILD_CONSTRAINT": str(constraint),
        }
        for name in git(root, "ls-files", KERNELS).splitlines():
            target = Path(scratch) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target)
            target.chmod(0o644)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--disable-pip-version-check"]
        run([*command, "--wheel-dir", str(built), str(source)], env=environment)
        (wheel,) = built.glob("*.whl")
        target = out / wheel.name
        shutil.copyfile(wheel, target)
    return target


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_sums(folder: Path) -> list[Path]:
    """-> the wheels of a release whose bytes are those that were summed."""
    wheels, wrong = [], []
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.exists():
            wrong.append(f"{name} is missing")
        elif digest(path) != expected:
            wrong.append(f"{name} is not what {SUMS} says")
        wheels.append(path)
    extra = {path.name for path in folder.glob("*.whl")} - {path.name for path in wheels}
    wrong += [f"{name} is not in {SUMS}" for name in sorted(extra)]
    if wrong:
        raise Refused(*wrong)
    return wheels


def check(fork: Path, pin: Pin, folder: Path, environment: Path, say: Callable[[str], None]) -> Path:
    """Install the release as a user of this Python does, serve the small model, compare its answers.

    -> the bill of materials
    """
    root, wheels = fork.parent, check_sums(folder)
    environment = environment.absolute()  # the server is started in another folder
    python_tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    ours = one_of(wheels, f"{pin.name}-*-{python_tag}-*_{os.uname().machine}.whl")
    kernels = one_of(wheels, f"{KERNELS.replace('-', '_')}-*-any.whl")
    if environment.exists():
        raise Refused(f"{environment} exists: the check wants an environment that nothing was installed into")
    say("reading the wheels' metadata as the package index does")
    check_metadata(wheels)
    say(f"installing into {environment}")
    run([sys.executable, "-m", "venv", str(environment)])
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    run([*pip, str(kernels), f"{ours}[cpu,kit]", "-c", str(fork / "constraints-cpu.txt")])
    run([str(python), "-m", "pip", "--disable-pip-version-check", "check"])
    say("serving the small model")
    with serving(python, root) as port:
        compare_answers(port, root)
    say("writing the bill of materials")
    return write_sbom(python, folder / f"{pin.name}-{pin.fork_version}-cpu-{python_tag}.cdx.json", environment)


def one_of(wheels: list[Path], pattern: str) -> Path:
    found = [wheel for wheel in wheels if fnmatch(wheel.name, pattern)]
    if len(found) != 1:
        raise Refused(f"the release has {len(found)} wheels {pattern}: {', '.join(wheel.name for wheel in wheels)}")
    return found[0]


class serving:
    """A server of the small model with its drafter, from the environment's own packages; -> its port."""

    def __init__(self, python: Path, root: Path):
        self.python, self.root = python, root

    def __enter__(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(self.python), str(self.root / "scripts/serve.py"), "--device", "cpu", "--port", str(port)]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, env=clean, cwd="/", stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + READY_WITHIN_S
            while not answers(port):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.log.seek(0)
                    raise Refused("the server of the release does not answer:", *self.log.read().splitlines()[-20:])
                time.sleep(1)
        except BaseException:
            self.__exit__()
            raise
        return port

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self.log.close()


direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(port: int) -> bool:
    try:
        with direct.open(f"http://127.0.0.1:{port}/health", timeout=30) as reply:
            return reply.status == 200
    except OSError:
        return False


def compare_answers(port: int, root: Path) -> None:
    """Greedy tokens of the server against those that the plain model gave when it was recorded."""
    entries = json.loads((root / "test/models/expected_steps.json").read_text())["entries"][:PROMPTS]
    wrong = []
    for number, entry in enumerate(entries):
        sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"text": entry["prompt"], "sampling_params": sampling}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
        )
        with direct.open(request, timeout=300) as reply:
            answer = json.load(reply)
        expected, meta = entry["tokens"][:NUM_TOKENS], answer["meta_info"]
        if answer["output_ids"] != expected:
            wrong.append(f"prompt {number}: tokens are {answer['output_ids']}, recorded are {expected}")
        if meta["spec_verify_ct"] >= NUM_TOKENS:
            wrong.append(f"prompt {number}: {meta['spec_verify_ct']} verify steps, nothing was drafted")
    if wrong:
        raise Refused("the server of the release answers something else:", *wrong)


def check_metadata(wheels: list[Path]) -> None:
    with tool(METADATA_TOOL) as python:
        run([str(python), "-m", "twine", "check", "--strict", *map(str, wheels)])


def write_sbom(python: Path, target: Path, environment: Path) -> Path:
    """CycloneDX, by a tool that stands outside the environment it describes."""
    with tool(SBOM_TOOL) as own:
        command = [str(own), "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
        run([*command, "--output-file", str(target), str(python)])
    # Our own wheels were installed from files; where those lay is nobody's business.
    where = target.resolve().parent
    text = target.read_text(encoding="utf-8").replace(where.as_uri() + "/", "")
    named = [str(path) for path in (where, environment.resolve()) if str(path) in text]
    if named:
        raise Refused(f"{target.name} names {', '.join(named)}: it would say something of this machine")
    target.write_text(text, encoding="utf-8")
    return target


@contextmanager
def tool(requirement: str) -> Iterator[Path]:
    """-> the Python of an environment of its own that has this tool"""
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "bin" / "python"
        run([sys.executable, "-m", "venv", scratch])
        run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", requirement])
        yield python


def run(command: list[str], **options) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)
    if result.returncode:
        output = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise Refused(f"{' '.join(command[:6])} ... failed:", *output[-15:])
    return result.stdout


def git(root: Path, *arguments: str) -> str:
    return run(["git", "-C", str(root), *arguments])
