# SPDX-License-Identifier: Apache-2.0
"""An interpreter of any version for the tests of set-up: it makes environments of itself, and plays pip.

Written by `Checkout.interpreter` into a shell script that names the version. It runs a script as that version would;
`-m venv`, `-m pip` and `-m overlay` are written down in the file FAKE_CALLS, and pip then says what FAKE_PIP holds.
"""

import collections
import json
import os
import pathlib
import runpy
import shutil
import sys
import time


def main(version: str, launcher: str, *words: str) -> int:
    if words[0] == "-c":
        if "_base_executable" in words[1]:
            print(pathlib.Path(launcher).with_name("base").read_text() if in_environment(launcher) else launcher)
        return 0
    if words[0] == "-m":
        return module(launcher, *words[1:])
    pretend(version)
    sys.executable, sys.argv = launcher, list(words)
    runpy.run_path(words[0], run_name="__main__")
    return 0


def pretend(version: str) -> None:
    import platform
    import sysconfig

    names = "major minor micro releaselevel serial"
    parts = map(int, version.rstrip("t").split("."))
    sys.version_info = collections.namedtuple("version_info", names)(*parts, 7, "final", 0)
    platform.python_version = lambda: version.rstrip("t") + ".7"
    config = sysconfig.get_config_var
    sysconfig.get_config_var = lambda name: version.endswith("t") if name == "Py_GIL_DISABLED" else config(name)
    for name in filter(None, os.environ.get("FAKE_LACKS", "").split(",")):
        sys.modules[name] = None


def in_environment(launcher: str) -> bool:
    return pathlib.Path(launcher).with_name("base").exists()


def module(launcher: str, name: str, *words: str) -> int:
    call = {"call": [name, *words], "environment": dict(os.environ)}
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps(call) + "\n")
    if name == "venv":
        if os.environ.get("FAKE_VENV") == "fails":
            print("Error: no room")
            return 1
        binaries = pathlib.Path(words[-1], "bin")
        binaries.mkdir()
        shutil.copy(launcher, binaries / "python")
        (binaries / "base").write_text(launcher)
    if name == "pip":
        return play(os.environ.get("FAKE_PIP", ""))
    return 0


def play(script: str) -> int:
    """Lines of output; `sleep` waits to be interrupted, `exit N` ends."""
    for line in script.splitlines():
        if line == "sleep":
            time.sleep(60)
        elif line.startswith("exit "):
            return int(line.split()[1])
        else:
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
