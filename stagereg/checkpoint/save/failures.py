"""Stores the failures of saves until a call raises them, or logs them immediately.

At the end of the job or process, :mod:`stagereg.base.shutdown` reports each failure that no call has raised. If
failures are warnings, it reports only whether the last save has failed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import stagereg.base.shutdown as shutdown
from stagereg.base.crash_report import describe_after
from stagereg.errors import CheckpointError

_log = logging.getLogger(__name__)

_STATUS: dict[str, CheckpointError] = {}
"""The failure of the last save, by directory, for the report at the end of the process if failures are warnings. A run
that is retried in one process has a checkpointer for each attempt."""


class Failures:
    """The failures of one checkpointer on this rank.

    ``warns``: whether failures are logged instead of raised. ``first``: whether this rank logs the events that concern
    all ranks. ``describe_newest`` returns a sentence about the newest valid checkpoint. ``where``: the directory of the
    saves. The next save to it clears the failure of an earlier checkpointer.
    """

    def __init__(self, warns: bool, first: bool, describe_newest: Callable[[], str], where: str = "") -> None:
        self.last: CheckpointError | None = None  # error of the last finished save, if that save failed
        self.warns = warns
        self._first, self._describe_newest = first, describe_newest
        self._where = where
        self._kept: deque[CheckpointError] = deque()

    def __bool__(self) -> bool:
        """Whether there is a failure that no call has raised yet."""
        return bool(self._kept)

    def keep_failure(self, step: int, failure: CheckpointError, everywhere: bool = True) -> None:
        """Store the failure of a save, or log it. If all ranks failed (``everywhere``), only the first rank warns."""
        self.last = failure
        self.set_status(step)
        if self.warns:
            self._warn(failure, everywhere)
        else:
            shutdown.report_error(failure)
            self._kept.append(failure)

    def raise_first(self) -> None:
        failures = [self._kept.popleft() for _ in range(len(self._kept))]
        for failure in failures:
            shutdown.withdraw_error(failure)
        for later in failures[1:]:
            self.log_after(later, failures[0])
        if failures:
            raise failures[0]

    def log_after(self, failure: BaseException, known: BaseException) -> None:
        """Log a failure that no call raises. If its reason is that of ``known``, only the first rank logs it."""
        text = describe_after(failure, known)
        if self._first or text == str(failure):
            _log.error("%s", text)

    def raise_or_warn(self, error: BaseException) -> None:
        """Raise the error that kept this rank from staging, or only log the error if failures are warnings."""
        if not self.warns or not isinstance(error, CheckpointError):
            raise error
        self._warn(error)

    def set_status(self, failed: int | None) -> None:
        """If failures are warnings, report at exit that step ``failed`` was not saved. ``None`` cancels the report."""
        if (earlier := _STATUS.pop(self._where, None)) is not None:
            shutdown.withdraw_error(earlier)
        if self.warns and failed is not None:
            text = f"the last save, of step {failed}, failed, so the exit status is 1. {self._describe_newest()}"
            _STATUS[self._where] = CheckpointError(text)
            shutdown.report_error(_STATUS[self._where])

    def _warn(self, failure: CheckpointError, everywhere: bool = False) -> None:
        log = _log.info if everywhere and not self._first else _log.warning
        log("stagereg: %s Training continues.", failure)
