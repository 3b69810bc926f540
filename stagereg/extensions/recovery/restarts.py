"""Whether a run that has failed starts again: as often as the user allows, and not for an error that would come again.

A checkpoint newer than at the failure before is progress, and resets the count. An error of the program that comes
again at the same step ends the run, unless the error reports bad numbers: an older checkpoint may be free of them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import stagereg.base.record as record
from stagereg.launch.earlier import last_event
from stagereg.launch.rank import ATTEMPT

_RESTARTS = (ATTEMPT, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""The environment variables with how often a launcher, torchrun or Slurm has started a process again."""
_BAD_NUMBERS = re.compile(r"\bFloatingPointError\b|\bnan\b|\bnon-?finite\b|\bnot finite\b", re.IGNORECASE)


class Progress(NamedTuple):
    """How far a run has come, as its ranks have recorded it."""

    step: int | None = None  # the last step of the attempt; `None` before the first one
    stored: dict[str, Any] | None = None  # the event of the newest checkpoint in checkpoint storage
    near: dict[str, Any] | None = None  # the same, in a tier
    resumed: dict[str, Any] | None = None  # `step` and `dir` of the checkpoint there that the run resumed from last

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint that the run has made."""
        return max((each["step"] for each in (self.stored, self.near) if each is not None), default=None)

    @classmethod
    def of(cls, directory: str, attempt: str) -> Progress:
        """Read the progress of an attempt: its last step, and the newest checkpoint of all attempts of its run."""
        newest: dict[bytes, dict[str, Any]] = {}
        paths = Path(directory).glob(record.FILES)  # if rank 0 has failed, another rank may have saved last
        for path, kind in itertools.product(paths, (b"step", b"write", b"tier", b"begin", b"restart")):
            event = last_event(path, kind, attempt if kind == b"step" else record.run_of(attempt))
            if event is not None and event["t"] >= newest.get(kind, event)["t"]:
                newest[kind] = event
        begun = newest.get(b"restart") or newest.get(b"begin", {})  # a run begins once
        own = begun.get("source") and begun["source"].rpartition("/")[0] == begun.get("dir")
        resumed = {"step": begun["restored"], "dir": begun["dir"]} if own else None
        return cls(newest.get(b"step", {}).get("step"), newest.get(b"write"), newest.get(b"tier"), resumed)


class Restarts:
    """Decides for one run."""

    def __init__(self, most: int) -> None:
        self.count = 0  # of restarts
        self.progressed = False  # whether the run has made a checkpoint since
        self.most, self._left = most, most  # restarts without progress
        self._newest: int | None = None  # the step of the newest checkpoint at the last failure
        self._causes = set[str]()  # of the last failure
        self._step: int | None = None  # the last step before the failure

    def refusal(self, errors: Mapping[int, str], killed: bool, progress: Progress) -> str | None:
        """Return why a run that has failed is not to start again; ``None`` if it is, which is counted.

        ``errors`` are the causes that its ranks have reported; ``killed``: whether a process was lost instead.
        """
        causes = {text.strip().rpartition("\n")[2] for text in errors.values()}  # of a traceback the exception
        again = {each for each in causes & self._causes if not _BAD_NUMBERS.search(each)}
        if not killed and again and progress.step == self._step:
            where = "before its first step" if progress.step is None else f"after step {progress.step}"
            return f"\nIt is not started again: the same error has come twice {where}."
        self._causes, self._step = causes, progress.step
        if progress.newest is not None and (self._newest is None or progress.newest > self._newest):
            self._left, self._newest, self.progressed = self.most, progress.newest, True
        if self._left == 0:
            return f"\nIt is not started again: that was done {self.most} times without a new checkpoint (restarts)."
        self._left -= 1
        self.count += 1
        return None

    def __str__(self) -> str:
        return f"starting again, restart {self.count}; without a new checkpoint {self._left} more"


def is_automatic() -> bool:
    """Whether a launcher or a scheduler has started this process again, and not a person."""
    return any(os.environ.get(each, "0") not in ("", "0") for each in _RESTARTS)
