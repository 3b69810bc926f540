"""Failures of saves, kept until a call raises them, or logged at once.

:mod:`stagereg.base.shutdown` reports at the end of the job or process each failure that no call has raised. If
failures are warnings, it reports only that the last save has failed.
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
"""The failed last save by place, which the end of the process reports if failures are warnings. A run that is tried
again in one process has a checkpointer for each attempt."""


class Failures:
    """The failures of one checkpointer on this rank.

    Args:
        warns: whether failures are logged, and never raised.
        first: whether this rank logs the events that concern all ranks.
        describe_newest: returns a sentence about the newest valid checkpoint.
        where: the directory of the saves. A save there withdraws the status of an earlier checkpointer of this process.
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
        """Keep or log the failure of a save; a failure on all ranks (``everywhere``) is a warning on the first only."""
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
        """Log a failure that no call will raise, after ``known``; only the first rank logs a reason that all share."""
        text = describe_after(failure, known)
        if self._first or text == str(failure):
            _log.error("%s", text)

    def raise_or_warn(self, error: BaseException) -> None:
        """Raise the error that kept this rank from staging; log the error if failures are warnings."""
        if not self.warns or not isinstance(error, CheckpointError):
            raise error
        self._warn(error)

    def set_status(self, failed: int | None) -> None:
        """Set the failure to report at the end, if failures are warnings: ``failed`` is the step of the last save."""
        if (earlier := _STATUS.pop(self._where, None)) is not None:
            shutdown.withdraw_error(earlier)
        if self.warns and failed is not None:
            text = f"the last save, of step {failed}, failed, so the exit status is 1. {self._describe_newest()}"
            _STATUS[self._where] = CheckpointError(text)
            shutdown.report_error(_STATUS[self._where])

    def _warn(self, failure: CheckpointError, everywhere: bool = False) -> None:
        log = _log.info if everywhere and not self._first else _log.warning
        log("stagereg: %s Training continues.", failure)
