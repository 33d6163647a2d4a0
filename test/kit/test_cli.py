# SPDX-License-Identifier: Apache-2.0
"""What holds for every verb: schemas, exit codes, error reports, missing packages, text output."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from sglang.kdtree import schemas
from sglang.kdtree.cli import VERBS, build_parser, main
from sglang.kdtree.errors import KitError
from sglang.kdtree.optional import PIP_NAME, require
from sglang.kdtree.result import read_json, require_schema, write_json


def verb_names():
    return ["-".join(path) for path in VERBS]


@pytest.mark.parametrize("name", verb_names())
def test_every_verb_has_a_valid_schema(name):
    jsonschema.Draft202012Validator.check_schema(schemas.SCHEMAS[name])


def test_every_verb_takes_json_and_output():
    for path in VERBS:
        needed = {"plan": ["--model", "x"], "compare": ["a", "b"], "schema": ["plan"]}.get(path[-1], [])
        args = build_parser().parse_args([*path, *needed, "--json", "--output", "f"])
        assert args.json is True and args.output == Path("f")


def test_an_unknown_flag_names_its_verbs_help(capsys):
    assert main(["bench", "longctx", "--ulr", "x"]) == 2
    assert "bench longctx --help" in capsys.readouterr().err


def test_schemas_are_strict():
    """A key too many or too few is refused, so that the documented form is the real one."""
    good = {"schema": "sglang.kdtree/doctor/1", "exit_code": 0, "counts": {"OK": 0, "WARN": 0, "FAIL": 0}, "checks": []}
    jsonschema.validate(good, schemas.SCHEMAS["doctor"])
    for bad in (good | {"more": 1}, {k: v for k, v in good.items() if k != "checks"}, good | {"exit_code": 7}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schemas.SCHEMAS["doctor"])


def test_schema_verb(capsys):
    assert main(["schema", "plan"]) == 0
    assert json.loads(capsys.readouterr().out) == schemas.SCHEMAS["plan"]


def test_an_error_in_words(capsys):
    assert main(["plan", "--model", "/nowhere/config.json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in ("error:", "expected:", "got:", "remedy:"):
        assert word in captured.err


def test_an_output_that_cannot_be_written(capsys, data, tmp_path):
    (tmp_path / "file").write_text("")
    assert (
        main(
            [
                "plan",
                "--model",
                str(data / "deepseek_v3.json"),
                "--context",
                "1000",
                "--output",
                str(tmp_path / "file" / "x"),
            ]
        )
        == 2
    )
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what", "expected", "got"),
    [
        ("", "doctor|plan|bench|probe|schema", "one of them", "none"),
        ("bench", "longctx|compare|throughput", "one of them", "none"),
        ("probe nothing", "commit-length|gpu|moe|verify", "'commit-length', 'gpu'", "'nothing'"),
        ("plan", "--model", "a value", "none"),
        ("plan --model", "--model", "one argument", "none"),
        ("plan --model x --gpus two", "--gpus", "whole number, at least 1", "'two'"),
        ("plan --model x --context 200q", "--context", "such as 4096, 200k or 1.5M", "'200q'"),
        ("plan --model x --context 0.5", "--context", "such as 4096, 200k", "'0.5'"),
        ("plan --model x --mem-fraction-static most", "--mem-fraction-static", "a number", "'most'"),
        ("plan --model x --kv-dtype int2", "--kv-dtype", "one of 'bf16', 'fp8'", "'int2'"),
        ("plan --model x --fast", "--fast", "an argument that this verb has", "--fast"),
        ("plan --mod x", "--model", "a value", "none"),  # no abbreviations: a later flag would change their meaning
        ("bench longctx --contexts 1k,long", "--contexts", "such as 1k,16k", "'1k,long'"),
    ],
)
def test_bad_arguments_have_the_form_of_every_error(capsys, words, what, expected, got):
    code = main([*words.split(), "--json"])
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schemas.SCHEMAS["error"])
    error = document["error"]
    assert code == document["exit_code"] == 2 and error["what"] == what
    assert expected in error["expected"].replace('"', "'") and got in error["got"] and "--help" in error["remedy"]
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {what}\n  expected: ")


def test_json_behind_two_dashes_is_not_ours(capsys):
    assert main(["bench", "longctx", "--url", "x", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("module", sorted(PIP_NAME))
def test_a_missing_package_is_named_as_pip_knows_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KitError) as caught:
        require(module, needed_for="this")
    assert caught.value.remedy == f"Run: python -m pip install {PIP_NAME[module]}"


def test_without_rich_there_is_still_a_message(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["doctor"]) == 2
    assert "pip install rich" in capsys.readouterr().err
    assert main(["doctor", "--json"]) == 2
    assert "pip install rich" in json.loads(capsys.readouterr().out)["error"]["remedy"]


def test_files_are_replaced_in_one_step(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": 1})
    write_json(path, {"x": 2})
    assert read_json(path, argument="x") == {"x": 2}
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_nan_never_reaches_a_document(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x.json", {"x": float("nan")})


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(KitError, match="writable"):
        write_json(tmp_path / "folder", {"x": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("document", [[], {}, {"schema": "sglang.kdtree/plan/2"}])
def test_a_document_of_another_kind_is_refused(document):
    with pytest.raises(KitError, match="sglang.kdtree plan --output"):
        require_schema(document, verb="plan", source="x")


def test_a_reader_that_leaves_early_and_a_full_disk(data):
    plan = [sys.executable, "-m", "sglang.kdtree", "plan", "--json", "--model", str(data / "kimi_k2_6.json")]
    with subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(timeout=600) == 0
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(plan, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 2 and done.stderr == "error: standard output: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("path", VERBS)
def test_every_verb_explains_itself(path, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*path, "--help"])
    assert caught.value.code == 0 and "--json" in capsys.readouterr().out


def test_the_module_runs():
    """python -m sglang.kdtree, as an operator types it."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang.kdtree", "--help"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout and "Exit codes" in done.stdout
