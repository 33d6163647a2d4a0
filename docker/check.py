# SPDX-License-Identifier: Apache-2.0
"""Run the image's commands without an engine: docker/check.py [--full | --system] [--python P] [--keep FOLDER].

Every command of every RUN is run by the Dockerfile's shell, on a copy of what COPY would take and with /opt/kdtree
moved to a scratch folder. Those that change the system (apt-get, useradd) run as root in a layer over this machine's
root, one for each stage, of which the machine itself sees nothing; then the last stage's USER enters its WORKDIR and
starts the entry script. That takes root, overlayfs and apt; without them such commands are left out, and said, and
apt's package names are looked up where it exists. --root names a bare system to lay the layers over, on which apt
installs what this machine has already: debootstrap --variant=minbase SUITE FOLDER makes one. --system runs nothing but
these. The big installation is resolved, not installed, unless --full is given; then the entry script's doctor runs too.

What the commands say is shown in short, and in full in FOLDER/check.log. With --keep, a run that was stopped is
continued by the same command: an installation that ended well is not done again, and compiled kernels are kept.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import installer
import preflight

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "/opt/kdtree"
SOURCES = ("python", "sgl-kernel-sm120")
SYSTEM = ("apt-get ", "rm -rf /var/lib/apt/", "useradd ")
AS_USER = "as USER: "
below = Path("/")  # the root that stages are layers over
APT_INSTALL = "apt-get install -y --no-install-recommends "
# Bytes that the check needs, by --full. An index that does not give a package's requirements apart makes pip fetch the
# package to resolve it, and pip keeps all that it fetched until the end.
ROOM = {False: 6e9, True: 20e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3.12", help="Ubuntu 24.04 has 3.12 (default: %(default)s)")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--full", action="store_true", help="install it all (11 GB) and build the kernels")
    extent.add_argument("--system", action="store_true", help="only what changes the system; needs root and overlayfs")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="a bare system to lay layers over, not this one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave it there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what ran, and for how long")
    args = parser.parse_args()
    python = interpreter(args.python)
    global below
    below = args.root.resolve() if args.root else below
    if (args.system or args.root) and not layers():
        sys.exit("check: --system and --root need root and overlayfs: run it as root on a machine, not in a container")
    scratch = (args.keep or Path(tempfile.mkdtemp(prefix="kdtree-image-"))).resolve()
    try:
        prepare(python, scratch, full=args.full)
        ran, todo = run_all(scratch, full=args.full, system=args.system)
        size = size_of(scratch / "kdtree")
    finally:
        shutil.rmtree(scratch / "tmp" if args.keep else scratch, ignore_errors=True)
    failed = sum(bool(result["exit"]) for result in ran)
    if args.json:
        extent = " --full" * args.full + " --system" * args.system + " --root FOLDER" * bool(args.root)
        args.json.write_text(record(python, ran, size, extent=extent), encoding="utf-8")
    print(f"check: {failed} of {len(ran)} commands failed" + (f", {todo - len(ran)} not run" if failed else ""))
    return 1 if failed else 0


def interpreter(name: str) -> str:
    """The program itself: what PATH holds may be a stand-in of pyenv's, which starts another one or none."""
    asked = [shutil.which(name) or name, "-c", "import sys; print(sys.executable)"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"check: no {name} here that starts: install it, or name one: --python")


def prepare(python: str, scratch: Path, *, full: bool) -> None:
    """The folder of a run. One of the same sources and the same Python keeps what ended well in it."""
    scratch.mkdir(parents=True, exist_ok=True)
    room = preflight.free_bytes(scratch)
    if not (scratch / "kdtree").exists() and room < ROOM[full]:
        raise SystemExit(
            f"check: {preflight.gigabytes(room)} are free for {scratch}, and the check takes about "
            f"{preflight.gigabytes(ROOM[full])}: make room, or name a folder on another disk: --keep FOLDER"
        )
    copy_sources(scratch / "src.new")
    identity, made_of = f"{python} {full} {below} {digest(scratch / 'src.new')}", scratch / "made_of"
    if made_of.exists() and made_of.read_text() == identity:
        shutil.rmtree(scratch / "src.new")
        if (scratch / "running").exists():  # half an installation is none
            shutil.rmtree(scratch / "done")
    else:
        for name in ("done", "src"):
            shutil.rmtree(scratch / name, ignore_errors=True)
        (scratch / "src.new").rename(scratch / "src")
        made_of.write_text(identity)
    if not (scratch / "done").exists():
        for name in ("kdtree", *(f"stage{stage}" for stage in range(stage_of(len(steps())) + 1))):
            shutil.rmtree(scratch / name, ignore_errors=True)
    for name in ("bin", "done", "tmp"):
        (scratch / name).mkdir(exist_ok=True)
    python3 = scratch / "bin" / "python3"
    python3.unlink(missing_ok=True)
    python3.symlink_to(python)


def run_all(scratch: Path, *, full: bool, system: bool = False) -> tuple[list[dict], int]:
    """-> (command, seconds and exit status of each that ran, now or before; how many there are).

    Stops at a failure, as the build of an image does.
    """
    todo, ran = list(enumerate(steps())), []
    if layers():
        todo.append((len(todo), AS_USER + user_step()))
    if system:
        todo = [(number, step) for number, step in todo if step.startswith((*SYSTEM, AS_USER))]
    elif full:
        todo.append((len(todo), doctor(scratch)))
    for number, step in todo:
        done = scratch / "done" / str(number)
        if done.exists():
            ran.append(json.loads(done.read_text()))
            print(f"as before {step}", flush=True)
            continue
        (scratch / "running").touch()
        started = time.monotonic()
        ok = run(step, scratch, full=full, stage=stage_of(number))
        (scratch / "running").unlink()
        command = step.replace(str(scratch / "kdtree"), PREFIX).replace(f"{ROOT}/", "")
        result = {"command": command, "seconds": round(time.monotonic() - started), "exit": 0 if ok else 1}
        if adapted(step, scratch, full=full, stage=0) is None:
            result = {"command": command, "left_out": True, "exit": 0}
        ran.append(result)
        if not ok:
            (scratch / "running").touch()
            break
        done.write_text(json.dumps(result))
    return ran, len(todo)


def record(python: str, ran: list[dict], size: int, *, extent: str) -> str:
    """What a committed file says of a run; nothing of the machine's names and places."""
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    head = {
        "what": f"docker/check.py{extent}",
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{len(os.sched_getaffinity(0))} {platform.machine()} cores, {system_name()}, Python {version}",
        "environment_bytes": size,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    steps = ",\n".join(f"  {json.dumps(step)}" for step in ran)
    return "\n".join(["{", *lines, ' "steps": [', steps, " ]", "}", ""])


def size_of(folder: Path) -> int:
    """Bytes on the disk, links not followed."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


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


def stage_of(number: int) -> int:
    """The FROM, counted from 0, that a command of steps() belongs to; behind the last one: the last."""
    stage, seen = -1, 0
    for verb, rest in instructions((ROOT / "docker" / "Dockerfile").read_text()):
        stage += verb == "FROM"
        seen += (rest.count("&&") + 1) * (verb == "RUN")
        if seen > number:
            break
    return stage


def user_step() -> str:
    """The last stage's user can write where it starts, and run the entry script, which refuses an odd verb with 2."""
    last = dict(instructions((ROOT / "docker" / "Dockerfile").read_text()))
    return (
        f"{last['USER']} cd {last['WORKDIR']} && touch written && {{ /usr/local/bin/entry.sh nothing || test $? = 2; }}"
    )


def system_name() -> str:
    release = re.search(r'PRETTY_NAME="(.*)"', (below / "etc" / "os-release").read_text()) if layers() else None
    return release[1] if release else platform.system()


@functools.cache
def layers() -> bool:
    """Can this process lay a layer over the root and enter it?"""
    if os.geteuid() or not shutil.which("unshare") or not (below / "usr" / "bin" / "apt-get").exists():
        return False
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(["bash", "-c", layered("true", Path(folder))], capture_output=True).returncode == 0


def layered(step: str, layer: Path, *, user: str = "0") -> str:
    """A command that runs the step in a layer over the root below; what it writes stays in layer/upper."""
    for name in ("upper", "work", "merged"):
        (layer / name).mkdir(parents=True, exist_ok=True)
    inside = (
        f"mount -t overlay overlay -o lowerdir={below},upperdir={layer}/upper,workdir={layer}/work {layer}/merged; "
        f"for place in dev proc; do mount --rbind /$place {layer}/merged/$place; done; "
        # May be a mount of its own on this machine, which the layer does not see.
        f"cp --remove-destination /etc/resolv.conf {layer}/merged/etc/; "
        f"exec chroot --userspec={user}:{user} {layer}/merged /bin/bash -euo pipefail -c {shlex.quote(step)}"
    )
    return f"unset TMPDIR; unshare --mount --propagation private /bin/bash -euo pipefail -c {shlex.quote(inside)}"


def as_user(step: str, layer: Path) -> str:
    """With what COPY takes from docker/, which root owns."""
    for verb, rest in instructions((ROOT / "docker" / "Dockerfile").read_text()):
        source, _, target = rest.partition(" ")
        if verb == "COPY" and source.startswith("docker/"):
            copy = layer / "upper" / target.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, copy)
    user, _, command = step.partition(" ")
    return layered(command, layer, user=user)


def copy_sources(target: Path) -> None:
    """As COPY does, without what Dockerfile.dockerignore keeps out of the context."""
    rules = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    ignored = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    shutil.rmtree(target, ignore_errors=True)
    for name in SOURCES:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns(*ignored))


def doctor(scratch: Path) -> str:
    return f"KDTREE_PYTHON={scratch / 'kdtree' / 'bin' / 'python'} {ROOT / 'docker' / 'entry.sh'} doctor"


def adapted(step: str, scratch: Path, *, full: bool, stage: int) -> str | None:
    """The step as it is run here; None if it needs the image's own system."""
    layer = scratch / f"stage{stage}"
    if step.startswith(AS_USER):
        return as_user(step.removeprefix(AS_USER), layer)
    if step.startswith(SYSTEM):
        if layers():
            return layered(step, layer)
        names = step.removeprefix(APT_INSTALL)
        return f"apt-get install --simulate {names}" if names != step and shutil.which("apt-get") else None
    if "./python" in step and not full:
        step = step.replace("pip install", "pip install --dry-run --ignore-installed")
    return step.replace(PREFIX, str(scratch / "kdtree"))


def run(step: str, scratch: Path, *, full: bool, stage: int = 0) -> bool:
    command = adapted(step, scratch, full=full, stage=stage)
    if command is None:
        print(f"left out  {step}", flush=True)
        return True
    path = f"{scratch / 'bin'}:{os.environ['PATH']}"
    said = []
    with (scratch / "check.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-euo", "pipefail", "-c", command],
            cwd=scratch / "src",
            # pip puts what it fetches into TMPDIR: here is room for it, and elsewhere may be memory.
            env=os.environ | {"PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(scratch / "tmp")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            for line in installer.lines_of(process):
                log.write(f"{time.strftime('%H:%M:%S')} {line}")
                log.flush()
                said.append(line)
                installer.show(line.strip())
            code = process.wait()
        except BaseException:
            installer.end(process)
            raise
    print(f"{'ok' if code == 0 else 'FAILED':<8}  {step if 'unshare' in command else command}", flush=True)
    if code:
        print("".join(said)[-3000:], flush=True)
    return code == 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that it ends pip as Ctrl-C does
    sys.exit(main())
