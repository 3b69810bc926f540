"""One thread that works off saves in order, and failures that cannot get lost.

At most two saves are under way: one being worked on and one waiting, which matches a stager that hands out two copies.
A failure is kept until it is raised or logged: by the next call that asks, or else at the end of the job or process
(:mod:`stagereg.shutdown`). It is kept without tracebacks, which would keep the staged memory alive; they are logged at
level DEBUG.

A task that takes longer than the time-out counts as failed from then on, and the thread as hanging until the task ends:
a thread that waits for the storage cannot be ended. So it is a daemon thread, and every wait here ends with the
time-out.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import stagereg.shutdown as shutdown
from stagereg.checkpoint.causes import causes
from stagereg.errors import CheckpointError

__all__ = ["Background", "BackgroundTask"]

_MOST_UNDER_WAY = 2
_LOOK_S = 0.05  # how often one looks whether a task has been begun
_JOIN_S = 5.0
_log = logging.getLogger(__name__)


class BackgroundTask(Protocol):
    """What the thread does for one save. All but ``run`` and ``back`` are called on the training thread."""

    def run(self) -> None:
        """Do it. What this raises is the failure."""

    def late(self) -> CheckpointError:
        """Return the failure to report: the time-out has passed and the task has not ended."""

    def back(self, error: BaseException | None) -> None:
        """The task has ended after :meth:`late`, well or with ``error``. Called on the thread."""

    def abandon(self) -> None:
        """The task is given up: it must not complete anything from now on."""


class Background:
    """The thread. All methods are for the training thread, and for the end of the process, which may come while that
    still runs; none may be called from inside a task. In a forked child nothing is under way: it has no such thread.

    Args:
        timeout_s: seconds that one task may take, from when the one before it has ended.
        warn: called with each failure instead of raising it; ``None`` to raise.
    """

    def __init__(self, timeout_s: float = math.inf, warn: Callable[[CheckpointError], None] | None = None) -> None:
        self._timeout_s = timeout_s
        self._warn = warn
        self._queue: queue.SimpleQueue[tuple[Background, _Entry] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._under_way: deque[_Entry] = deque()
        self._looking = threading.Lock()
        self._process = os.getpid()
        self._failures: deque[CheckpointError] = deque()
        weakref.finalize(self, self._queue.put, None)  # or the thread of one that was never shut would stay
        shutdown.wait_for(self)

    @property
    def hanging(self) -> bool:
        """Whether the task being worked on has passed the time-out, which was reported, and has not ended."""
        first = self._first()
        return first is not None and first.late

    def wait_for_slot(self) -> None:
        """Wait until another task may be submitted, or until the first one has taken too long."""
        while (first := self._first()) is not None and not first.late and len(self._under_way) >= _MOST_UNDER_WAY:
            self._await(first, math.inf)

    def submit(self, task: BackgroundTask) -> None:
        """Have ``task`` run after those before it; what it raises is kept for :meth:`raise_failure`.

        Raises:
            CheckpointError: there is no thread yet, and the system refuses to start one.
        """
        if self._thread is None:
            thread = threading.Thread(target=_work, args=(self._queue,), name="stagereg-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CheckpointError(f"No thread to write checkpoints could be started: {error}") from error
            self._thread = thread
        place = _Entry(task)
        self._under_way.append(place)
        self._queue.put((self, place))

    def drain(self, limit_s: float = math.inf) -> bool:
        """Wait until every task has ended, well or not; False if one has taken too long, or ``limit_s`` has passed."""
        until = time.monotonic() + limit_s
        while (first := self._first()) is not None and not first.late and time.monotonic() < until:
            self._await(first, until)
        return first is None

    def finish(self) -> bool:
        """Drain; log the failures if they are warnings. See :class:`stagereg.shutdown.BackgroundWork`."""
        ended = self.drain()
        if self._warn is not None:
            self.raise_failure()
        return ended

    def raise_failure(self) -> None:
        """Raise the first failure not reported yet; later ones are logged, since one call can raise only one.

        If failures are warnings, log them all instead.
        """
        if self._warn is None:
            failure = self.take_failure()
            if failure is not None:
                raise failure
        else:
            for failure in self._taken():
                self._warn(failure)

    def take_failure(self) -> CheckpointError | None:
        """Return the first failure not reported yet, also if failures are warnings; log later ones."""
        failures = self._taken()
        for later in failures[1:]:
            _log.error("%s", later)
        return failures[0] if failures else None

    def shut(self) -> None:
        """End the thread after its last task; one that hangs is left and completes nothing. Twice is harmless."""
        for place in self._under_way:
            place.task.abandon()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(0 if self._under_way else _JOIN_S)

    def _taken(self) -> list[CheckpointError]:
        self._first()
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        for failure in failures:
            shutdown.withdraw_error(failure)
        return failures

    def _first(self) -> _Entry | None:
        """Return the first task that has not ended, if there is one; report it once it takes too long."""
        if os.getpid() != self._process:
            self._under_way.clear()
            return None
        with self._looking:
            while self._under_way and self._under_way[0].over.is_set():
                self._under_way.popleft()
            if not self._under_way:
                return None
            first = self._under_way[0]
            if (failure := first.lateness(self._timeout_s)) is not None:
                self._keep(failure)
            return first

    def _await(self, first: _Entry, until: float) -> None:
        """Wait for a task, no longer than ``until`` on the monotonic clock or its time-out."""
        now = time.monotonic()
        left = _LOOK_S if first.begun is None else first.begun + self._timeout_s - now
        first.over.wait(max(0.0, min(left, until - now, threading.TIMEOUT_MAX)))

    def _keep(self, failure: CheckpointError) -> None:
        if self._warn is None:
            shutdown.report_error(failure)
        self._failures.append(failure)

    def _run(self, place: _Entry) -> None:
        failed: BaseException | None = None
        place.begun = time.monotonic()
        try:
            place.task.run()
        except BaseException as error:
            failed = error
            _log.debug("A save failed.", exc_info=error)
            for connected in causes(error):
                connected.__traceback__ = None
        if place.end():
            place.task.back(failed)
        elif failed is not None:
            self._fail(failed)
        place.over.set()

    def _fail(self, error: BaseException) -> None:
        failure = error if isinstance(error, CheckpointError) else CheckpointError(f"A save failed: {error}")
        if failure is not error:
            failure.__cause__ = error
        self._keep(failure)


class _Entry:
    """A task and its state in the queue."""

    def __init__(self, task: BackgroundTask) -> None:
        self.task = task
        self.begun: float | None = None
        self.over = threading.Event()
        self.late = False
        self._ended = False
        self._lock = threading.Lock()

    def lateness(self, timeout_s: float) -> CheckpointError | None:
        """Return the failure to report, the first time that the time-out has passed."""
        with self._lock:
            begun = self.begun
            if self.late or self._ended or begun is None or time.monotonic() < begun + timeout_s:
                return None
            self.late = True
            return self.task.late()

    def end(self) -> bool:
        """Note the end of the task; return whether it came too late."""
        with self._lock:
            self._ended = True
            return self.late


def _work(tasks: queue.SimpleQueue[tuple[Background, _Entry] | None]) -> None:
    while True:
        given = tasks.get()
        if given is None:
            return
        background, place = given
        background._run(place)
        # While it waits for the next task, the thread keeps nothing alive.
        del given, background, place
