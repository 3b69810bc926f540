"""Kills processes at the named points: an observer in the ranks and in their writer processes.

A module of its own, since a writer process imports it: the observer goes there with the storage, whose attribute it is.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stagereg.checkpoint.failpoints as failpoints

ONE, ALL, WRITER = "one rank", "all ranks", "the writer"
RANDOM = "a random moment"


@dataclass(frozen=True)
class Kill:
    """One kill: at the ``nth`` time that ``rank`` reaches a point, or at a fraction of a run's duration."""

    victim: str
    when: str = RANDOM
    rank: int = 0
    nth: int = 1
    moment: float = 0.0


@dataclass
class Observer:
    """Records what a process has reached, and kills when it is time. Goes to the writer process with the storage."""

    kills: Sequence[Kill]
    rank: int
    folder: Path
    process: int
    seen: Counter[str] = field(default_factory=Counter)
    checkpointer: Any = None

    def __call__(self, name: str) -> None:
        self.seen[name] += 1
        append_line(self.folder, self.rank, point=name, at=time.monotonic(), writer=os.getpid() != self.process)
        for i, kill in enumerate(self.kills):
            if (kill.when, kill.rank) == (name, self.rank) and kill.nth <= self.seen[name] and self._first(i):
                self._kill(kill.victim)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "checkpointer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if os.getpid() != self.process:
            failpoints.watch(self)

    def _first(self, i: int) -> bool:
        """Whether this kill has not happened yet: a writer process that was replaced comes to the same point again."""
        try:
            (self.folder / f"killed-{i}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _kill(self, victim: str) -> None:
        in_rank = os.getpid() == self.process
        if victim == ALL:
            # The group of the ranks, which a writer process is not in; it ends with its parent.
            os.killpg(os.getpgid(self.process), signal.SIGKILL)
        elif victim == ONE:
            os.kill(self.process, signal.SIGKILL)
        elif not in_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.checkpointer is not None and self.checkpointer.writer_pid is not None:
            os.kill(self.checkpointer.writer_pid, signal.SIGKILL)


def append_line(folder: Path, rank: int, **what: Any) -> None:
    """Append a line that outlives a SIGKILL."""
    descriptor = os.open(folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (json.dumps(what) + "\n").encode())
    os.close(descriptor)
