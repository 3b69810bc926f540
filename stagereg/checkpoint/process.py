"""A process that writes checkpoints, so that writing takes no time of training and its interpreter.

This module keeps the process: starting it, sending it requests, and its end. Requests and answers are bytes here;
:mod:`stagereg.checkpoint.process_writer` makes them.

The process is reached over a socket pair, so it has no port. It is started fresh, with a lower priority, without
accelerators, and in a process group of its own, so that signals to the parent's group do not end it: it may still have
to write the last save. It ends with its parent, even if that is killed. If it dies, at whatever moment, another one is
started and gets the request again. A wait goes on while it lives and ends when it does not. Only a request with a
deadline is bounded by the clock: a process that misses it is killed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

from stagereg.crash_report import signal_name
from stagereg.errors import CheckpointError

__all__ = ["WriterProcess", "belong", "serve"]

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("=Q")
_CHUNK = 2**20
_LOOK_S = 0.5  # how often one looks whether the other side lives, should its end of the socket be open elsewhere
_END_S = 5.0
_START = (
    "import os, sys; os.nice(int(sys.argv[3])); sys.path[:] = sys.argv[4:]; "
    "from stagereg.checkpoint.process import belong, serve; belong(int(sys.argv[2])); "
    "import torch; torch.set_num_threads(1); "
    "from stagereg.checkpoint.process_writer import answer; serve(int(sys.argv[1]), answer); "
    "sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"  # without a second of taking torch apart
)


class ProcessDiedError(CheckpointError):
    """The writer process died while it was asked something."""


class ProcessHangsError(CheckpointError):
    """The writer process did not answer in time, and was killed."""


class WriterProcess:
    """The process, seen from its parent. Methods may be called on any thread; one question at a time is answered.

    Args:
        niceness: how much lower its priority is than the parent's, from 0 to 19, so that training keeps its cores.

    Attributes:
        restarts: how often a dead one was replaced.
    """

    def __init__(self, niceness: int = 10) -> None:
        self.restarts = 0
        self._niceness = niceness
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None if there is none."""
        child = self._child
        return child.pid if child is not None and child.lives() else None

    def start(self) -> None:
        """Start it, if it does not run; takes milliseconds, and it is ready some seconds later.

        If it cannot be started, the next request raises.
        """
        with self._lock:
            try:
                self._running()
            except CheckpointError as error:
                _log.warning("stagereg: %s", error)

    def ask(self, question: bytes, until: float = math.inf) -> bytes:
        """Send a question and return the answer.

        A process found dead is replaced. One that dies on the question is replaced once, and asked again. One that has
        not answered when the time comes is killed, and the next question goes to another one.

        Args:
            question: as the function that serves there understands it.
            until: when it is to be answered, on ``time.monotonic``.

        Raises:
            CheckpointError: the second one died as well, or one was too late, or it cannot be started, or after
                :meth:`close`.
        """
        with self._lock:
            try:
                return self._ask(question, until)
            except ProcessDiedError as death:
                if self._closed:
                    raise
                _log.warning("stagereg: %s; another one is started and writes again", death)
            try:
                return self._ask(question, until)
            except ProcessDiedError as death:
                raise CheckpointError(
                    f"{death}, and so did the one before, on the same checkpoint. If the system ran out of memory, it "
                    "ends processes with SIGKILL: see the kernel's log (dmesg)."
                ) from None

    def close(self, now: bool = False) -> None:
        """End the process, after the question it has; or kill it ``now``. Twice is harmless."""
        child = self._child
        if now:
            self._closed = True  # before the one who asks sees it die
            if child is not None:
                child.kill()
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.end()
                self._child = None

    def _ask(self, question: bytes, until: float) -> bytes:
        try:
            return self._running().ask(question, until)
        except ProcessHangsError:
            # Not asked again even if it cannot be killed, in a system call that nothing ends.
            self._child = None
            self.restarts += 1
            raise

    def _running(self) -> _Child:
        if self._closed:
            raise CheckpointError("This writer process was closed; construct another one.")
        if self._child is not None and not self._child.lives():
            self._child.end()
            self._child = None
            self.restarts += 1
        if self._child is None:
            self._child = _Child(self._niceness)
        return self._child


class _Child:
    """One child and the socket to it."""

    def __init__(self, niceness: int) -> None:
        here, there = socket.socketpair()
        # No accelerator: torch's writer would make a context there, which costs memory on the device.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        arguments = [str(there.fileno()), str(os.getpid()), str(niceness), *sys.path]
        with there:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                    env=environment,
                    process_group=0,
                )
            except OSError as error:
                here.close()
                raise CheckpointError(f"No process to write checkpoints could be started: {error}") from error
        self.pid = self._process.pid
        self._socket = here
        self._socket.settimeout(_LOOK_S)
        self._end = weakref.finalize(self, _end, self._process, self._socket, os.getpid())

    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, until: float) -> bytes:
        begun = time.monotonic()

        def go_on() -> bool:
            if time.monotonic() < until:
                return self.lives()
            self.kill()
            self.end()
            raise ProcessHangsError(
                f"The process that writes checkpoints (pid {self.pid}) has not written this one in "
                f"{time.monotonic() - begun:.0f} s and was killed. Its storage hangs, or is too slow."
            )

        try:
            _send(self._socket, question, go_on)
            return _receive(self._socket, go_on)
        except (EOFError, OSError):
            # What is at the other end may be about to die: the next one must not meet it at the same files.
            self.end()
            raise ProcessDiedError(f"The process that writes checkpoints (pid {self.pid}) {self._fate()}") from None

    def end(self) -> None:
        self._end()

    def kill(self) -> None:
        self._process.kill()

    def _fate(self) -> str:
        code = self._process.returncode
        if code is None:
            return "is stuck in the kernel"
        return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with status {code}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, parent: int) -> None:
    if os.getpid() != parent:  # a forked child has the socket too, but the process is not its own
        connection.close()
        return
    with contextlib.suppress(OSError), connection:
        connection.shutdown(socket.SHUT_RDWR)  # reaches the process also where a forked child has the socket too
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # in a system call that nothing ends, such as on a dead network drive
            _log.error("stagereg: the writer process %d cannot be ended", process.pid)


def _send(connection: socket.socket, message: bytes, go_on: Callable[[], bool]) -> None:
    for part in (_LENGTH.pack(len(message)), message):
        rest = memoryview(part)
        while rest:
            try:
                rest = rest[connection.send(rest[:_CHUNK]) :]
            except TimeoutError:
                if not go_on():
                    raise EOFError from None


def _receive(connection: socket.socket, go_on: Callable[[], bool]) -> bytes:
    (nbytes,) = _LENGTH.unpack(_receive_bytes(connection, _LENGTH.size, go_on))
    return _receive_bytes(connection, nbytes, go_on)


def _receive_bytes(connection: socket.socket, nbytes: int, go_on: Callable[[], bool]) -> bytes:
    parts: list[bytes] = []
    while nbytes:
        try:
            part = connection.recv(min(nbytes, _CHUNK))
        except TimeoutError:
            if not go_on():
                raise EOFError from None
            continue
        if not part:
            raise EOFError
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


# -- the other side


def belong(parent: int) -> None:
    """Have this process end at once when ``parent``, a process id, does, and for nothing else that can be helped.

    Called before torch is imported, which takes seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # it is the parent who decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def serve(descriptor: int, answer: Callable[[bytes], bytes]) -> None:
    """Answer what comes over the socket until it is closed. The main function of the process, after :func:`belong`.

    Args:
        descriptor: of this side's end of the socket.
        answer: from a question makes the answer to it; must not raise.
    """
    with socket.socket(fileno=descriptor) as connection:
        try:
            while True:
                # In one expression: no variable may hold on to a question once its answer is on its way.
                _send(connection, answer(_receive(connection, _always)), _always)
        except (EOFError, OSError):
            return


def _always() -> bool:
    return True


def _end_with(parent: int) -> None:
    # Not PR_SET_PDEATHSIG, which means the thread that started this process and not the process.
    if hasattr(os, "pidfd_open"):
        try:
            alive = os.pidfd_open(parent)
        except OSError:
            pass
        else:
            if os.getppid() == parent:
                select.select([alive], [], [])
    while os.getppid() == parent:
        threading.Event().wait(1.0)
    os._exit(1)
