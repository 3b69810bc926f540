"""What has become of saves that failed: kept until a call raises it, or logged where it happens.

A failure that no call raises is reported by the end of the job or process (:mod:`stagereg.base.shutdown`). Where
failures are warnings, the end reports only that the last save has failed.
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
        warns: whether they are logged, and never raised.
        first: whether this is the rank that logs what happens on all.
        describe_newest: returns a sentence on the newest good checkpoint.
        where: the place that is saved to. A save there withdraws the status of an earlier checkpointer of this process.
    """

    def __init__(self, warns: bool, first: bool, describe_newest: Callable[[], str], where: str = "") -> None:
        self.last: CheckpointError | None = None  # why the last save that has ended failed, if it did
        self.warns = warns
        self._first, self._describe_newest = first, describe_newest
        self._where = where
        self._kept: deque[CheckpointError] = deque()

    def __bool__(self) -> bool:
        """Whether there is one that no call has raised yet."""
        return bool(self._kept)

    def keep_failure(self, step: int, failure: CheckpointError, everywhere: bool = True) -> None:
        """Keep why a save failed, or log it; what is reported ``everywhere`` is a warning on the first rank only."""
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
        """Log a failure of which no call is to raise more, after ``known``; what ranks have in common on the first."""
        text = describe_after(failure, known)
        if self._first or text == str(failure):
            _log.error("%s", text)

    def raise_or_warn(self, error: BaseException) -> None:
        """Raise what has kept this rank from staging; log it if failures are warnings."""
        if not self.warns or not isinstance(error, CheckpointError):
            raise error
        self._warn(error)

    def set_status(self, failed: int | None) -> None:
        """Have the end report that the save of step ``failed`` was the last one, if failures are warnings."""
        if (earlier := _STATUS.pop(self._where, None)) is not None:
            shutdown.withdraw_error(earlier)
        if self.warns and failed is not None:
            text = f"the last save has failed, of step {failed}, so the exit status is 1. {self._describe_newest()}"
            _STATUS[self._where] = CheckpointError(text)
            shutdown.report_error(_STATUS[self._where])

    def _warn(self, failure: CheckpointError, everywhere: bool = False) -> None:
        log = _log.info if everywhere and not self._first else _log.warning
        log("stagereg: %s Training goes on.", failure)
