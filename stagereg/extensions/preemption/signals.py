"""Preemption: SIGTERM and SIGUSR1 request a run to save and exit, so that a scheduler can start it again.

A :class:`PreemptionHandler` records a signal immediately. Python runs signal handlers only on the main thread, which
may block in a collective. Therefore a separate thread reads the byte that the interpreter writes for each signal
(``signal.set_wakeup_fd``). The grace period then begins, and at its end the thread terminates the process. The ranks
agree on the step at which they exit in :mod:`stagereg.extensions.preemption.consensus`.

While no handler exists, a signal exits the process with code 75 if no step is lost (:func:`exit_before_first_step`).
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

_REPORT_S = 1.0  # maximum seconds for finding the newest checkpoint after the grace period


class PreemptionHandler:
    """Records a signal to save and exit, and terminates the process ``grace_s`` seconds later.

    ``describe_newest`` returns a sentence on the newest checkpoint. It runs on a separate thread, and may fail or hang.
    """

    def __init__(self, grace_s: float, describe_newest: Callable[[], str]) -> None:
        self.grace_s = grace_s
        self.describe_newest = describe_newest
        self.reports = True  # whether this process prints why it is terminated; after an exchange, only rank 0 does

    @property
    def received(self) -> signal.Signals | None:
        """The signal that has arrived; ``None`` if no signal has arrived."""
        return _listener.received if self in _listener.handlers else None

    def listen(self) -> bool:
        """Start handling the signals that the program neither handles nor ignores. Return whether any are handled."""
        if not install_signal_handlers() or not _listener.drop_foreign():
            return False
        _listener.handlers = (*_listener.handlers, self)
        return True

    def start_grace(self, received: signal.Signals) -> None:
        """Begin the grace period, because another rank has received the signal. Idempotent."""
        if self in _listener.handlers:
            _listener.start_grace(received)

    def set_saved(self) -> None:
        """Ignore further signals, because the state is saved and the process is about to exit with code 75."""
        _listener.set_saved()

    def close(self) -> None:
        """Stop handling signals. The last handler of a process restores the default signal handlers. Idempotent.

        If a signal has arrived without a save, the grace period continues: the sender expects the process to exit.
        """
        last = _listener.handlers == (self,)
        if last and _listener.received is not None and not _listener.saved:
            return
        _listener.handlers = tuple(each for each in _listener.handlers if each is not self)
        if last and not _listener.unstepped:
            _listener.close()


class SignalListener:
    """Owns the signal handlers of the process, the thread that reads signals, and the preemption handlers.

    The reading thread and the main thread both set ``received`` and ``_until``, each in one atomic assignment.
    """

    def __init__(self) -> None:
        self.handlers: tuple[PreemptionHandler, ...] = ()
        self.received: signal.Signals | None = None
        self.saved = False
        self.unstepped = False  # whether a signal before the first step exits with code 75, if no handler exists
        self._until = 0.0  # end of the grace period on the monotonic clock
        self._taken: list[signal.Signals] = []
        self._pipe: tuple[int, int] | None = None

    @property
    def is_open(self) -> bool:
        return self._pipe is not None

    def open(self) -> bool:
        """Start handling the signals. Return whether at least one signal is handled."""
        self._taken = [*self._own(), *filter(_is_free, SIGNALS)]
        if not self._taken:
            return False
        self.received, self.saved = None, False
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._read, args=(self._pipe[0],), name="stagereg-preemption", daemon=True).start()
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if before != -1:  # the program has its own wakeup descriptor, for example for an event loop
            signal.set_wakeup_fd(before)
        for number in self._taken:
            signal.signal(number, self._handle)
        return True

    def close(self) -> None:
        """On the main thread, undo :meth:`open`. On other threads, do nothing; the next signal then undoes it."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is None:
            return
        (_, write), self._pipe = self._pipe, None
        current = signal.set_wakeup_fd(-1)
        if current != write:
            signal.set_wakeup_fd(current)
        os.close(write)  # makes the thread return and close the other end
        if not self.saved:
            for number in self._own():
                signal.signal(number, signal.SIG_DFL)
            self._taken = []

    def drop_foreign(self) -> bool:
        """Without a PreemptionHandler, drop the signals that the program now handles. Return whether any remain."""
        self._taken = self._taken if self.handlers else self._own()
        return bool(self._taken)

    def take_first_step(self) -> None:
        """Restore the default behaviour on signals unless a handler exists. Called at the first step."""
        self.unstepped = False
        if not self.handlers:
            self.close()

    def start_grace(self, received: signal.Signals) -> None:
        if self._pipe is not None and self.received is None:
            self._begin(received)
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")  # not a signal: only wakes the thread

    def set_saved(self) -> None:
        self.saved = True
        if threading.current_thread() is threading.main_thread():
            # Permanent: Python removes its handlers before the process exits, and a signal would change the exit code.
            for number in self._own():
                signal.signal(number, signal.SIG_IGN)

    def stop_in_child(self) -> None:
        """Restore the default action of SIGTERM in a forked child, which does not take part in the preemption.

        The child ignores SIGUSR1, which Slurm sends to every process of a job step, so that the workers of a data
        loader continue for the remaining steps.
        """
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = None
        takes_part = bool(self.handlers) or not self.unstepped  # whether the parent process saves after a signal
        if takes_part and self._taken and "TORCHELASTIC_RUN_ID" in os.environ:
            # torchrun's agent signals the whole process group of a rank, which has its own session.
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
        for number in self._own():
            signal.signal(number, signal.SIG_IGN if takes_part and number == signal.SIGUSR1 else signal.SIG_DFL)

    def _own(self) -> list[signal.Signals]:
        """Return the signals that this object still handles. The program may have replaced some handlers."""
        return [number for number in self._taken if signal.getsignal(number) in (self._handle, signal.SIG_IGN)]

    def _handle(self, number: int, frame: Any) -> None:
        # The thread may have read the signal already, unless an event loop reads the interpreter's bytes.
        if self.handlers or self.saved:
            self.start_grace(signal.Signals(number))
        elif self.unstepped and self._pipe is not None:
            os.write(self._pipe[1], bytes([number]))
        else:  # the last handler was closed on another thread
            self.close()
            signal.signal(number, signal.SIG_DFL)  # a library may have reinstalled our handler after close()
            os.kill(os.getpid(), number)

    def _read(self, read: int) -> None:
        """Run the thread: read signals until the pipe is closed or the grace period is over."""
        first: float | None = None
        try:
            while True:
                left = None if self.received is None else max(0.0, self._until - time.monotonic())
                if not select.select([read], [], [], left)[0]:
                    grace = option("checkpoint.preemption.grace_period")
                    self._end(f"the save did not finish within the grace period of {{grace_s:g}} s ({grace})")
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
                        self._end("the signal arrived twice, so the save was aborted")
                        return
                if self.received is not None:
                    rank_failures.response().shorten_timeout()
        finally:
            os.close(read)

    def _begin(self, received: signal.Signals) -> None:
        """Begin the grace period. Sets ``received`` last: once it is set, the thread reads ``_until``."""
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
                text = "preempted: the state is saved, but the process did not exit within the grace period"
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
    """Install the signal handlers unless already installed. Return whether they are installed now.

    The first call must be on the main thread, because Python sets signal handlers only there.
    """
    return _listener.is_open or (threading.current_thread() is threading.main_thread() and _listener.open())


def exit_before_first_step() -> None:
    """Make signals exit this process with code 75, until its first step or handler. Call on the main thread."""
    if not _listener.unstepped and install_signal_handlers():
        _listener.unstepped = True
        first_step.call_at_first_step(_listener.take_first_step)


def describe_unstepped(received: signal.Signals) -> str:
    """Return the message of a run that exits with code 75 after a signal before its first step."""
    return f"preempted by {received.name} before the first step: no step is lost. To continue, run the same command."


def _is_free(number: signal.Signals) -> bool:
    """Return whether a signal has no handler in Python and, as far as /proc shows, none in C (``faulthandler``)."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return not int(caught.split()[1], 16) >> (number - 1) & 1
    return True


def _try(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``; ``None`` if it fails or takes longer than a second."""
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
