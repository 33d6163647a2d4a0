# SPDX-License-Identifier: Apache-2.0
"""What the parts share: one job is one Engine or server, and several run at once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from one_rank.__main__ import last_error

RANKS = 2
# Jobs of a stage measure when those of the stages before have ended, one after another; LOUD ones do not wait.
LOUD, TIMED, LAST = range(3)


@dataclasses.dataclass(frozen=True)
class Job:
    part: str
    name: str
    work: Callable[[], Any]  # -> what rows() of its part takes
    stage: int = LOUD


class Run:
    """One call of the program: its options, its folders and its time."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.device: str = args.device
        self.logs: Path = args.logs or folder
        self.start = time.monotonic()
        self.folders = {LOUD: folder, TIMED: folder, LAST: folder / "last"}  # of a stage's Engines
        self.folders[LAST].mkdir()
        self._held = {stage: self._hold(self.turn(stage)) for stage in (TIMED, LAST)}
        self._lock = threading.Lock()

    def turn(self, stage: int) -> Path:
        """A file; whoever has its lock measures."""
        return self.folders[stage] / "turn"

    @staticmethod
    def _hold(path: Path) -> IO:
        file = open(path, "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def give_turn(self, stage: int) -> bool:
        """Let the jobs of a stage measure. -> False if they already may"""
        held = self._held.pop(stage, None)
        if held is None:
            return False
        held.close()
        return True

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        """Seconds until everything ends."""
        return max(1.0, self.args.budget - self.elapsed())

    def quiet_left(self) -> float:
        """Seconds until what is not timed should have ended."""
        return max(1.0, self.args.quiet - self.elapsed())

    def say(self, text: str) -> None:
        with self._lock:
            print(f"[{self.elapsed():.0f} s] {text}", flush=True)


def failed(reason: str) -> dict:
    return {"error": " ".join(reason.split())[:600]}


@contextlib.contextmanager
def explained(log: Path) -> Iterator[None]:
    """An error of a client says little where its server has failed: add what the server's log says last."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{last_error(log)}; {type(error).__name__}: {error}"[:600]) from error
