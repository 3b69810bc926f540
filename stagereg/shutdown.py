"""What has to end, and what has to be told, before a process or a job may call itself done.

Background work outlives the call that began it, and its failure can come when nobody listens any more. Who does
such work registers it (:func:`wait_for`) and reports its failure (:func:`report_error`, :func:`set_last_status`).
``stagereg.main`` asks at the end of a job (:func:`finish`), so that the failure is the job's; in any other program the
end of the process waits, prints it and makes the exit status 1.

The ground floor: imports nothing heavy, and knows nothing of what is waited for.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from typing import Protocol

from stagereg.errors import StageregError

__all__ = ["BackgroundWork", "finish", "report_error", "set_last_status", "wait_for", "withdraw_error"]


class BackgroundWork(Protocol):
    """Something under way that the end of a job waits for."""

    def finish(self) -> bool:
        """Wait until it has ended, for as long as that may take; False if it is given up, and a thread hangs in it."""


_works: weakref.WeakSet[BackgroundWork] = weakref.WeakSet()
_untold: list[StageregError] = []
_outcomes: dict[str, StageregError] = {}
_code: int | None = None
_interrupted = False
_HANGS = "left while a thread still hangs in work that has failed"
_INTERRUPTED = "interrupted while the last work in the background was under way, which is given up"


def wait_for(work: BackgroundWork) -> None:
    """Have the end wait for ``work`` too, as long as it is there at all: this keeps no reference."""
    _works.add(work)


def report_error(failure: StageregError) -> None:
    """Have the end tell ``failure``, unless somebody was told before (:func:`withdraw_error`). Any thread."""
    _untold.append(failure)


def withdraw_error(failure: StageregError) -> None:
    """Say that somebody has been told of ``failure``, or is being told."""
    if failure in _untold:
        _untold.remove(failure)


def set_last_status(of: str, failure: StageregError | None) -> None:
    """Take down how the last of a series came out, such as the saves to one directory; the end tells if it failed.

    Args:
        of: names the series.
        failure: ``None`` where it went well.
    """
    if failure is None:
        _outcomes.pop(of, None)
    else:
        _outcomes[of] = failure


def set_exit_code(code: int) -> None:
    """Say that the process is about to end, with this status, also if a thread still hangs or a failure is told."""
    global _code
    _code = code


def finish() -> None:
    """Wait for all that is under way. Raises: the first failure that is to be told; the others are printed."""
    _wait()
    failures = _taken()
    for failure in failures[1:]:
        print(f"stagereg: {failure}", file=sys.stderr)
    if failures:
        raise failures[0]


def _wait() -> bool:
    ended = [work.finish() for work in list(_works)]
    return all(ended)


def _taken() -> list[StageregError]:
    failures = [*_untold, *(failure for failure in _outcomes.values() if failure not in _untold)]
    _untold.clear()
    _outcomes.clear()
    return failures


def _wait_at_exit() -> bool:
    """As :func:`_wait`, and no longer than until somebody interrupts it, which no program could catch any more."""
    global _interrupted
    try:
        return not _interrupted and _wait()
    except KeyboardInterrupt:
        _interrupted = True
        return False


def _at_exit() -> None:
    # Python takes no exit status from an exit handler, so this ends the process itself, after flushing what is
    # buffered. It does so too where a thread hangs, which could not be ended otherwise.
    ended = _wait_at_exit()
    failures = _taken()
    for failure in failures:
        print(f"stagereg: {failure}", file=sys.stderr)
    if not (failures or ended or _code is not None):
        print(f"stagereg: {_INTERRUPTED if _interrupted else _HANGS}", file=sys.stderr)
    if failures or not ended:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if _code is None else _code)


def _forget() -> None:
    global _code, _interrupted
    _code, _interrupted = None, False
    _works.clear()
    _untold.clear()
    _outcomes.clear()


os.register_at_fork(after_in_child=_forget)
# Before the pools of threads are shut down, which what is under way may need; exit handlers proper come after that.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_wait_at_exit)
atexit.register(_at_exit)
