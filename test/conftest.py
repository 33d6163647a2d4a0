# SPDX-License-Identifier: Apache-2.0
"""What all tests share: servers, the order of files, no limits that a slow machine could break, and a reason for each
test of the GPU that is skipped."""

import contextlib
import importlib.util
import os
import signal
from pathlib import Path

import hypothesis
import pytest
from e2e.servers import Servers
from srt.zygote import Zygote

# What a shell starts in the background ignores SIGINT, and so would all that the tests start and end with it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A third of the text that the tests import, and nothing of it imports torch. In a new environment nothing is compiled,
# and two workers would compile the same modules at the same time: the second one begins with these.
LIBRARIES = ["sympy", "pandas", "networkx", "openai", "IPython", "fastapi", "aiohttp"]
first = importlib.util.find_spec(LIBRARIES[0])
if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and first and not os.path.exists(first.cached):
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

# No example may fail for the time that it took.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# The files that take longest, roughly, in seconds of a core: they start first, or one would run alone at the end.
SECONDS = {
    "srt/mem_cache/test_defrag_server.py": 150,
    "e2e/test_small_model.py": 95,
    "overlay/test_each_edit.py": 80,
    "e2e/test_triton_interpreted.py": 70,
    "kit/test_server.py": 60,
    "e2e/test_oracle.py": 55,
    "scripts/test_serve_small_model.py": 45,
    "docs/test_commands.py": 40,
    "srt/layers/attention/test_kdtree_triton_block.py": 26,
    "kernels/test_build.py": 25,
    "overlay/test_series.py": 22,
    "overlay/test_wheel.py": 21,
    "e2e/test_other_paths.py": 20,
    "e2e/test_ddtree_adaptive.py": 20,
    "models/test_offline_walk.py": 20,
    "kit/test_cli.py": 18,
    "srt/test_loudness.py": 15,
    "benchmark/test_arms.py": 14,
    "srt/layers/attention/test_kdtree_triton_graphs.py": 13,
    "e2e/test_bad_input.py": 12,
    "kit/test_deploy.py": 10,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    gone = [name for name in SECONDS if not (here / name).exists()]
    assert not gone, f"SECONDS names what is no file: {gone}"
    items.sort(key=lambda item: -SECONDS.get(item.path.relative_to(here).as_posix(), 0))
    if not os.environ.get("LONG"):
        for item in items:
            for mark, does in (("long", "takes minutes"), ("network", "asks the package index")):
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"{does}: make test LONG=1"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def cuda_is_available() -> bool:
    import torch  # takes seconds, and many tests never need it

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    pool = request.config.stash[POOL] = Servers(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def fresh_process():
    """run(code, **env) -> Result, in a process that has not imported sglang."""
    zygote = Zygote()
    yield zygote.run
    zygote.close()


POOL = pytest.StashKey[Servers]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """No server runs on, and takes a core, beside tests that need none."""
    result = yield
    pool = item.config.stash.get(POOL, None)
    if pool is not None and "servers" not in getattr(nextitem, "fixturenames", ()):
        pool.retire()
    return result
