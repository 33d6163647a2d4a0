# SPDX-License-Identifier: Apache-2.0
import pytest

from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs


@pytest.fixture(autouse=True)
def published_flags():
    """What the code under test reads: the flags of a server on a CPU."""
    get_context().set_server_args(ServerArgs(model_path="none", device="cpu"))
