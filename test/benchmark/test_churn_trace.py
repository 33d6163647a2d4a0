# SPDX-License-Identifier: Apache-2.0
"""python -m kv_churn --trace: what is wrong with a file is an error that names the file and the line."""

import json
import sys

import pytest

LINE = {"timestamp": 0, "input_length": 900, "output_length": 40, "hash_ids": [1, 2]}
NUMBERS = "expected an object with numbers timestamp, input_length, output_length and a list hash_ids"


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """refused(content of the file, options) -> what the command says, before it does anything."""
    command = pytest.importorskip("kv_churn.__main__", reason="the fork of sglang is not installed")
    monkeypatch.setattr(command, "header", lambda args: pytest.fail("it was accepted"))
    monkeypatch.setattr(command.torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(command, "get_context", lambda: pytest.fail("it was accepted"))
    path = tmp_path / "trace.jsonl"

    def call(content, *options):
        path.write_bytes(content)
        monkeypatch.setattr(sys, "argv", ["kv_churn", "--trace", str(path), *options])
        with pytest.raises(SystemExit) as done:
            command.main()
        said = capsys.readouterr().err
        assert done.value.code == 2 and "Traceback" not in said
        return said.partition("kv_churn: error: ")[2].strip().replace(str(path), "FILE")

    return call


def changed(**values):
    return json.dumps(LINE | values)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (changed(timestamp=float("nan")), "invalid character"),
        (changed(timestamp=float("inf")), "invalid character"),
        (changed(timestamp=10**400), "out of range"),
        (changed(timestamp=-1), ">= 0.0 - at `$.timestamp`"),
        (changed(timestamp="0"), "got `str` - at `$.timestamp`"),
        (changed(timestamp=True), "got `bool` - at `$.timestamp`"),
        (changed(input_length=-5), ">= 1 - at `$.input_length`"),
        (changed(input_length=0), ">= 1 - at `$.input_length`"),
        (changed(input_length=900.5), "got `float` - at `$.input_length`"),
        (changed(output_length=-1), ">= 0 - at `$.output_length`"),
        (changed(output_length=None), "got `null` - at `$.output_length`"),
        (changed(hash_ids=7), "got `int` - at `$.hash_ids`"),
        (changed(hash_ids=[[1, 2]]), "got `array` - at `$.hash_ids[0]`"),
        (changed(hash_ids=[1 << 60]), "<= 1099511627776 - at `$.hash_ids[0]`"),
        ("[1, 2]", "got `array`"),
        ("{}", "missing required field `timestamp`"),
        ('{"timestamp": 0, "input', "malformed"),
        ("[" * 100_000, "got `array`"),
        (b"\xff\xfe{}", "invalid character"),
    ],
    ids=range(19),
)
def test_a_bad_line_is_named(refused, line, why):
    """Behind a good one and a blank one."""
    line = line if isinstance(line, bytes) else line.encode()
    said = refused(json.dumps(LINE).encode() + b"\n \n" + line + b"\n")
    assert said.startswith(f"FILE, line 3: {NUMBERS}; got ") and why in said


@pytest.mark.parametrize(
    ("content", "where", "got"), [(b"", "line 1", "an empty file"), (b"\n  \n\r\n", "line 3", "blank lines only")]
)
def test_a_file_without_a_request(refused, content, where, got):
    assert refused(content).startswith(f"FILE, {where}: expected a request, an object with numbers timestamp")
    assert refused(content).endswith(f"; got {got}")


def test_a_request_that_no_context_holds(refused):
    said = refused(changed(input_length=1 << 20).encode())
    assert said == (
        "FILE, line 1: expected a request that fits, --context is 8192: raise it, or --shrink; got 65536 + 2 tokens"
    )


def test_a_request_that_no_pool_holds(refused):
    said = refused(changed(input_length=9000).encode(), "--shrink", "8", "--pool-tokens", "1000")
    assert (
        said.startswith("FILE, line 1: expected a request that fits, --pool-tokens is 1000") and "got 1125 + 5" in said
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "--requests: expected 1 or more; got 0"),
        (["--ranks", "0"], "--ranks: expected 1 or more; got 0"),
        (["--steps-per-second", "nan"], "--steps-per-second: expected a number above 0; got nan"),
        (["--steps-per-second", "0"], "--steps-per-second: expected a number above 0; got 0.0"),
    ],
)
def test_options_that_leave_nothing_to_replay(refused, options, message):
    assert refused(changed().encode(), *options) == message


def test_a_file_that_is_not_there(refused, tmp_path):
    assert "No such file" in refused(b"", "--trace", str(tmp_path / "none"))


def test_blank_lines_are_no_requests(tmp_path):
    """Nor do they count as one of --requests."""
    traces = pytest.importorskip("kv_churn.traces")
    path = tmp_path / "trace.jsonl"

    def read(text, limit=9):
        path.write_text(text)
        return list(traces.mooncake(path, shrink=4, steps_per_second=100, limit=limit))

    lines = [changed(timestamp=at) for at in (0, 10, 20)]
    plain = read("\n".join(lines))
    assert [request.arrival for request in plain] == [0, 1, 2]
    assert read("\n" + "\n \n".join(lines) + "\n\n\t\r\n") == plain
    assert read("\n\n" + "\n\n".join(lines), limit=2) == plain[:2]
