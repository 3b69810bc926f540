"""Exit a run with code 75 after a signal before its first step, since no step is lost."""

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
    """Decides the exit code for the ranks that the launcher started."""

    def __init__(self) -> None:
        self._unstepped: signal.Signals | None = None  # the signal that terminated ranks before any step

    def ending(self, end: End) -> bool:
        self._unstepped = _find_unstepped(end)
        return self._unstepped is not None

    def after(self, end: End) -> Exit | None:
        received = self._unstepped if end.stopped is None else None if end.started else end.stopped
        if received not in SIGNALS or end.errors:
            return None
        return Exit(RESUME_CODE, describe_unstepped(received))


class PreemptionRank(RankExtension):
    """Lets a process that no launcher started exit with code 75; reports the first step of a rank to its launcher."""

    def began(self) -> None:
        if LAUNCHER not in os.environ:  # otherwise the launcher decides
            exit_before_first_step()

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        def report() -> None:
            with contextlib.suppress(RuntimeError):  # raised by the store if its machine has failed
                rank.store.set(STEPPED, True)

        if rank.launched:
            first_step.call_at_first_step(report)
        return nullcontext()


def _find_unstepped(end: End) -> signal.Signals | None:
    """Return the signal that terminated the ranks, if no rank exited for another reason and no rank had taken a step.

    Exit code 75 does not identify the signal, so ``end.forwarded`` is used, the signal that the launcher received.
    """
    if not end.codes or not {*end.codes.values()} <= {RESUME_CODE, *(-each for each in SIGNALS)}:
        return None
    received = next((each for each in SIGNALS if -each in end.codes.values()), end.forwarded or signal.SIGTERM)
    with contextlib.suppress(RuntimeError):  # raised by the store if its machine has failed
        return None if end.attempt.store.get(STEPPED) else received
    return None


launcher, rank = PreemptionLauncher, PreemptionRank
