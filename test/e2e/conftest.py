# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from e2e.servers import MODELS


@pytest.fixture(scope="session")
def expected():
    """20 prompts with their greedy continuations and verify-step counts, computed in torch without a server."""
    entries = json.loads((MODELS / "expected_steps.json").read_text())["entries"]
    quota = {"code": 10, "prose": 4, "repeat": 3, "noise": 3}
    chosen = []
    for entry in entries:
        if quota.get(entry["kind"], 0):
            quota[entry["kind"]] -= 1
            chosen.append(entry)
    assert len(chosen) == 20
    return chosen
