"""Preemption: SIGTERM and SIGUSR1 ask a run to save and exit, and to be started again.

A :class:`PreemptionHandler` keeps the two signals from ending the process, and records that one has come. It does so
at once, whatever the training thread is doing: Python runs signal handlers on the main thread only, between two of its
operations, and the main thread may wait in a collective for long. So a thread reads the byte that the interpreter
writes from within the signal (``signal.set_wakeup_fd``). From then on the process has a bounded time to exit; after
that the thread ends it.

Schedulers signal whole trees of processes, and launchers forward what they got: what comes within seconds of the first
signal is the same one. A later one of the same kind ends the process at once.

The step to exit at is agreed on in :mod:`stagereg.checkpoint.preemption_consensus`. This module imports nothing heavy.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from stagereg.errors import RESUME_CODE

__all__ = ["SIGNALS", "PreemptionHandler", "observed"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that ask a run to leave."""

_SAME_S = 5.0
"""Seconds in which a signal that comes again is the same one, from another of those who hand it on."""
_WORDS_S = 1.0
"""Seconds in which it has to be found out which checkpoint is the newest, once the time is up."""


class PreemptionHandler:
    """Whether this process was told to leave.

    Args:
        grace_s: seconds it has from then on, before it is ended.
        newest: what there is to go on from, in words; called on a thread of its own, may fail or hang.
    """

    def __init__(self, grace_s: float, newest: Callable[[], str]) -> None:
        self.grace_s = grace_s
        self.newest = newest
        self.reports = True
        """Whether to say on stderr why the process was ended; one of several ranks does that all know of the signal."""
        self.saved = False
        """Set when all is saved: from there on a signal changes nothing, and the time being up is no failure."""

    @property
    def received(self) -> signal.Signals | None:
        """The signal, once it has come."""
        return _ears.received if self in _ears.notices else None

    def listen(self) -> bool:
        """Begin to listen; return whether anything is heard here.

        Only the main thread can begin to. A signal that somebody else has set a handler for, or ignores, is left alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        return _ears.add(self)

    def close(self) -> None:
        """Listen no more; the last one of a process restores the handlers. Twice is harmless.

        If a signal has come and nothing has been saved for it, its time goes on: who sent it wants the process gone.
        If all is saved, the handlers stay to ignore what comes until the time is up: the process is on its way out.
        """
        _ears.remove(self)

    def start_grace(self, received: signal.Signals) -> None:
        """Have the time begin here too, unless it has: another process that leaves with this one was told to."""
        if self in _ears.notices:
            _ears.start_grace(received)


@contextlib.contextmanager
def observed(by: Callable[[float | None], None]) -> Iterator[None]:
    """Have ``by`` called, for the time of a ``with`` block, with the seconds of grace when this process begins to
    listen, and with ``None`` when it no longer does. On the main thread."""
    before, _ears.observer = _ears.observer, by
    try:
        yield
    finally:
        _ears.observer = before


class _SignalListener:
    """The process's handlers, the thread that hears of signals first, and all who want to know."""

    def __init__(self) -> None:
        self.notices: tuple[PreemptionHandler, ...] = ()
        self.observer: Callable[[float | None], None] | None = None
        self.received: signal.Signals | None = None
        self._came = False  # as the main thread knows, which may be before `received` is there
        self._saved = False
        self._until = 0.0  # on the monotonic clock: when the time is up
        self._taken: list[signal.Signals] = []
        self._pipe: tuple[int, int] | None = None

    def add(self, notice: PreemptionHandler) -> bool:
        if self._pipe is None and not self._open():
            return False
        self.notices = (*self.notices, notice)
        self._tell()
        return True

    def remove(self, notice: PreemptionHandler) -> None:
        if notice not in self.notices:
            return
        self._saved = self._saved or notice.saved
        if self._came and len(self.notices) == 1 and not self._saved:
            return
        self.notices = tuple(each for each in self.notices if each is not notice)
        if not self.notices:
            self._close()
        self._tell()

    def forget(self) -> None:
        """In a forked child: it has no part in this.

        SIGTERM does to it what it did before. It is deaf to SIGUSR1, which Slurm sends to every process of a step, so
        that the workers of a loader go on for the steps that are still to come.
        """
        if not self._taken:
            return
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for descriptor in self._pipe:
                os.close(descriptor)
        self._release(signal.SIG_IGN)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # An agent signals the whole group of a rank, which it has given a session of its own.
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
        self.notices, self.received, self.observer, self._saved, self._pipe = (), None, None, False, None

    def start_grace(self, received: signal.Signals) -> None:
        self._came = True
        if self._pipe is not None and self.received is None:
            self._begin(received)
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")  # no signal: only wakes the thread

    def deaf(self) -> None:
        """At the end of the process: where all is saved, what still comes cannot change its exit status."""
        if self._saved or any(each.saved for each in self.notices):
            for number in self._own():
                signal.signal(number, signal.SIG_IGN)

    def _tell(self) -> None:
        if self.observer is not None:
            self.observer(min((each.grace_s for each in self.notices), default=None))

    def _open(self) -> bool:
        free = {*self._own(), *filter(_is_free, SIGNALS)}
        if not free:
            return False
        self.received, self._came, self._saved = None, False, False
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        threading.Thread(target=self._hear, args=(self._pipe[0],), name="stagereg-notice", daemon=True).start()
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if before != -1:  # somebody else's, such as an event loop's
            signal.set_wakeup_fd(before)
        for number in free:
            signal.signal(number, self._handle)
        self._taken = list(free)
        return True

    def _close(self) -> None:
        """Undo what :meth:`_open` has done. Away from the main thread nothing can be; then it is over at the end."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is None:
            return
        if not self._saved:
            self._release()
        if self._is_awake():
            signal.set_wakeup_fd(-1)
        (_, write), self._pipe = self._pipe, None
        os.close(write)  # which ends the thread, and that closes the other end

    def _own(self) -> list[signal.Signals]:
        """The signals that come here still: somebody may have set a handler since."""
        return [number for number in self._taken if signal.getsignal(number) == self._handle]

    def _release(self, usr1: signal.Handlers = signal.SIG_DFL) -> None:
        for number in self._own():
            signal.signal(number, usr1 if number == signal.SIGUSR1 else signal.SIG_DFL)
        self._taken = []

    def _is_awake(self) -> bool:
        """Whether the interpreter writes into the pipe. On the main thread."""
        assert self._pipe is not None
        current = signal.set_wakeup_fd(-1)
        if current != -1:
            signal.set_wakeup_fd(current, warn_on_full_buffer=current != self._pipe[1])
        return current == self._pipe[1]

    def _handle(self, number: int, frame: Any) -> None:
        if not self.notices:
            if self._saved and time.monotonic() < self._until:
                return
            self._saved = False  # or the last one has ended where handlers could not be restored
            self._close()
            self._release()
            os.kill(os.getpid(), number)
            return
        self._came = True
        if self._pipe is not None and not self._is_awake():
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([number]))

    def _hear(self, read: int) -> None:
        """What the thread does: until the pipe is closed, or the time is up."""
        heard: float | None = None
        try:
            while True:
                left = max(0.0, self._until - time.monotonic()) if self.received is not None else None
                if not select.select([read], [], [], left)[0]:
                    self._end("the time is up")
                    return
                numbers = os.read(read, 64)
                if not numbers:
                    return
                for number in [signal.Signals(each) for each in numbers if each in SIGNALS]:
                    if not self.notices:
                        continue
                    if self.received is None:
                        self._begin(number)
                    if heard is None:
                        heard = time.monotonic()
                    elif number == self.received and time.monotonic() > heard + _SAME_S:
                        self._end("it came again")
                        return
        finally:
            os.close(read)

    def _begin(self, received: signal.Signals) -> None:
        """Have the time begin. The thread looks at what is set last."""
        self._until = time.monotonic() + min(each.grace_s for each in self.notices)
        self.received = received

    def _end(self, why: str) -> None:
        """End the process from this thread, if there is anybody left who was to leave."""
        notices, received = self.notices, self.received
        if not notices or received is None:
            return
        saved = self._saved or any(each.saved for each in notices)
        for each in notices:
            if each.reports and not saved:
                text = f"stopped by {received.name}: {_reason(why, each)}; {_newest(each)}\n"
                with contextlib.suppress(OSError):
                    os.write(2, text.encode())
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(_WORDS_S)
        os._exit(RESUME_CODE if saved else 128 + received)


def _is_free(number: signal.Signals) -> bool:
    """Whether nobody handles a signal: not in Python, and as far as can be seen not in C (``faulthandler``)."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return not int(caught.split()[1], 16) >> (number - 1) & 1
    return True


def _reason(why: str, notice: PreemptionHandler) -> str:
    if why == "it came again":
        return "it came twice, so nothing more is saved"
    return f"{notice.grace_s:g} s were too few to save and leave (checkpoint.grace)"


def _newest(notice: PreemptionHandler) -> str:
    """What there is to go on from, unless the storage takes too long to say."""
    told: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            told.append(notice.newest())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WORDS_S)
    return told[0] if told else "which checkpoint is the newest cannot be told"


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


_ears = _SignalListener()
os.register_at_fork(after_in_child=lambda: _ears.forget())
atexit.register(lambda: _ears.deaf())
