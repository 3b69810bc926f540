"""Byte transfers: the compiled extension or ``memmove`` on a few threads, and non-blocking copies on side streams.

Without the compiled extension, a single large ``memmove`` still uses the C library's non-temporal path, which
``Tensor.copy_`` never does. ctypes releases the GIL during each call. A :class:`CopyEngine` handles addresses only, not
state dicts; ``layout`` determines the destination of all bytes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import torch

import stagereg.kernel.compiled as compiled
from stagereg.base.forks import RenewedInChild
from stagereg.errors import StagingError

COPY_THREADS = "stagereg-copy"  # name prefix of copying threads

_Move = tuple[int, int, int]  # offset in host memory, address of the source, bytes
_Piece = Callable[[int], None]  # work on a block of memory, called with the address of its first byte

_WORTH_A_THREAD = 2**20  # bytes below which another thread costs more than it saves


class CopyEngine:
    """Threads and streams that copy. One thread at a time may call the engine, and counts as one of ``threads``."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise StagingError([], f"stager.threads must be at least 1, got {threads}")
        self.threads = threads
        self.renew()
        _engines.add(self)

    def renew(self) -> None:
        """Drop all threads and streams, which do not exist in a forked child."""
        self._workers = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix=COPY_THREADS)
        self._streams: dict[torch.device, torch.Stream] = {}

    def run(self, base: int, pieces: Sequence[_Piece], held: object = None) -> CopyTask:
        """Start work on the pieces on other threads, which keep ``held`` alive. The caller must finish the task."""
        task = CopyTask(base, pieces)
        with suppress(RuntimeError):  # at interpreter exit, Python 3.12 starts no more threads
            for _ in range(min(self.threads, len(pieces)) - 1):
                self._workers.submit(task.work, held)
        return task

    def fetch(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.device, torch.Event]]:
        """Copy tensors, given as (destination, source) pairs; return one event per device, at the end of its copies.

        Copies from an accelerator are queued on a separate stream, after the work that the caller has queued; the
        caller's stream does not wait. Copies from host memory are complete on return.
        """
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for to, source in pairs:
            by_device.setdefault(source.device, []).append((to, source))
        for to, source in by_device.pop(torch.device("cpu"), ()):
            to.copy_(source)
        events: list[tuple[torch.device, torch.Event]] = []
        for device, away in by_device.items():
            stream = self._streams.get(device) or self._streams.setdefault(device, torch.Stream(device))
            stream.wait_event(torch.accelerator.current_stream(device).record_event())
            with stream:
                for to, source in away:
                    to.copy_(source, non_blocking=True)
                events.append((device, stream.record_event()))
        return events

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._streams.clear()
        self._workers.shutdown(wait=True)


_engines = RenewedInChild(CopyEngine.renew)


class CopyTask:
    """Pieces of work on the block of memory that begins at ``base``; any thread may take the next piece."""

    def __init__(self, base: int, pieces: Iterable[_Piece]) -> None:
        self._base, self._pieces = base, deque(pieces)
        self._busy: list[threading.Lock] = []  # one lock per thread that takes pieces, held while it does
        self._failure: Exception | None = None

    def work(self, held: object = None) -> None:
        """Take pieces while any are left. An error in a piece ends the task for all threads."""
        busy = threading.Lock()
        with busy:
            try:
                self._busy.append(busy)
                while True:
                    try:
                        work = self._pieces.popleft()
                    except IndexError:
                        return
                    work(self._base)
            except BaseException as error:  # an error of a piece, or an interrupt such as Ctrl-C between two pieces
                interrupted = StagingError([], f"the copy was interrupted ({error!r})")
                self._failure = error if isinstance(error, Exception) else interrupted
                self._pieces.clear()
                raise

    @property
    def is_begun_whole(self) -> bool:
        """Whether all pieces have been taken."""
        return not self._pieces

    def cancel(self) -> None:
        """Drop the pieces that no thread has taken yet."""
        self._pieces.clear()

    def finish(self) -> None:
        """Take the remaining pieces, and wait until other threads have finished theirs. Raises the error of a piece."""
        try:
            self.work()
        finally:
            for busy in self._busy:
                with busy:
                    pass
        if self._failure is not None:
            raise self._failure


class Batch:
    """Copies within host memory that are made together, any number of times."""

    def __init__(self, moves: Sequence[_Move]) -> None:
        self._moves = moves
        self._pieces: list[_Piece] = []

    def pieces(self, threads: int) -> list[_Piece]:
        """Return the copies as pieces for a :class:`CopyTask`: a single one, or enough for several threads."""
        if not self._pieces:
            is_much = sum(nbytes for *_, nbytes in self._moves) >= _WORTH_A_THREAD
            self._pieces = [*map(piece, filter(None, _split(self._moves, threads if is_much else 1)))]
        return self._pieces


def piece(moves: Sequence[_Move]) -> _Piece:
    """Return a function that makes ``moves`` in order on the calling thread."""
    if compiled.copy:
        table = array("Q", chain.from_iterable(moves))
        return functools.partial(compiled.copy, (ctypes.c_uint64 * len(table)).from_buffer(table), len(moves))
    return functools.partial(_move, moves)


def _move(moves: Sequence[_Move], base: int) -> None:
    for to, source, nbytes in moves:
        ctypes.memmove(base + to, source, nbytes)


def _split(moves: Sequence[_Move], ways: int) -> list[list[_Move]]:
    """Divide ``moves`` into ``ways`` lists of equal bytes, splitting a move at the end of a list."""
    share = -(-sum(nbytes for *_, nbytes in moves) // ways)
    shares: list[list[_Move]] = [[] for _ in range(ways)]
    done = 0
    for to, source, nbytes in moves:
        while nbytes:
            cut = min(nbytes, share - done % share)
            shares[done // share].append((to, source, cut))
            to, source, nbytes, done = to + cut, source + cut, nbytes - cut, done + cut
    return shares
