"""Makes a run exit with code 75 if a signal arrives before its first step, because no step is lost."""

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
    """Makes the launcher exit with code 75 if a signal terminated its ranks before their first step."""

    def __init__(self) -> None:
        self._unstepped: signal.Signals | None = None  # the signal that terminated ranks before any step

    def ending(self, end: End) -> bool:
        """Note the signal that terminated the ranks. Return False if a rank exited otherwise or had taken a step.

        Exit code 75 does not identify the signal. For that code, note the signal that the launcher forwarded.
        """
        self._unstepped = None
        if end.codes and {*end.codes.values()} <= {RESUME_CODE, *(-each for each in SIGNALS)}:
            received = next((each for each in SIGNALS if -each in end.codes.values()), end.forwarded or signal.SIGTERM)
            with contextlib.suppress(RuntimeError):  # the store raises it if the machine of the store has failed
                self._unstepped = None if end.attempt.store.get(STEPPED) else received
        return self._unstepped is not None

    def after(self, end: End) -> Exit | None:
        received = self._unstepped if end.stopped is None else None if end.started else end.stopped
        return None if received not in SIGNALS or end.errors else Exit(RESUME_CODE, describe_unstepped(received))


class PreemptionRank(RankExtension):
    """Makes a process without a launcher exit with code 75, and reports the first step of a rank to its launcher."""

    def began(self) -> None:
        if LAUNCHER not in os.environ:  # otherwise the launcher decides
            exit_before_first_step()

    def around(self, rank: ThisRank, cfg: Any) -> AbstractContextManager[object]:
        def report() -> None:
            with contextlib.suppress(RuntimeError):  # the store raises it if the machine of the store has failed
                rank.store.set(STEPPED, True)

        if rank.launched:
            first_step.call_at_first_step(report)
        return nullcontext()


launcher, rank = PreemptionLauncher, PreemptionRank
