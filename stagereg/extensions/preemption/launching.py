"""Ends a run with 75 that gets a signal before its first step, since no step is lost by it."""

from __future__ import annotations

import contextlib
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import stagereg.base.first_step as first_step
from stagereg.base.signals import SIGNALS
from stagereg.errors import RESUME_CODE
from stagereg.extensions.preemption.signals import describe_unstepped, exit_before_first_step
from stagereg.launch.extension import End, Exit, LaunchExtension, RankExtension, ThisRank
from stagereg.launch.rank import LAUNCHER
from stagereg.launch.run_store import STEPPED


class PreemptionLauncher(LaunchExtension):
    """Decides for the ranks that the launcher has started."""

    def __init__(self) -> None:
        self._unstepped: signal.Signals | None = None  # has ended ranks, and no rank had taken a step

    def ending(self, end: End) -> bool:
        self._unstepped = _find_unstepped(end)
        return self._unstepped is not None

    def after(self, end: End) -> Exit | None:
        received = self._unstepped if end.stopped is None else None if end.started else end.stopped
        if received not in SIGNALS or end.errors:
            return None
        return Exit(RESUME_CODE, describe_unstepped(received))


class PreemptionRank(RankExtension):
    """Ends a process that the launcher has not started, and reports the first step of a rank to the launcher."""

    def began(self) -> None:
        if LAUNCHER not in os.environ:  # else the launcher decides
            exit_before_first_step()

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        def report() -> None:
            with contextlib.suppress(RuntimeError):  # of the store, which is gone
                rank.store.set(STEPPED, True)

        if rank.launched:
            first_step.call_at_first_step(report)
        return nullcontext()


def _find_unstepped(end: End) -> signal.Signals | None:
    """Return the signal that has ended ranks, if nothing else has ended one, and no rank had taken a step.

    A rank that exits with 75 does not name the signal; ``end.forwarded`` is the one that the launcher got.
    """
    if not end.codes or not {*end.codes.values()} <= {RESUME_CODE, *(-each for each in SIGNALS)}:
        return None
    received = next((each for each in SIGNALS if -each in end.codes.values()), end.forwarded or signal.SIGTERM)
    with contextlib.suppress(RuntimeError):  # of the store, where the machine that had it is lost
        return None if end.attempt.store.get(STEPPED) else received
    return None


launcher, rank = PreemptionLauncher, PreemptionRank
