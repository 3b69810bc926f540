"""Preemption: SIGTERM and SIGUSR1 ask a run to save and exit, and to be started again.

A :class:`PreemptionHandler` records the signal at once: Python runs signal handlers on the main thread only, which may
wait in a collective, so a thread reads the byte that the interpreter writes (``signal.set_wakeup_fd``). From then on
the process has a bounded time to exit; after that the thread ends the process. The ranks agree on the step to exit at
in :mod:`stagereg.extensions.preemption.consensus`.

Before there is a handler, the thread exits at once with 75 if no step would be lost (:func:`exit_before_first_step`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import stagereg.base.first_step as first_step
import stagereg.base.rank_failures as rank_failures
from stagereg.base.option_text import option
from stagereg.base.signals import SAME_SIGNAL_S, SIGNALS
from stagereg.errors import RESUME_CODE
from stagereg.launch.rank import LAUNCHER

_REPORT_S = 1.0  # seconds that finding the newest checkpoint may take, once the time is up


class PreemptionHandler:
    """Whether this process was signalled to save and exit, which it has ``grace_s`` seconds for.

    ``describe_newest`` returns what there is to go on from, for a message; on a thread of its own, may fail or hang.
    """

    def __init__(self, grace_s: float, describe_newest: Callable[[], str]) -> None:
        self.grace_s = grace_s
        self.describe_newest = describe_newest
        self.reports = True  # prints why the process was ended; of ranks that all know of the signal, one does

    @property
    def received(self) -> signal.Signals | None:
        """The signal, once it has come."""
        return _listener.received if self in _listener.handlers else None

    def listen(self) -> bool:
        """Begin to handle those signals that are neither handled nor ignored, and return whether any is handled."""
        if not install_signal_handlers() or not _listener.drop_foreign():
            return False
        _listener.handlers = (*_listener.handlers, self)
        return True

    def start_grace(self, received: signal.Signals) -> None:
        """Have the time begin here too, unless it has: another process that exits with this one was signalled."""
        if self in _listener.handlers:
            _listener.start_grace(received)

    def set_saved(self) -> None:
        """All is saved, and the process is about to end: ignore what still comes. The end of the time is no failure."""
        _listener.set_saved()

    def close(self) -> None:
        """Handle signals no more; the last one of a process restores the handlers. Twice is harmless.

        If a signal has come and nothing has been saved for it, its time goes on: its sender wants the process gone.
        """
        last = _listener.handlers == (self,)
        if last and _listener.received is not None and not _listener.saved:
            return
        _listener.handlers = tuple(each for each in _listener.handlers if each is not self)
        if last and not _listener.unstepped:
            _listener.close()


class SignalListener:
    """The process's signal handlers, the thread that reads which signal has come, and the handlers that wait for one.

    ``received`` and ``_until`` are written by the thread or the main thread; each is one assignment.
    """

    def __init__(self) -> None:
        self.handlers: tuple[PreemptionHandler, ...] = ()
        self.received: signal.Signals | None = None
        self.saved = False
        self.unstepped = False  # exits at once with 75 as long as there is no handler
        self._until = 0.0  # on the monotonic clock: when the time is up
        self._taken: list[signal.Signals] = []
        self._pipe: tuple[int, int] | None = None

    @property
    def is_open(self) -> bool:
        return self._pipe is not None

    def open(self) -> bool:
        """Begin to handle the signals; return whether any is handled."""
        self._taken = [*self._own(), *filter(_is_free, SIGNALS)]
        if not self._taken:
            return False
        self.received, self.saved = None, False
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._read, args=(self._pipe[0],), name="stagereg-preemption", daemon=True).start()
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if before != -1:  # of an event loop, or whatever else the program runs
            signal.set_wakeup_fd(before)
        for number in self._taken:
            signal.signal(number, self._handle)
        return True

    def close(self) -> None:
        """Undo what :meth:`open` has done; on another thread than the main one that is left to the next signal."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is None:
            return
        (_, write), self._pipe = self._pipe, None
        current = signal.set_wakeup_fd(-1)
        if current != write:
            signal.set_wakeup_fd(current)
        os.close(write)  # which ends the thread, and that closes the other end
        if not self.saved:
            for number in self._own():
                signal.signal(number, signal.SIG_DFL)
            self._taken = []

    def drop_foreign(self) -> bool:
        """Leave alone what the program handles by now, unless there is a handler; return whether any signal is left."""
        self._taken = self._taken if self.handlers else self._own()
        return bool(self._taken)

    def take_first_step(self) -> None:
        """Exit by a signal without a handler from now on, as this process did before."""
        self.unstepped = False
        if not self.handlers:
            self.close()

    def start_grace(self, received: signal.Signals) -> None:
        if self._pipe is not None and self.received is None:
            self._begin(received)
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")  # no signal: only wakes the thread

    def set_saved(self) -> None:
        self.saved = True
        if threading.current_thread() is threading.main_thread():
            # For good: Python's own handlers are gone before a process has ended, and its exit status is at stake.
            for number in self._own():
                signal.signal(number, signal.SIG_IGN)

    def stop_in_child(self) -> None:
        """In a forked child, which takes no part: SIGTERM does to it what it did before.

        It ignores SIGUSR1, which Slurm sends to every process of a step, so that the workers of a loader go on for the
        steps that are still to come.
        """
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = None
        takes_part = bool(self.handlers) or not self.unstepped  # else nothing is to be saved
        if takes_part and self._taken and "TORCHELASTIC_RUN_ID" in os.environ:
            # An agent signals the whole group of a rank, which it has given a session of its own.
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
        for number in self._own():
            ignores = takes_part and number == signal.SIGUSR1
            signal.signal(number, signal.SIG_IGN if ignores else signal.SIG_DFL)

    def _own(self) -> list[signal.Signals]:
        """The signals that are handled here still: the program may have set a handler since."""
        return [number for number in self._taken if signal.getsignal(number) in (self._handle, signal.SIG_IGN)]

    def _handle(self, number: int, frame: Any) -> None:
        # The thread may know already, unless an event loop reads the interpreter's bytes.
        if self.handlers or self.saved:
            self.start_grace(signal.Signals(number))
        elif self.unstepped and self._pipe is not None:
            os.write(self._pipe[1], bytes([number]))
        else:  # the last one has closed on another thread
            self.close()
            signal.signal(number, signal.SIG_DFL)  # a library may have restored this handler after the close
            os.kill(os.getpid(), number)

    def _read(self, read: int) -> None:
        """What the thread does: until the pipe is closed, or the time is up."""
        first: float | None = None
        try:
            while True:
                left = None if self.received is None else max(0.0, self._until - time.monotonic())
                if not select.select([read], [], [], left)[0]:
                    grace = option("checkpoint.preemption.grace_period")
                    self._end(f"{{grace_s:g}} s were too few to save and exit ({grace})")
                    return
                numbers = os.read(read, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in self._own() and self.unstepped and not self.handlers:
                        self._exit_unstepped(signal.Signals(number))
                    if number not in self._taken or not self.handlers:
                        continue
                    if self.received is None:
                        self._begin(signal.Signals(number))
                    if first is None:
                        first = time.monotonic()
                    elif number == self.received and time.monotonic() > first + SAME_SIGNAL_S:
                        self._end("it came twice, so nothing more is saved")
                        return
                if self.received is not None:
                    rank_failures.response().shorten_timeout()
        finally:
            os.close(read)

    def _begin(self, received: signal.Signals) -> None:
        """Have the time begin. The thread reads ``received``, so that is set last."""
        self._until = time.monotonic() + min((each.grace_s for each in self.handlers), default=0.0)
        self.received = received

    def _end(self, why: str) -> None:
        handlers, received = self.handlers, self.received
        if not handlers or received is None:
            return
        if first_step.is_awaited() and not self.saved:
            self._exit_unstepped(received)
        texts = []
        for each in handlers:
            if each.reports:
                text = "preempted: all is saved, but the process did not end in time"
                if not self.saved:
                    newest = _try(each.describe_newest) or "The newest checkpoint is unknown."
                    text = f"stopped by {received.name}: {why.format(grace_s=each.grace_s)}. {newest}"
                texts.append(text)
        self._exit("\n".join(texts), RESUME_CODE if self.saved else 128 + received)

    def _exit_unstepped(self, received: signal.Signals) -> NoReturn:
        prints = os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ  # the launcher prints for its ranks
        self._exit(describe_unstepped(received) if prints else "", RESUME_CODE)

    @staticmethod
    def _exit(text: str, code: int) -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode() if text else b"")
        _try(sys.stdout.flush)
        _try(sys.stderr.flush)
        os._exit(code)


def install_signal_handlers() -> bool:
    """Handle the signals from now on, for handlers of any thread; return whether that is so. On the main thread first.

    Python lets no other thread set a handler.
    """
    return _listener.is_open or (threading.current_thread() is threading.main_thread() and _listener.open())


def exit_before_first_step() -> None:
    """Have a signal end this process with 75 until its first step, or until there is a handler. On the main thread."""
    if not _listener.unstepped and install_signal_handlers():
        _listener.unstepped = True
        first_step.call_at_first_step(_listener.take_first_step)


def describe_unstepped(received: signal.Signals) -> str:
    """Return the message of a run that exits with 75 since a signal came before its first step."""
    return f"preempted by {received.name} before the first step: no step is lost. Start the run again."


def _is_free(number: signal.Signals) -> bool:
    """Whether a signal has no handler: none in Python, and as far as can be seen none in C (``faulthandler``)."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return not int(caught.split()[1], 16) >> (number - 1) & 1
    return True


def _try(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; ``None`` if it fails, or takes longer than a second."""
    returned: list[Any] = [None]

    def run() -> None:
        with contextlib.suppress(Exception):
            returned[0] = call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_REPORT_S)
    return returned[0]


def _restart_in_child() -> None:
    global _listener
    _listener.stop_in_child()
    _listener = SignalListener()


# Global because a process has one set of signal handlers.
_listener = SignalListener()
os.register_at_fork(after_in_child=_restart_in_child)
