"""Measure the phases of each start (:mod:`.phases`). The launcher and the ranks record why an attempt failed."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import stagereg.extensions.goodput.phases as phases
from stagereg.launch.extension import End, LaunchExtension, RankExtension, ThisRank
from stagereg.launch.rank import LAUNCHER, is_rank

_NOTE = "failure"  # key of the failure that an attempt records for the next attempt


class GoodputLauncher(LaunchExtension):
    """Records a failure that the launcher detects, for the next attempt. Overwrites a failure that a rank recorded."""

    def after(self, end: End) -> None:
        if end.failed and end.attempt.task.index == 0:
            seen = {"why": str(end), "noticed": end.noticed, "ended": time.time(), "restart": end.attempt.number + 1}
            end.attempt.store.leave(_NOTE, seen)


class GoodputRank(RankExtension):
    """Measures the phases of this process's start, and records a failure of this rank for the next attempt."""

    def __init__(self) -> None:
        self._previous: dict[str, Any] | None = None  # the failure of the previous attempt, on rank 0

    def marked(self, moment: str) -> None:
        phases.mark(moment)
        if moment == "imported" and is_rank() and {LAUNCHER, "TORCHELASTIC_RUN_ID"} & os.environ.keys():
            phases.mark("launched", phases.process_start(str(os.getppid())))

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        self._previous = rank.store.take(_NOTE) if rank.rank == 0 else None
        return nullcontext()

    def recording(self, directory: str, attempt: str, rank: int) -> None:
        if rank == 0:
            phases.begin(Path(directory), attempt, self._previous)

    def noted(self, rank: ThisRank, why: str) -> None:
        """Record why this attempt failed, unless another rank has done so. Ignores an unreachable rendezvous store."""
        with contextlib.suppress(RuntimeError):
            if rank.store.is_first("a failure"):
                rank.store.leave(_NOTE, {"why": why, "noticed": time.time()})


launcher, rank = GoodputLauncher, GoodputRank
