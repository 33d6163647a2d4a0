# SPDX-License-Identifier: Apache-2.0
"""A server that cannot do what it is asked stops at start-up and says why, on its last lines."""

import subprocess
import sys

import pytest
from e2e.servers import ENVIRONMENT, TARGET, speculative

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

TREE = [*TARGET, "--attention-backend", "kdtree_sm120", *speculative("DDTREE")]
# test/srt has every refusal; these two show that one on the command line, and one where the model is loaded, end the
# whole server with the message and not in a traceback of another process.
CASES = {
    "while arguments are resolved": (
        [*TREE, "--speculative-num-draft-tokens", "129"],
        "ValueError: DDTREE verifies at most 128 nodes a request; --speculative-num-draft-tokens is 129.",
    ),
    "while the model is set up": (
        [*TARGET, "--attention-backend", "kdtree_sm120", "--page-size", "48", "--chunked-prefill-size", "4800"],
        "ValueError: kdtree_sm120 needs a page size that is a power of two, and --page-size is 48.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=list(CASES))
def test_start_up_is_refused(arguments, message):
    import os

    result = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *arguments, "--port", "0"],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode != 0
    assert message in result.stderr
