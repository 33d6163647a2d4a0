# SPDX-License-Identifier: Apache-2.0
"""What a verb raises when it cannot do its job, and the exit codes of all verbs."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDING = 1  # the verb ran and found something that needs attention
EXIT_UNUSABLE = 2  # bad argument, unreadable input, unreachable server


def require_at_least(argument: str, value: float, least: float) -> None:
    """Also refuses NaN and infinity."""
    if not least <= value < float("inf"):
        raise KitError(
            what=argument,
            expected=f"a number of at least {least:g}",
            got=str(value),
            remedy="Correct it, or leave it out for the default.",
        )


class KitError(Exception):
    """A failure that the user can mend: names the input, what it should be, what came, what to do."""

    def __init__(self, *, what: str, expected: str, got: str, remedy: str):
        self.what = what
        self.expected = expected
        self.got = got
        self.remedy = remedy
        super().__init__(f"{what}: expected {expected}, got {got}. {remedy}")

    def to_dict(self) -> dict[str, str]:
        return {
            "what": self.what,
            "expected": self.expected,
            "got": self.got,
            "remedy": self.remedy,
        }
