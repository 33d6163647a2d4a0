# SPDX-License-Identifier: Apache-2.0
import pytest
from srt.zygote import Zygote


@pytest.fixture(scope="session")
def fresh_process():
    """run(code, **env) -> Result, in a process that has not imported sglang."""
    zygote = Zygote()
    yield zygote.run
    zygote.close()
