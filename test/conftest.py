# SPDX-License-Identifier: Apache-2.0
"""What all tests share: tests of the GPU are skipped, and said to be, where there is none."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def cuda_is_available() -> bool:
    import torch  # takes seconds, and many tests never need it

    return torch.cuda.is_available()
