"""Copies bytes: within host memory on a few threads, and from accelerators on side streams, without blocking.

Copies in host memory use the compiled extension or ``memmove``. Even without the extension, a large ``memmove`` uses
non-temporal stores, which ``Tensor.copy_`` never does. Calls with ctypes release the GIL. :class:`CopyEngine` handles
addresses, not state dicts; ``layout`` determines the destination of all bytes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import torch

import stagereg.kernel.compiled as compiled
from stagereg.base.capture import relaxed_capture
from stagereg.base.device_copy import DeviceCopy
from stagereg.base.forks import RenewedInChild
from stagereg.errors import StagingError

COPY_THREADS = "stagereg-copy"  # prefix of the names of threads that copy

_Move = tuple[int, int, int]  # (offset in the destination block, address of the source, number of bytes)
_Piece = Callable[[int], None]  # a part of a copy: a function of the address of the destination block

_BEGIN_S = 1e-3  # maximum seconds to wait until another thread has begun
WORTH_A_THREAD = 2**20  # bytes; below this size, a second thread costs more time than it saves


class CopyEngine:
    """Threads and streams that copy. One thread at a time may call the engine; it counts as one of ``threads``."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise StagingError([], f"stager.threads must be at least 1, got {threads}")
        self.threads = threads
        self.renew()
        _engines.add(self)

    def renew(self) -> None:
        """Create new threads and streams. A forked child has no threads or streams of its parent."""
        self._workers = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix=COPY_THREADS)
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, base: int, pieces: Sequence[_Piece], held: object = None, aside: bool = False) -> CopyTask:
        """Start to run ``pieces`` on other threads, which keep ``held`` alive. The caller must call ``finish``.

        ``aside``: use another thread for a single piece too. Returns when that thread has begun, at most a millisecond
        later, because it would get the GIL too late if the caller's next operations hold the GIL.
        """
        task = CopyTask(base, pieces)
        others = max(min(self.threads, len(pieces)) - 1, int(aside and self.threads > 1))
        with suppress(RuntimeError):  # Python 3.12 starts no threads at interpreter exit
            for _ in range(others):
                self._workers.submit(task.work, held)
            if aside and others:
                task.began.wait(_BEGIN_S)
        return task

    def fetch(self, copies: Mapping[torch.device, DeviceCopy], events: list[tuple[torch.device, torch.Event]]) -> None:
        """Queue all steps of ``copies`` on side streams, after the work that the caller has queued.

        The caller's stream does not wait. Appends to ``events`` one event per device, which is complete when all queued
        copies are, also if a step raises an error. The caller must then wait for the events.
        """
        for device, copy in copies.items():
            stream = self._streams.get(device) or self._streams.setdefault(device, torch.Stream(device))
            stream.wait_event(torch.accelerator.current_stream(device).record_event())
            with relaxed_capture(), stream:
                try:
                    for step in copy.steps:
                        step.queue()
                finally:
                    events.append((device, stream.record_event()))

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._streams.clear()
        self._workers.shutdown(wait=True)


_engines = RenewedInChild(CopyEngine.renew)


class CopyTask:
    """A copy in several pieces, into the block of memory at address ``base``. Any thread may run the next piece."""

    def __init__(self, base: int, pieces: Iterable[_Piece]) -> None:
        self._base, self._pieces = base, deque(pieces)
        self._busy: list[threading.Lock] = []  # one lock for each thread, which holds it while it runs pieces
        self._failure: Exception | None = None
        self.began = threading.Event()  # set when a thread is about to run its first piece

    def work(self, held: object = None) -> None:
        """Run pieces until none is left. An error ends the task for all threads."""
        busy = threading.Lock()
        with busy:
            try:
                self._busy.append(busy)
                while True:
                    try:
                        work = self._pieces.popleft()
                    except IndexError:
                        return
                    self.began.set()
                    work(self._base)
            except BaseException as error:  # an error in a piece, or an interrupt such as Ctrl-C
                interrupted = StagingError([], f"the copy was interrupted ({error!r})")
                self._failure = error if isinstance(error, Exception) else interrupted
                self._pieces.clear()
                raise

    @property
    def is_begun_whole(self) -> bool:
        """Whether every piece has been started."""
        return not self._pieces

    def cancel(self) -> None:
        """Drop the pieces that no thread has started."""
        self._pieces.clear()

    def finish(self) -> None:
        """Run the remaining pieces, and wait until other threads have finished. Raises the error of a piece."""
        try:
            self.work()
        finally:
            for busy in self._busy:
                with busy:
                    pass
        if self._failure is not None:
            raise self._failure


class Batch:
    """A group of copies within host memory, which can be repeated any number of times."""

    def __init__(self, moves: Sequence[_Move]) -> None:
        self._moves = moves
        self._pieces: list[_Piece] = []

    def pieces(self, threads: int) -> list[_Piece]:
        """Return the copies as pieces for a :class:`CopyTask`: one for small copies, otherwise one for each thread."""
        if not self._pieces:
            is_much = sum(nbytes for *_, nbytes in self._moves) >= WORTH_A_THREAD
            self._pieces = [*map(piece, filter(None, _split(self._moves, threads if is_much else 1)))]
        return self._pieces


def piece(moves: Sequence[_Move]) -> _Piece:
    """Return a function that copies ``moves`` in order, on the calling thread."""
    if compiled.copy:
        table = array("Q", chain.from_iterable(moves))
        return functools.partial(compiled.copy, (ctypes.c_uint64 * len(table)).from_buffer(table), len(moves))
    return functools.partial(_move, moves)


def _move(moves: Sequence[_Move], base: int) -> None:
    for to, source, nbytes in moves:
        ctypes.memmove(base + to, source, nbytes)


def _split(moves: Sequence[_Move], ways: int) -> list[list[_Move]]:
    share = -(-sum(nbytes for *_, nbytes in moves) // ways)
    shares: list[list[_Move]] = [[] for _ in range(ways)]
    done = 0
    for to, source, nbytes in moves:
        while nbytes:
            cut = min(nbytes, share - done % share)
            shares[done // share].append((to, source, cut))
            to, source, nbytes, done = to + cut, source + cut, nbytes - cut, done + cut
    return shares
