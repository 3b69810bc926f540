"""Starts and ends the processes of the ranks on this machine, and forwards the launcher's signals to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import stagereg.base.first_step as first_step
from stagereg.base.signals import SAME_SIGNAL_S, SIGNALS
from stagereg.errors import RESUME_CODE
from stagereg.launch.extension import LaunchExtension, Process, Start, answers, first

_KILL_S = 3.0  # seconds between a signal to the ranks and SIGKILL


class LocalRanks:
    """A context manager for the ranks of this task, and for the signals that this process receives.

    SIGTERM and SIGUSR1 are forwarded to the ranks: ranks with a checkpointer save and exit, other ranks terminate. If
    the same signal arrives again later, or if another signal arrives, the launcher terminates the ranks (``stopped``).
    """

    def __init__(self, extensions: Sequence[LaunchExtension] = ()) -> None:
        self.extensions = extensions  # an extension may start the ranks; the ``with`` block closes the extensions
        self.forwarded: signal.Signals | None = None
        self.stopped: signal.Signals | None = None
        self.ran_none = False  # whether no rank was running when the signal ``stopped`` arrived
        self._forwarded_at = 0.0
        self._processes: dict[int, Process] = {}
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> LocalRanks:
        first_step.take_step()  # from now on, signals are forwarded to the ranks
        if threading.current_thread() is threading.main_thread():  # only this thread can handle signals
            for number in {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *SIGNALS}:
                handler = signal.getsignal(number)
                if handler is signal.SIG_IGN:  # set by nohup, or by a script that runs this program in the background
                    continue
                if number != signal.SIGUSR1 or handler is signal.SIG_DFL:  # any other handler is a launcher's
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *raised: object) -> None:
        self.end(signal.SIGTERM)
        answers(self.extensions, lambda each: each.close())
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, rank: int, start: Start) -> None:
        """Start a rank in a new session, so that Ctrl-C in a terminal does not send a signal to the rank."""
        command, folder, variables = start
        process = first(self.extensions, lambda each: each.start(rank, start))
        process = process or subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True)
        self._processes[rank] = process
        if self.forwarded is not None:  # the signal arrived while the process started
            process.send_signal(self.forwarded)

    def wait(self, poll: Callable[[], object] = lambda: None) -> dict[int, int]:
        """Wait until all ranks exit, a rank fails, or a signal stops the run. Return the nonzero exit codes by rank.

        Calls ``poll`` about 20 times a second.
        """
        while True:
            codes = self._codes()
            failed = not set(codes.values()) <= {None, 0, RESUME_CODE}
            if failed or self.stopped is not None or None not in codes.values():
                return {rank: code for rank, code in codes.items() if code}
            poll()
            time.sleep(0.05)

    def wait_for_rest(self, limit_s: float) -> None:
        """Wait until all ranks exit or a signal stops the run, at most ``limit_s`` seconds."""
        deadline = time.monotonic() + limit_s
        while None in self._codes().values() and self.stopped is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self, number: signal.Signals) -> dict[int, int]:
        """Send the signal ``number`` to running ranks and their children. After 3 seconds, send SIGKILL.

        Return the exit codes of all ranks. A signal that arrives before the next start of ranks stops the run.
        """
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + _KILL_S
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        codes = {rank: process.wait() for rank, process in self._processes.items()}
        self._processes.clear()
        return codes

    def _codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in self._processes.items()}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        again = received == self.forwarded and time.monotonic() > self._forwarded_at + SAME_SIGNAL_S
        if received not in SIGNALS or again or not self._processes:
            if self.stopped is None:
                self.stopped, self.ran_none = received, not self._processes
            return
        if self.forwarded is None:
            self.forwarded, self._forwarded_at = received, time.monotonic()
        for process in self._processes.values():
            process.send_signal(received)
