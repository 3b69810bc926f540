"""What the end of a job, or of the process, waits for and reports.

Work in the background outlives its call and can fail when no call is left to raise the error. So it registers here
(:func:`wait_for`) and reports failures here (:func:`report_error`). ``stagereg.main`` calls :func:`finish` at the end
of a job. In any other program the end of the process waits, prints the failure and makes the exit status 1.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

import stagereg.base.output as output
from stagereg.base.crash_report import describe_after
from stagereg.errors import StageregError

_HANGS = "left while a thread still hangs in work that has failed"
_INTERRUPTED = "interrupted while the last work in the background was under way, which is given up"


class BackgroundWork(Protocol):
    """Something under way that the end of a job waits for."""

    def finish(self) -> bool:
        """Wait until it has ended, for as long as that may take; False if it is given up, and a thread hangs in it."""


class Shutdown:
    """What this process waits for and has to report."""

    def __init__(self) -> None:
        self.works: weakref.WeakSet[BackgroundWork] = weakref.WeakSet()
        self.on_failure: list[weakref.WeakMethod[Callable[[BaseException], None]]] = []
        self.errors: list[StageregError] = []
        self.code: int | None = None
        self.interrupted = False

    def wait(self) -> bool:
        """Wait for all work; False if some is given up."""
        ended = [work.finish() for work in list(self.works)]
        return all(ended)

    def wait_at_exit(self) -> bool:
        """As :meth:`wait`, until an interrupt comes, which no program could catch any more."""
        try:
            return not self.interrupted and self.wait()
        except KeyboardInterrupt:
            self.interrupted = True
            return False

    def take_errors(self) -> list[StageregError]:
        """The failures that no call has raised; they are reported by the caller, so this forgets them."""
        errors, self.errors = self.errors, []
        return errors


# Global because a process ends once, whatever has begun the work.
_shutdown = Shutdown()


def wait_for(work: BackgroundWork) -> None:
    """Have the end wait for ``work`` too, for as long as the object exists: this keeps no reference."""
    _shutdown.works.add(work)


def on_failure(note: Callable[[BaseException], None]) -> None:
    """Have :func:`note_failure` call a method, for as long as its object exists: this keeps no reference."""
    _shutdown.on_failure.append(weakref.WeakMethod(note))


def report_error(error: StageregError) -> None:
    """Have the end report ``error``, unless it is withdrawn (:func:`withdraw_error`). Any thread."""
    _shutdown.errors.append(error)


def withdraw_error(error: StageregError) -> None:
    """Forget ``error``, because a call raises it."""
    if error in _shutdown.errors:
        _shutdown.errors.remove(error)


def set_exit_code(code: int) -> None:
    """Have the process end with this status, also if a thread hangs or a failure is reported."""
    _shutdown.code = code


def finish() -> None:
    """Wait for all work that is under way. Raises: the first failure that is reported; the others are printed."""
    _shutdown.wait()
    errors = _shutdown.take_errors()
    for error in errors[1:]:
        output.warn(f"stagereg: {describe_after(error, errors[0])}")
    if errors:
        raise errors[0]


def note_failure(error: BaseException) -> None:
    """Note the error that ends the job (:func:`on_failure`): the process may exit without :func:`finish`."""
    for each in list(_shutdown.on_failure):
        if (note := each()) is not None:
            note(error)


def exit_now(code: int) -> NoReturn:
    """End the process with what is buffered written, and without waiting for any thread."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _at_exit() -> None:
    """Wait, print the failures that are left, and end the process if there is one, or if a thread hangs.

    Python takes no exit status from an exit handler.
    """
    ended = _shutdown.wait_at_exit()
    known = getattr(sys, "last_value", None)  # the error that has ended the program, whose traceback is printed
    errors: list[str] = []
    for each in _shutdown.take_errors():
        errors.append(describe_after(each, known))
        known = known or each
    code = _shutdown.code
    if not (errors or ended or code is not None):
        errors = [_INTERRUPTED if _shutdown.interrupted else _HANGS]
    for error in errors:
        output.warn(f"stagereg: {error}")
    if errors or not ended:
        exit_now(1 if code is None else code)


def _forget() -> None:
    global _shutdown
    _shutdown = Shutdown()


os.register_at_fork(after_in_child=_forget)
# Before the pools of threads are shut down, which work may need; exit handlers proper come after that.
_register = getattr(threading, "_register_atexit", atexit.register)
_register(lambda: _shutdown.wait_at_exit())
atexit.register(_at_exit)
