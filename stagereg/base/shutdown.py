"""Wait for background work at the end of a job or of the process, and report its errors.

Background work continues after the call that started it, and can fail when no later call can raise the error. So the
work registers with :func:`wait_for`, and reports failures with :func:`report_error`. ``stagereg.main`` calls
:func:`finish` at the end of a job. In other programs, an exit handler waits, prints failures and exits with code 1.
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

_HANGS = "exited while a thread still hangs in background work that has failed"
_INTERRUPTED = "interrupted while background work was running: the work was aborted"


class BackgroundWork(Protocol):
    """Background work, such as a save, that must end before the job or the process ends."""

    def finish(self) -> bool:
        """Wait until the work has ended; return False if it was aborted and its thread hangs."""


class Shutdown:
    """The background work of this process, and the errors to report."""

    def __init__(self) -> None:
        self.works: weakref.WeakSet[BackgroundWork] = weakref.WeakSet()
        self.on_failure: list[weakref.WeakMethod[Callable[[BaseException], None]]] = []
        self.errors: list[StageregError] = []
        self.code: int | None = None
        self.interrupted = False

    def wait(self) -> bool:
        """Wait for all work; return False if some work was aborted."""
        ended = [work.finish() for work in list(self.works)]
        return all(ended)

    def wait_at_exit(self) -> bool:
        """Call :meth:`wait`; return False after an interrupt, which the program can no longer catch."""
        try:
            return not self.interrupted and self.wait()
        except KeyboardInterrupt:
            self.interrupted = True
            return False

    def take_errors(self) -> list[StageregError]:
        """Return and clear the errors that no call has raised. The caller must report them."""
        errors, self.errors = self.errors, []
        return errors


# Global because a process exits once, for all background work.
_shutdown = Shutdown()


def wait_for(work: BackgroundWork) -> None:
    """Register ``work`` to be waited for at the end of the job. Keeps only a weak reference to ``work``."""
    _shutdown.works.add(work)


def on_failure(note: Callable[[BaseException], None]) -> None:
    """Register the method ``note``, which :func:`note_failure` calls. Holds a weak reference to its object."""
    _shutdown.on_failure.append(weakref.WeakMethod(note))


def report_error(error: StageregError) -> None:
    """Report ``error`` at the end of the job unless :func:`withdraw_error` removes it. Thread-safe."""
    _shutdown.errors.append(error)


def withdraw_error(error: StageregError) -> None:
    """Remove ``error`` from the reported errors, because a call raises it."""
    if error in _shutdown.errors:
        _shutdown.errors.remove(error)


def set_exit_code(code: int) -> None:
    """Set the exit code of the process, even if a thread hangs or an error is reported."""
    _shutdown.code = code


def finish() -> None:
    """Wait for all background work. Print all reported errors except the first, and raise the first."""
    _shutdown.wait()
    errors = _shutdown.take_errors()
    for error in errors[1:]:
        output.warn(f"stagereg: {describe_after(error, errors[0])}")
    if errors:
        raise errors[0]


def note_failure(error: BaseException) -> None:
    """Pass the job's error to each method that :func:`on_failure` registered, since finish() may never be called."""
    for each in list(_shutdown.on_failure):
        if (note := each()) is not None:
            note(error)


def exit_now(code: int) -> NoReturn:
    """Flush buffered output and exit the process without waiting for any thread."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _at_exit() -> None:
    """Wait for all background work, and print the remaining errors.

    After an error, or if a thread hangs, end the process here: Python ignores the exit code of an exit handler.
    """
    ended = _shutdown.wait_at_exit()
    known = getattr(sys, "last_value", None)  # the error that ended the program and whose traceback was printed
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
# The first wait precedes the shutdown of thread pools, which background work may need. Exit handlers run later.
_register = getattr(threading, "_register_atexit", atexit.register)
_register(lambda: _shutdown.wait_at_exit())
atexit.register(_at_exit)
