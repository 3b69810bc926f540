"""One thread that works off saves in order, and failures that cannot get lost.

At most two saves are under way: one being worked on and one waiting, which matches a stager that hands out two copies.
A failure is kept until somebody is told: the next call that asks, or else the end of the process, which then prints it
and exits with status 1. It is kept without tracebacks, which would keep the staged memory alive; they go to the log, at
level DEBUG.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch.distributed.checkpoint.api import CheckpointException

from stagereg.errors import CheckpointError

__all__ = ["Background"]

_MOST_UNDER_WAY = 2
_log = logging.getLogger(__name__)
_untold: list[CheckpointError] = []


class Background:
    """The thread. All methods are for the training thread; none may be called from inside a task."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stagereg-checkpoint")
        self._under_way: deque[Future[None]] = deque()
        self._failures: deque[CheckpointError] = deque()

    def make_room(self) -> None:
        """Wait until another task may be submitted."""
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way[0].result()
            self._under_way.popleft()

    def submit(self, task: Callable[[], None]) -> None:
        """Have ``task`` run after those before it; what it raises is kept for :meth:`raise_failure`."""
        self._under_way.append(self._executor.submit(self._run, task))

    def drain(self) -> None:
        """Wait until every task has ended, well or not."""
        while self._under_way:
            self._under_way[0].result()
            self._under_way.popleft()

    def raise_failure(self) -> None:
        """Raise the first failure that nobody was told of; later ones are logged, since one call can raise but one."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def take_failure(self) -> CheckpointError | None:
        """Return what :meth:`raise_failure` would raise."""
        failures = [self._failures.popleft() for _ in range(len(self._failures))]
        for failure in failures:
            _untold.remove(failure)
        for later in failures[1:]:
            _log.error("%s", later)
        return failures[0] if failures else None

    def shut(self) -> None:
        """End the thread after its last task. Twice is harmless."""
        self._executor.shutdown()

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failure = error if isinstance(error, CheckpointError) else CheckpointError(f"A save failed: {error}")
            if failure is not error:
                failure.__cause__ = error
            _log.debug("A save failed.", exc_info=failure)
            for connected in _connected(failure, set()):
                connected.__traceback__ = None
            _untold.append(failure)
            self._failures.append(failure)


def _connected(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    others = [wrapped for wrapped, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    for other in (error.__cause__, error.__context__, *others):
        yield from _connected(other, seen)


def _tell_at_exit() -> None:
    # Python takes no exit status from an exit handler, so this ends the process itself, after flushing what is
    # buffered.
    if not _untold:
        return
    for failure in _untold:
        print(f"A checkpoint failed and nobody asked for its outcome.\n{failure}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


atexit.register(_tell_at_exit)
