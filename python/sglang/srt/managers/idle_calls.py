# SPDX-License-Identifier: Apache-2.0
"""What parts of a server want to be called for when its scheduler has no request left.

The scheduler asks in every turn of its idle loop: a call that has nothing to do returns
at once.
"""

from typing import Callable, List

_calls: List[Callable[[], None]] = []


def call_when_idle(call: Callable[[], None]) -> None:
    _calls.append(call)


def run_idle_calls(first: Callable[[], None]) -> None:
    for call in (first, *_calls):
        call()
