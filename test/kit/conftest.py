# SPDX-License-Identifier: Apache-2.0
"""A way to call the command line that checks every JSON document against its schema, and a scripted server."""

import json
from pathlib import Path

import jsonschema
import pytest
from kit.scripted import ScriptedServer

from sglang.kdtree.cli import main
from sglang.kdtree.schemas import SCHEMAS

DATA = Path(__file__).parent / "data"


@pytest.fixture
def data():
    return DATA


@pytest.fixture
def cli(capsys):
    """cli("plan", ...) -> (exit code, JSON document); the document is valid by the verb's schema."""

    def call(*arguments):
        verb = 2 if arguments[0] in ("bench", "probe") else 1
        code = main([*map(str, arguments[:verb]), "--json", *map(str, arguments[verb:])])
        document = json.loads(capsys.readouterr().out)
        jsonschema.validate(document, SCHEMAS[document["schema"].split("/")[1]])
        assert document["exit_code"] == code
        return code, document

    return call


@pytest.fixture
def cli_error(cli):
    """The same for a call that must fail: the error, with every part of it filled in."""

    def call(*arguments):
        code, document = cli(*arguments)
        assert code == 2 and document["schema"] == "sglang.kdtree/error/1"
        error = document["error"]
        assert all(error.values()), error
        return error

    return call


@pytest.fixture
def scripted():
    server = ScriptedServer()
    server.pages |= {
        "/v1/models": (200, {"data": [{"id": "tiny", "max_model_len": 4096}]}),
        "/model_info": (200, {"model_path": "tiny"}),
        "/server_info": (
            200,
            {
                "version": "0.5.23",
                "speculative_algorithm": "DDTREE",
                "speculative_num_draft_tokens": 9,
                "attention_backend": "kdtree_sm120",
                "page_size": 1,
                "kdtree_verify": "on",
                "expert_distribution_recorder_mode": "per_pass",
            },
        ),
    }
    yield server
    server.close()
