"""Kills ranks at the named points."""

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

ONE, ALL = "one rank", "all ranks"
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
    """Records what a rank has reached, and kills when it is time."""

    kills: Sequence[Kill]
    rank: int
    folder: Path
    seen: Counter[str] = field(default_factory=Counter)

    def __call__(self, name: str) -> None:
        self.seen[name] += 1
        append_line(self.folder, self.rank, point=name, at=time.monotonic())
        for i, kill in enumerate(self.kills):
            if (kill.when, kill.rank) == (name, self.rank) and kill.nth <= self.seen[name]:
                (self.folder / f"killed-{i}").write_text(repr(time.monotonic()))
                if kill.victim == ALL:
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


def append_line(folder: Path, rank: int, **what: Any) -> None:
    """Append a line that outlives a SIGKILL."""
    descriptor = os.open(folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (json.dumps(what) + "\n").encode())
    os.close(descriptor)
