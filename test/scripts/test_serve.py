# SPDX-License-Identifier: Apache-2.0
"""What `make serve` starts, and what it says. The server itself is tested in test/e2e."""

import argparse
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
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
    assert ("--device" in words) == (device == "cpu")


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
    serve.refuse_busy_port(port)


def test_a_model_without_a_drafter_is_served_plainly(serve):
    words = command(serve, model="org/model", device="cuda", args="--tp 8 --log-level 'debug'")
    assert "--speculative-algorithm" not in words and "--dtype" not in words and "--device" not in words
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


def test_a_server_that_dies_is_reported(serve, capsys):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert serve.wait_until_ready(process, 9) is False
    assert "stopped with exit code 3" in capsys.readouterr().out
