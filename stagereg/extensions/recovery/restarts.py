"""Decides whether the launcher restarts a failed run. The user sets the maximum number of restarts without progress.

A run makes progress if it saves a checkpoint that is newer than at the previous failure. If an error recurs at the same
step, the run is not restarted, except after NaN or infinity, which an older checkpoint may not contain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from stagereg.launch.progress import Progress
from stagereg.launch.rank import ATTEMPT

_RESTARTS = (ATTEMPT, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Environment variables with the number of restarts by the launcher, by torchrun and by Slurm."""
_BAD_NUMBERS = re.compile(r"\bFloatingPointError\b|\bnan\b|\bnon-?finite\b|\bnot finite\b", re.IGNORECASE)


class Restarts:
    """Counts the restarts of one run, and decides whether the run is restarted again."""

    def __init__(self, most: int) -> None:
        self.count = 0  # number of restarts
        self.progressed = False  # whether the run has made a checkpoint
        self.most, self._left = most, most  # allowed and remaining restarts without progress
        self._newest: int | None = None  # the step of the newest checkpoint at the last failure
        self._causes = set[str]()  # causes of the last failure
        self._step: int | None = None  # the last step before the failure

    def refusal(self, errors: Mapping[int, str], killed: bool, progress: Progress) -> str | None:
        """Return why a failed run is not restarted, or ``None`` to restart it, which counts as one restart.

        ``errors``: the errors that ranks reported, by rank. ``killed``: whether a signal killed a process.
        """
        causes = {text.strip().rpartition("\n")[2] for text in errors.values()}  # the last line of a traceback
        again = {each for each in causes & self._causes if not _BAD_NUMBERS.search(each)}
        if not killed and again and progress.step == self._step:
            where = "before its first step" if progress.step is None else f"after step {progress.step}"
            return f"\nThe run is not restarted: the same error occurred twice {where}."
        self._causes, self._step = causes, progress.step
        if progress.newest is not None and (self._newest is None or progress.newest > self._newest):
            self._left, self._newest, self.progressed = self.most, progress.newest, True
        if self._left == 0:
            return f"\nThe run is not restarted: {self.most} restarts made no new checkpoint, which is the limit."
        self._left -= 1
        self.count += 1
        return None

    def __str__(self) -> str:
        return f"restart {self.count}; {self._left} more allowed without a new checkpoint"


def is_automatic() -> bool:
    """Return whether a launcher or a scheduler, instead of a user, restarted this process."""
    return any(os.environ.get(each, "0") not in ("", "0") for each in _RESTARTS)
