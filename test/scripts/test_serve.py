# SPDX-License-Identifier: Apache-2.0
"""What `make serve` starts, what it says, and that nothing is left behind. The server is tested in test/e2e."""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def serve():
    spec = importlib.util.spec_from_file_location("serve", ROOT / "scripts/serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(serve, **changes) -> list[str]:
    defaults = {"model": "", "draft": "", "port": 30000, "args": "", "device": "cpu"}
    return serve.server(argparse.Namespace(**{**defaults, **changes}))[0]


def test_the_small_model_is_served_with_a_tree(serve):
    words = command(serve)
    assert words[words.index("--model-path") + 1] == str(ROOT / "test/models/target")
    assert words[words.index("--speculative-draft-model-path") + 1] == str(ROOT / "test/models/drafter")
    assert words[words.index("--attention-backend") + 1] == "kdtree_sm120"
    assert words[words.index("--speculative-algorithm") + 1] == "DDTREE"
    assert words[words.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("device, dtype", [("cpu", "float32"), ("cuda", "bfloat16")])
def test_the_small_model_has_a_dtype_that_the_backend_takes(serve, device, dtype):
    words = command(serve, device=device)
    assert words[words.index("--dtype") + 1] == dtype
    assert words[words.index("--device") + 1] == device


def test_a_drafter_without_its_model_is_refused(serve):
    with pytest.raises(SystemExit, match="DRAFT=org/draft without MODEL"):
        command(serve, draft="org/draft")


def test_a_hub_drafter_can_be_fetched(serve, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    arguments = argparse.Namespace(model=str(tmp_path), draft="org/draft", port=30000, args="", device="cuda")
    assert "HF_HUB_OFFLINE" not in serve.server(arguments)[1]
    arguments.draft = str(tmp_path)
    assert serve.server(arguments)[1]["HF_HUB_OFFLINE"] == "1"


def test_a_busy_port_is_refused(serve):
    """The other server's /health would be taken for ours."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"port {port} is in use"):
            serve.refuse_busy_port(port)
        with pytest.raises(SystemExit, match=r"make serve PORT=\d+") as refusal:
            serve.refuse_busy_port(port)
        serve.refuse_busy_port(int(re.search(r"PORT=(\d+)", str(refusal.value))[1]))
    serve.refuse_busy_port(port)


@pytest.mark.parametrize("value", ["./gone", "/gone", "~/gone", "a/b/c", "gone/"])
def test_a_directory_that_is_not_there_is_refused(serve, value):
    """The hub would be asked for it, minutes later."""
    with pytest.raises(SystemExit, match="there is no such directory"):
        command(serve, model=value)


def test_a_home_directory_is_found(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert str(tmp_path / "model") in command(serve, model="~/model")


def test_flags_with_an_open_quote_are_refused(serve):
    with pytest.raises(SystemExit, match="No closing quotation"):
        command(serve, args="--served-model-name 'mine")


def test_an_idle_server_on_a_cpu_sleeps(serve):
    assert "--sleep-on-idle" in command(serve) and "--sleep-on-idle" not in command(serve, device="cuda")


@pytest.mark.parametrize("text", ["", "0", "65536", "http", "-1"])
def test_a_port_that_is_none_is_refused(serve, text):
    with pytest.raises(SystemExit, match=f"PORT={text}: a port is a number"):
        serve.port_number(text)


def test_a_proxy_is_not_asked_for_this_machine(serve, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert "curl --noproxy 127.0.0.1 -s" in serve.ready_message(30000)
    arguments = argparse.Namespace(model="", draft="", port=30000, args="", device="cpu")
    assert serve.server(arguments)[1]["no_proxy"] == "127.0.0.1,localhost"
    monkeypatch.setenv("NO_PROXY", "intern.example")
    assert serve.server(arguments)[1]["NO_PROXY"] == "intern.example,127.0.0.1,localhost"
    monkeypatch.delenv("http_proxy")
    assert "--noproxy" not in serve.ready_message(30000)


def test_a_model_without_a_drafter_is_served_plainly(serve):
    words = command(serve, model="org/model", device="cuda", args="--tp 8 --log-level 'debug'")
    assert "--speculative-algorithm" not in words and "--dtype" not in words
    assert words[-4:] == ["--tp", "8", "--log-level", "debug"]


def test_the_flags_are_those_of_the_fork(serve):
    """Upstream's own parser takes the whole command; a misspelt flag is not taken."""
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(command(serve)[3:])
    assert (args.speculative_algorithm, args.attention_backend) == ("DDTREE", "kdtree_sm120")
    with pytest.raises(SystemExit):
        prepare_server_args([*command(serve)[3:], "--no-such-flag"])


def test_the_example_is_a_request(serve):
    message = serve.ready_message(31999).replace("\\\n", " ")
    words = shlex.split(re.search(r"curl .*", message).group())
    assert "http://127.0.0.1:31999/generate" in words
    assert json.loads(words[words.index("-d") + 1])["sampling_params"]["max_new_tokens"] == 32


def test_the_readme_shows_what_is_printed(serve):
    shown = (ROOT / "README.md").read_text()
    assert serve.ready_message(30000).strip() in shown


def test_a_server_that_dies_is_reported(serve, capsys):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert serve.wait_until_ready(process, 9) is False
    assert "stopped with exit code 3" in capsys.readouterr().out


# A server that is only a port and a child, as SGLang has a scheduler. The child does not end for SIGTERM.
SERVER = """
import http.server, os, pathlib, signal, subprocess, sys
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
started = subprocess.Popen([sys.executable, "-S", "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()
pathlib.Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {started.pid}")
if "--stuck" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "--dies" in sys.argv:
            os._exit(7)
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.do_GET()
        self.wfile.write(self.rfile.read(int(self.headers["Content-Length"])))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


class Started:
    """serve.py with that server in SGLang's place."""

    def __init__(self, folder: Path, *, flags: str = "", stop_within_s: float = 20):
        self.pids = folder / "pids"
        (folder / "sglang").mkdir()
        (folder / "sglang/__init__.py").touch()
        (folder / "sglang/launch_server.py").write_text(SERVER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        script = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import serve; "
        script += f"serve.STOP_WITHIN_S = {stop_within_s}; sys.exit(serve.main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "--device", "cpu", f"--port={self.port}", f"--args={flags}"],
            env=os.environ | {"PYTHONPATH": str(folder), "PIDS": str(self.pids)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_ready(self) -> str:
        said = ""
        for line in self.process.stdout:
            said += line
            if line.startswith("        -d "):
                return said
        raise AssertionError(said)

    def end(self, timeout: float = 600) -> str:
        return self.process.communicate(timeout=timeout)[0]

    def assert_nothing_is_left(self) -> None:
        for pid in self.pids.read_text().split():
            deadline = time.monotonic() + 300
            while is_running(int(pid)):
                assert time.monotonic() < deadline, f"{pid} is left"
                time.sleep(0.05)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))


@pytest.fixture
def start(tmp_path):
    servers = []

    def one(**options) -> Started:
        servers.append(Started(tmp_path, **options))
        return servers[-1]

    yield one
    for server in servers:
        server.process.kill()
        for pid in map(int, server.pids.read_text().split()):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_serve_ends_every_process(start, end):
    started = start()
    started.until_ready()
    started.process.send_signal(end)
    said = started.end()
    assert "serve: stopping" in said and "Traceback" not in said
    assert started.process.returncode == (0 if end == signal.SIGINT else 128 + end)
    started.assert_nothing_is_left()


def test_a_server_that_does_not_end_is_killed(start):
    started = start(flags="--stuck", stop_within_s=0.5)
    started.until_ready()
    started.process.send_signal(signal.SIGINT)
    started.end()
    started.assert_nothing_is_left()


def test_a_second_interrupt_does_not_wait(start):
    started = start(flags="--stuck", stop_within_s=1000)
    started.until_ready()
    started.process.send_signal(signal.SIGINT)
    assert any("serve: stopping" in line for line in started.process.stdout)
    time.sleep(0.3)
    started.process.send_signal(signal.SIGINT)
    assert "Traceback" not in started.end()
    started.assert_nothing_is_left()


def test_a_server_that_dies_later_takes_its_children_along(start):
    started = start(flags="--dies")
    said = started.end()
    assert "stopped with exit code 7" in said and started.process.returncode == 7
    started.assert_nothing_is_left()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_server_ends_when_serve_is_killed(start):
    started = start()
    started.until_ready()
    started.process.kill()
    started.process.wait()
    server, child = map(int, started.pids.read_text().split())
    deadline = time.monotonic() + 300
    while is_running(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert is_running(child)  # no parent-death signal here; SGLang's own children have one


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_command_can_be_run(start):
    started = start()
    said = started.until_ready()
    example = said[said.index("    curl") :].replace("curl ", "curl --fail ", 1)
    answer = subprocess.run(["bash", "-c", example], capture_output=True, text=True)
    started.process.send_signal(signal.SIGINT)
    started.end()
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["sampling_params"] == {"max_new_tokens": 32, "temperature": 0}
