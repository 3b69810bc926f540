"""The launcher's signals: forwarded to ranks that save and exit by themselves, or raised to end the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from stagereg.launch.launcher_channel import LauncherChannel
from stagereg.preemption import SAME_SIGNAL_S, SIGNALS

__all__ = ["SignalForwarder"]

_MARGIN_S = 5.0
"""Seconds that ranks may take to end, beyond those in which they are to have saved."""


class SignalForwarder:
    """Handles the signals that stop a run, for the time of a ``with`` block on the main thread.

    SIGTERM and SIGUSR1 are forwarded to the ranks if all of them handle these (``PreemptionHandler``); then a second
    one, or the end of the ranks' time, ends them. The first signal that is not forwarded ends the ranks at once, any
    later one changes nothing.

    Args:
        channel: where the ranks report whether they handle signals.
        ranks: of this machine.

    Attributes:
        received: the signal that ends the ranks, once it has come.
        forwarded: the signal that the ranks were left to exit for by themselves.
    """

    def __init__(self, channel: LauncherChannel, ranks: range) -> None:
        self.received: signal.Signals | None = None
        self.forwarded: signal.Signals | None = None
        self._channel = channel
        self._ranks = ranks
        self._forwarded_at = 0.0
        self._raises = False
        self._expired = False
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        if threading.current_thread() is threading.main_thread():
            for number in {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *SIGNALS}:
                if number != signal.SIGUSR1 or signal.getsignal(number) is signal.SIG_DFL:  # else a launcher's
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """From here on a signal raises elastic's ``SignalException``; one that came before raises it now.

        Not before, because importing torch can swallow an exception from a handler.
        """
        self._raises = True
        if self.received is not None:
            self._stop(self.received)

    def forward(self, received: signal.Signals) -> bool:
        """Send a signal on to the ranks, or ignore it as a repetition; false if it is to end the ranks instead."""
        if received not in SIGNALS or self._expired:
            return False
        if self.forwarded is not None:
            return received != self.forwarded or time.monotonic() < self._forwarded_at + SAME_SIGNAL_S
        ranks = [self._channel.status(rank) for rank in self._ranks]
        if any(rank.get("grace_s") is None for rank in ranks):
            return False
        self.forwarded, self._forwarded_at = received, time.monotonic()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank["pid"], received)
        self._timer = threading.Timer(max(rank["grace_s"] for rank in ranks) + _MARGIN_S, self._expire)
        self._timer.daemon = True
        self._timer.start()
        return True

    def _expire(self) -> None:
        self._expired = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self.forward(received):
            return
        if received == signal.SIGUSR1 and self.forwarded is None:  # does what it does without this
            signal.signal(number, self._before.pop(number))
            os.kill(os.getpid(), number)
        elif self.received is None:
            self.received = received
            if self._raises:
                self._stop(received)

    def _stop(self, received: signal.Signals) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        # A rank in its job may run its ``finally`` blocks after SIGINT; one that is not there yet could only print a
        # traceback from the middle of an import, so it is terminated instead.
        in_job = all(self._channel.status(rank).get("in_job") for rank in self._ranks)
        raise SignalException(received.name, received if in_job else signal.SIGTERM)
