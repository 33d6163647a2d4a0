# SPDX-License-Identifier: Apache-2.0
"""Set-up does what changed, once, repairs what was left half-made, and says what it lacks. It runs by `make`.

The checkout has the real Makefile and scripts, and a few files in place of the sources. The interpreters are played by
fake_python.py, so nothing is downloaded and every version can be had.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_python.py")
SOURCES = [
    *(f"python/{name}" for name in ("REQUIREMENTS.toml", "constraints-cpu.txt", "pyproject.toml")),
    "python/overlay/plan.py",
    "python/edits/a.py.toml",
    "python/sglang/ours.py",
    "sgl-kernel-sm120/setup.py",
    "test/requirements.txt",
]
TOOLS = ("make", "sh", "sed", "sort", "dirname", "echo", "g++", "git")
BEGUN = "Installing collected packages: torch, sglang"


class Checkout:
    """A small checkout, and a PATH that holds the named tools and interpreters alone."""

    def __init__(self, root: Path):
        self.root, self.bin, self.calls = root / "checkout", root / "bin", root / "calls"
        self.bin.mkdir()
        for path in SOURCES:
            self.write(path, "one")
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for path in ("Makefile", "python/UPSTREAM.toml"):
            shutil.copy(ROOT / path, self.root / path)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def interpreter(self, version: str, name: str = "") -> Path:
        path = self.bin / (name or f"python{version}")
        # Without site-packages it starts in a fifth of the time.
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} {version} "$0" "$@"\n')
        path.chmod(0o755)
        return path

    def nvidia_smi(self, code: int) -> None:
        """What lists the GPUs; its exit code says whether there is one."""
        path = self.bin / "nvidia-smi"
        path.write_text(f'#!/bin/sh\n[ "$1" = -L ] && exit {code}\nexit 77\n')
        path.chmod(0o755)

    def start(self, *words: str, sets: tuple[str, ...] = ("SET=cpu",), **variables: str) -> subprocess.Popen:
        """make, in a session of its own. `words`: targets and NAME=value; `variables`: of its environment."""
        return self.start_program([self.bin / "make", *sets, *words], variables)

    def start_program(self, command: list[str | Path], variables: dict[str, str]) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        for name in ("CXX", "PYTHON", "SET", "PIP_TARGET"):
            kept.pop(name, None)
        own = {"PATH": str(self.bin), "FAKE_CALLS": str(self.calls), "PYTHONDONTWRITEBYTECODE": "1"}
        self.calls.write_text("")
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=kept | own | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def make(self, *words: str, sets: tuple[str, ...] = ("SET=cpu",), **variables: str) -> tuple[int, str]:
        process = self.start(*words, sets=sets, **variables)
        said = process.communicate(timeout=600)[0]
        return process.returncode, said

    def done(self) -> list[str]:
        """What the last run asked of its interpreters, pip without its constant options."""
        calls = [" ".join(call["call"]) for call in self.recorded()]
        return [call.replace("pip --disable-pip-version-check ", "").replace(f"{self.root}/", "") for call in calls]

    def recorded(self) -> list[dict]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path):
    made = Checkout(tmp_path)
    made.interpreter("3.11")
    return made


def until(process: subprocess.Popen, pattern: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"never said {pattern}:\n{said}")


def is_whole(checkout: Checkout) -> bool:
    """Nothing is left to do."""
    code, said = checkout.make("test-environment")
    return (code, said, checkout.done()) == (0, "", [])


def test_the_first_start_installs_in_one_call_and_the_second_does_nothing(checkout):
    code, said = checkout.make("test-environment")
    assert code == 0, said
    venv, install, link = checkout.done()
    assert venv == "venv .venv" and link.startswith("overlay link .venv/lib/python3.11/site-packages")
    assert install == (
        "install sgl-kernel-sm120 python[cpu,kit] -r test/requirements.txt -c python/constraints-cpu.txt --no-compile"
    )
    shown = re.search(r"\$ make serve\n(.*?)    \.\.\.", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert said.startswith(shown) and shown.count("setup:") == 2 and "setup: done in" in said
    assert is_whole(checkout)


@pytest.mark.parametrize("chosen, cuda", [("cpu", "SGL_KERNEL_SM120_CUDA=0 "), ("cuda", "")])
def test_the_readme_installs_what_make_installs(checkout, chosen, cuda):
    checkout.make("environment", f"SET={chosen}")
    (install,) = (call for call in checkout.recorded() if "install" in call["call"])
    words = [word.replace(f"{checkout.root}/", "") for word in install["call"]]
    packages = words[words.index("install") + 1 : words.index("--no-compile")]
    assert packages[:2] == ["sgl-kernel-sm120", f"python[{chosen},kit]"]
    command = " ".join(["pip install", "./sgl-kernel-sm120", f"'./python[{chosen},kit]'", *packages[2:]])
    assert f"\n{cuda}{command}\n" in (ROOT / "README.md").read_text()
    assert install["environment"]["SGL_KERNEL_SM120_CUDA"] == ("0" if cuda else "1")


def test_the_tests_add_to_what_the_server_has(checkout):
    assert checkout.make("environment")[0] == 0
    assert not [call for call in checkout.done() if "requirements.txt" in call]
    assert checkout.make("test-environment")[0] == 0
    assert checkout.done() == ["install -r test/requirements.txt -c python/constraints-cpu.txt --no-compile"]


@pytest.mark.parametrize(
    "path, expected",
    [
        ("python/sglang/ours.py", []),  # linked: the saved file is the installed one
        ("python/sglang/new.py", ["overlay link"]),
        ("python/edits/a.py.toml", ["overlay link"]),
        ("python/overlay/plan.py", ["overlay link"]),
        ("sgl-kernel-sm120/setup.py", ["install --no-deps --force-reinstall sgl-kernel-sm120"]),
        ("python/REQUIREMENTS.toml", ["install sgl-kernel-sm120 python[cpu,kit]", "overlay link"]),
        ("test/requirements.txt", ["install -r test/requirements.txt"]),
        ("sgl-kernel-sm120/build/object.o", []),
        ("python/overlay/__pycache__/plan.pyc", []),
    ],
)
def test_a_change_redoes_its_own_step(checkout, path, expected):
    checkout.make("test-environment")
    checkout.write(path, "two")
    code, said = checkout.make("test-environment")
    assert code == 0, said
    done = checkout.done()
    assert len(done) == len(expected), done
    assert all(call.startswith(start) for call, start in zip(done, expected, strict=True)), done


def test_a_gpu_gets_the_full_set_without_the_cpu_versions(checkout):
    checkout.make("environment")
    code, said = checkout.make("environment", "SET=cuda")
    assert code == 0, said
    install = next(call for call in checkout.recorded() if "install" in call["call"])
    assert checkout.done()[0].startswith("install sgl-kernel-sm120 python[cuda,kit] --no-compile")
    assert install["environment"]["SGL_KERNEL_SM120_CUDA"] == "1"


@pytest.mark.parametrize(
    "code, chosen, cuda", [(None, "cpu", "0"), (9, "cpu", "0"), (0, "cuda", "1")], ids=["no tool", "no GPU", "a GPU"]
)
def test_the_machine_chooses_the_set_and_the_device(checkout, code, chosen, cuda):
    """Nothing is named: with a GPU, `make serve` installs the GPU set and serves on it. A driver that does not answer
    is no GPU. Without make, environment.py chooses in the same way."""
    if code is not None:
        checkout.nvidia_smi(code)
    said = checkout.make("serve", "PORT=31998", "MODEL=org/model", sets=())[1]
    assert f"installing the fork ({chosen} set)" in said
    (install,) = (call for call in checkout.recorded() if "install" in call["call"])
    assert f"{checkout.root}/python[{chosen},kit]" in install["call"]
    assert ("-c" in install["call"]) == (chosen == "cpu")
    assert install["environment"]["SGL_KERNEL_SM120_CUDA"] == cuda
    server, *flags = checkout.recorded()[-1]["call"]
    assert server == "sglang.launch_server" and flags[flags.index("--device") + 1] == chosen

    process = checkout.start_program([checkout.bin / "python3.11", "scripts/environment.py"], {})
    said = process.communicate(timeout=600)[0]
    assert (process.returncode, said, checkout.done()) == (0, "", [])  # the same set: nothing is left to do


# Which Python


def test_another_python_makes_the_environment_anew(checkout):
    other = checkout.interpreter("3.12")
    checkout.make("environment")
    code, said = checkout.make("environment", f"PYTHON={other}")
    assert code == 0 and "it was made for Python 3.11, this is Python 3.12" in said
    assert [call.split()[0] for call in checkout.done()] == ["venv", "install", "overlay"]
    assert "lib/python3.12/site-packages" in checkout.done()[2]
    assert checkout.make("environment", f"PYTHON={other}") == (0, "") and checkout.done() == []


def test_the_environment_keeps_its_python_when_none_is_named(checkout):
    """`make test` after `make PYTHON=python3.12 serve` does not start from nothing."""
    checkout.make("test-environment", f"PYTHON={checkout.interpreter('3.12')}")
    assert is_whole(checkout)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_a_supported_python_is_found(checkout, version):
    (checkout.bin / "python3.11").unlink()
    checkout.interpreter(version)
    code, said = checkout.make("environment")
    assert code == 0 and f"making .venv with Python {version}.7" in said


def test_a_python_that_only_lies_on_the_path_is_passed_over(checkout):
    """Version managers put a launcher of every version there; it fails unless that version is chosen."""
    (checkout.bin / "python3.11").write_text("#!/bin/sh\nexit 127\n")
    checkout.interpreter("3.12")
    code, said = checkout.make("environment")
    assert code == 0 and "making .venv with Python 3.12.7" in said


@pytest.mark.parametrize("version, remark", [("3.10", ""), ("3.14", ""), ("3.13t", "free-threaded")])
def test_an_unsupported_python_is_refused_at_once(checkout, version, remark):
    code, said = checkout.make("environment", f"PYTHON={checkout.interpreter(version)}")
    assert code and checkout.done() == [] and not (checkout.root / ".venv").exists()
    assert remark in said and "CPython 3.11, 3.12 or 3.13" in said and "make PYTHON=python3.11 serve" in said


def test_the_only_python_being_too_new_is_said(checkout):
    (checkout.bin / "python3.11").unlink()
    checkout.interpreter("3.14", name="python3")
    code, said = checkout.make("environment")
    assert code and "CPython 3.14.7" in said and "3.11, 3.12 or 3.13" in said


def test_no_python_at_all(checkout):
    (checkout.bin / "python3.11").unlink()
    code, said = checkout.make("environment")
    assert code and "no Python here; install one of these: 3.11, 3.12, 3.13" in said and "python3-venv" in said


def test_a_python_that_is_not_there(checkout):
    code, said = checkout.make("environment", "PYTHON=python3.12")
    assert code and "PYTHON=python3.12 does not run" in said and checkout.done() == []


# What the machine lacks


@pytest.mark.parametrize(
    "lacks, expected",
    [
        ("ensurepip", r"apt install python3-venv .*python3\.11-venv"),
        ("venv", "apt install python3-venv"),
        ("ssl,lzma", "built without ssl, lzma: install the headers"),
    ],
)
def test_parts_of_python_that_are_missing(checkout, lacks, expected):
    code, said = checkout.make("environment", FAKE_LACKS=lacks)
    assert code and re.search(expected, said), said
    assert "nothing was changed" in said and checkout.done() == [] and not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("tool, remedy", [("g++", "apt install g++"), ("git", "apt install git")])
def test_the_tests_need_a_compiler_and_git(checkout, tool, remedy):
    (checkout.bin / tool).unlink()
    code, said = checkout.make("test-environment")
    assert code and remedy in said and checkout.done() == []
    assert checkout.make("environment")[0] == 0  # a server on the CPU compiles nothing


def test_the_gpu_set_needs_rust_where_a_wheel_is_missing(checkout):
    checkout.interpreter("3.13")
    gpu = ("environment", "SET=cuda", "PYTHON=python3.13")
    code, said = checkout.make(*gpu)
    assert code and "make PYTHON=python3.12 serve; with Rust" in said and not checkout.done()
    assert checkout.make("environment", "PYTHON=python3.13")[0] == 0  # the CPU set has no such package
    (checkout.bin / "cargo").symlink_to(shutil.which("sh"))
    assert checkout.make(*gpu)[0] == 0


def test_the_gpu_set_needs_a_compiler(checkout):
    (checkout.bin / "g++").unlink()
    code, said = checkout.make("environment", "SET=cuda")
    assert code and "apt install g++" in said
    assert checkout.make("environment", "SET=cuda", CXX="sh -v")[0] == 0  # any compiler that the user names


# What goes wrong on the way


NO_NETWORK = """\
WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError('...: Failed to \
establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/setuptools/
ERROR: Could not find a version that satisfies the requirement setuptools>=77 (from versions: none)
ERROR: No matching distribution found for setuptools>=77
exit 1
"""
DISK_FULL = f"""\
{BEGUN}
ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device
exit 1
"""


@pytest.mark.parametrize(
    "said_by_pip, remedy",
    [
        (NO_NETWORK, "the package index cannot be reached. See the network, the proxy .HTTPS_PROXY. or the mirror"),
        ("ERROR: ProxyError('Cannot connect to proxy.')\nexit 1", "the proxy does not let pip through"),
        ("ERROR: SSLError(CERTIFICATE_VERIFY_FAILED)\nexit 1", "PIP_CERT="),
        ("ERROR: No matching distribution found for torch==2.13.0\nexit 1", "A mirror may lack it"),
        ("OSError: [Errno 28] No space left on device\nexit 1", "the disk is full. Make room"),
        ("error: command 'g++' failed: No such file or directory\nexit 1", "apt install g\\+\\+"),
        ("PermissionError: [Errno 13] Permission denied: 'x'\nexit 1", "chown the checkout"),
        ("a failure of a new kind\nexit 1", "The end of what it said:\n *a failure of a new kind"),
    ],
)
def test_a_failure_is_told_with_its_remedy_and_the_next_run_goes_on(checkout, said_by_pip, remedy):
    code, said = checkout.make("test-environment", FAKE_PIP=said_by_pip)
    assert code and re.search(remedy, said), said
    assert "Traceback" not in said and str(checkout.root / ".venv/setup.log") in said
    assert said_by_pip.splitlines()[0] in (checkout.root / ".venv/setup.log").read_text()
    code, said = checkout.make("test-environment")
    # pip had not begun to install: what is there is as it was.
    assert code == 0 and [call.split()[0] for call in checkout.done()] == ["install", "overlay"]


def test_waiting_for_the_network_is_visible(checkout):
    assert "no connection (NewConnectionError), pip tries again" in checkout.make("environment", FAKE_PIP=NO_NETWORK)[1]


def test_a_full_disk_in_the_middle_makes_the_environment_anew(checkout):
    code, said = checkout.make("test-environment", FAKE_PIP=DISK_FULL)
    assert code and "the disk is full" in said
    code, said = checkout.make("test-environment")
    assert code == 0 and "an installation into it was interrupted" in said and checkout.done()[0] == "venv .venv"
    assert is_whole(checkout)


def test_a_failed_upgrade_of_a_good_environment_is_repaired(checkout):
    checkout.make("test-environment")
    checkout.write("python/REQUIREMENTS.toml", "two")
    assert checkout.make("test-environment", FAKE_PIP=DISK_FULL)[0]
    assert checkout.make("test-environment")[0] == 0 and checkout.done()[0] == "venv .venv"
    assert is_whole(checkout)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment, begun", [("Collecting torch", False), (BEGUN, True)])
def test_an_interrupted_set_up_is_repaired(checkout, end, moment, begun):
    process = checkout.start("test-environment", FAKE_PIP=f"{moment}\nsleep")
    until(process, moment)
    os.killpg(process.pid, end)  # as a terminal does with Ctrl-C
    said = process.communicate(timeout=600)[0]
    assert process.returncode and "Traceback" not in said
    if end == signal.SIGINT:
        assert "make again continues" in said
    code, said = checkout.make("test-environment")
    assert code == 0, said
    # A killed set-up cannot say how far pip came.
    anew = begun or end == signal.SIGKILL
    assert ("was interrupted" in said) == anew and (checkout.done()[0] == "venv .venv") == anew
    assert is_whole(checkout)


def test_pip_ends_with_a_set_up_that_is_ended(checkout):
    """A signal to set-up alone, as a supervisor sends it, leaves no pip that goes on writing."""
    process = checkout.start("environment", FAKE_PIP="Collecting torch\nsleep")
    until(process, "Collecting torch")
    os.kill(process.pid, signal.SIGTERM)  # make hands it to its child
    process.communicate(timeout=600)
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_an_environment_whose_making_failed_is_made_anew(checkout):
    code, said = checkout.make("environment", FAKE_VENV="fails")
    assert code and "python -m venv failed" in said and "no room" in said
    code, said = checkout.make("environment")
    assert code == 0 and "its last set-up did not get far" in said


def test_an_environment_whose_python_is_gone_is_made_anew(checkout):
    checkout.make("test-environment")
    (checkout.root / ".venv/bin/python").unlink()
    code, said = checkout.make("test-environment")
    assert code == 0 and "its Python is gone" in said and checkout.done()[0] == "venv .venv"


def test_a_moved_checkout_makes_its_environment_anew(checkout):
    """The links to our files would lead to the old place."""
    checkout.make("environment")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    code, said = checkout.make("environment")
    assert code == 0 and "it was made for" in said and "/moved/.venv" in said and checkout.done()[0] == "venv .venv"


def test_an_environment_that_is_not_ours_is_left_alone(checkout):
    checkout.write(".venv/pyvenv.cfg", "of the user")
    code, said = checkout.make("environment")
    assert code and "was not made by make, so it is left alone" in said
    assert (checkout.root / ".venv/pyvenv.cfg").read_text() == "of the user" and checkout.done() == []


def test_the_second_of_two_set_ups_waits(checkout):
    first = checkout.start("environment", FAKE_PIP="Collecting torch\nsleep")
    until(first, "Collecting torch")
    second = checkout.start("environment")
    until(second, "another set-up of this checkout is running")
    os.killpg(first.pid, signal.SIGINT)
    first.communicate(timeout=600)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0 and "done in" in said


# Settings of the user


def test_the_users_proxy_and_mirror_reach_pip(checkout):
    own = {"HTTPS_PROXY": "http://proxy.example:3128", "PIP_INDEX_URL": "https://mirror.example/simple"}
    own |= {"PIP_CERT": "/ca.pem", "PIP_CONFIG_FILE": "/pip.conf", "TMPDIR": str(checkout.bin)}
    elsewhere = {"PIP_USER": "1", "PIP_TARGET": "/elsewhere", "PYTHONPATH": "/elsewhere"}
    code, said = checkout.make("environment", **own, **elsewhere)
    assert code == 0, said
    install = next(call["environment"] for call in checkout.recorded() if "install" in call["call"])
    assert own.items() <= install.items()
    assert install["PIP_USER"] == "0" and "PIP_TARGET" not in install and "PYTHONPATH" not in install


def test_what_pip_does_is_shown(checkout):
    lines = ["Collecting torch==2.13.0", "  Downloading torch.whl (191 MB)", BEGUN, "Requirement already satisfied: x"]
    said = checkout.make("environment", FAKE_PIP="\n".join(lines))[1]
    assert [line.strip() for line in said.splitlines() if line.startswith("    ")] == [
        line.strip() for line in lines[:3]
    ]


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--log-requests", ["--log-requests"]),
        (
            '--json-model-override-args \'{"a b": "c"}\' --tp 2',
            ["--json-model-override-args", '{"a b": "c"}', "--tp", "2"],
        ),
    ],
)
def test_what_make_is_given_reaches_the_server_word_for_word(checkout, flags, words):
    said = checkout.make("serve", "MODEL=org/model", "PORT=31999", f"ARGS={flags}")[1]
    name, *given = checkout.recorded()[-1]["call"]
    assert name == "sglang.launch_server", said
    assert given[-len(words) :] == words
    assert given[:2] == ["--model-path", "org/model"] and given[given.index("--port") + 1] == "31999"


def test_a_cpu_machine_is_told_that_it_downloads_cuda(checkout):
    lines = "Collecting nvidia-ml-py\nCollecting nvidia-cublas\n  Downloading nvidia_cublas.whl (400 MB)\nexit 1"
    said = checkout.make("environment", FAKE_PIP=lines)[1]
    assert said.count("torch with CUDA alone") == 1 and said.index("nvidia-cublas") < said.index("PIP_EXTRA_INDEX_URL")
    assert "torch with CUDA alone" not in checkout.make("environment", "SET=cuda", FAKE_PIP=lines)[1]
