"""Moving bytes: ``memmove`` on a few threads, and non-blocking copies on side streams.

ctypes lets go of the GIL during a ``memmove``, and one large ``memmove`` uses the C library's non-temporal path, which
``Tensor.copy_`` never does. Many small pieces are copied by one system call (:func:`read_many`), also without the GIL.

A :class:`CopyEngine` knows addresses and nothing of state dicts; ``layout`` decides which bytes go where.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch

from stagereg.errors import StagingError

__all__ = ["COPY_THREADS", "Batch", "CopyEngine", "CopyTask", "Move", "iovecs", "move", "read_many"]

COPY_THREADS = "stagereg-copy"
"""How the names of copying threads begin."""

Move = tuple[int, int, int]
"""Offset in host memory, address of the source, bytes."""

_Piece = Callable[[int], None]  # work on a block of memory, called with the address of its first byte

_SMALL_BYTES = 2**16  # below this, the call costs more than the copying
_SPLIT_BYTES = 2**20  # less than this, or fewer small moves than that, and another thread costs more than it saves
_SPLIT_COUNT = 2048
_AT_ONCE = 1024  # pieces that one system call takes (IOV_MAX)

_readv: Any = ctypes.CDLL(None).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]


class CopyEngine:
    """Threads and streams that copy. One thread at a time may call it.

    Args:
        threads: threads that copy from host memory, the caller's among them.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise StagingError([], f"stager.threads must be at least 1, not {threads}")
        self.threads = threads
        self._workers = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix=COPY_THREADS)  # started when needed
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, base: int, batch: Batch) -> CopyTask:
        """Begin to copy host memory to host memory; ``base`` is what the offsets count from.

        The other threads begin where there is enough for them; the caller has to finish the task.
        """
        return self.run(CopyTask(base, batch.pieces(self.threads)), batch.is_much)

    def run(self, task: CopyTask, is_much: bool) -> CopyTask:
        """Have the other threads work on ``task`` too, if it is much; the caller has to finish it."""
        if is_much:
            for _ in range(self.threads - 1):
                self._workers.submit(task.work)
        return task

    def fetch(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.device, torch.Event]]:
        """Copy tensor by tensor, each pair being where to and where from.

        From an accelerator the copies are queued on a stream of their own, behind what the caller has queued so far;
        the caller's stream is not made to wait.

        Returns:
            The events of their ends, by device; what comes from host memory is copied already.
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
        """End the threads. Closing twice is harmless."""
        self._streams.clear()
        self._workers.shutdown(wait=True)


class CopyTask:
    """Pieces of work on the block of memory that begins at ``base``, of which any thread may take the next."""

    def __init__(self, base: int, pieces: Iterable[_Piece]) -> None:
        self._base = base
        self._pieces: queue.Queue[_Piece] = queue.Queue()
        self._failure: Exception | None = None
        for piece in pieces:
            self._pieces.put(piece)

    def work(self) -> None:
        """Take pieces as long as there are any."""
        while True:
            try:
                piece = self._pieces.get_nowait()
            except queue.Empty:
                return
            try:
                piece(self._base)
            except Exception as error:
                self._failure = error
            self._pieces.task_done()

    def finish(self) -> None:
        """Take the pieces that are left, and return when those of others are done too. Raises what a piece raised."""
        self.work()
        self._pieces.join()
        if self._failure is not None:
            raise self._failure


class Batch:
    """Moves from host memory to host memory that are made together, any number of times."""

    def __init__(self, moves: Sequence[Move]) -> None:
        small = [move for move in moves if move[2] < _SMALL_BYTES]
        self._small = [_Small(small[at : at + _AT_ONCE]) for at in range(0, len(small), _AT_ONCE)]
        self._large = [move for move in moves if move[2] >= _SMALL_BYTES]
        # Whether other threads are of use.
        self.is_much = sum(nbytes for _, _, nbytes in self._large) >= _SPLIT_BYTES or len(small) >= _SPLIT_COUNT
        self._pieces: list[_Piece] = []

    def pieces(self, threads: int) -> list[_Piece]:
        """Return the moves as a :class:`CopyTask` takes them; the large ones as equal shares for some threads."""
        if not self._pieces:
            shares = _split(self._large, threads if self.is_much else 1)
            self._pieces = [*(functools.partial(move, moves=moves) for moves in shares), *self._small]
        return self._pieces


class _Small:
    """Small moves, made by one system call."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves = moves
        sizes = [nbytes for _, _, nbytes in moves]
        self._nbytes = sum(sizes)
        self._sources = iovecs([source for _, source, _ in moves], sizes)
        # Blocks of memory are used in turns, so the last few are remembered.
        self._targets = functools.lru_cache(4)(lambda base: iovecs([base + to for to, _, _ in moves], sizes))

    def __call__(self, base: int) -> None:
        if not read_many(self._targets(base), self._sources, self._nbytes):
            move(base, self._moves)


def move(base: int, moves: Sequence[Move]) -> None:
    """Copy host memory to host memory on the calling thread."""
    memmove = ctypes.memmove
    for to, source, nbytes in moves:
        memmove(base + to, source, nbytes)


def _split(moves: Sequence[Move], ways: int) -> list[list[Move]]:
    """Deal ``moves`` out in ``ways`` shares of equal bytes, cutting a move where a share is full."""
    share = -(-sum(nbytes for _, _, nbytes in moves) // ways)
    shares: list[list[Move]] = []
    left = 0
    for to, source, nbytes in moves:
        while nbytes:
            if left == 0:
                shares.append([])
                left = share
            cut = min(nbytes, left)
            shares[-1].append((to, source, cut))
            to, source, nbytes, left = to + cut, source + cut, nbytes - cut, left - cut
    return shares


def iovecs(addresses: Iterable[int], sizes: Sequence[int]) -> array[int]:
    """Return runs of memory as the system call takes them: an array of ``struct iovec``, address and bytes of each."""
    return array("Q", chain.from_iterable(zip(addresses, sizes, strict=True)))


def read_many(to: array[int], source: array[int], nbytes: int) -> bool:
    """Copy up to 1024 pieces of the same sizes, ``nbytes`` in all, with one system call; return whether that was done.

    ``process_vm_readv`` of Linux copies from one process to another, or within one, which is always allowed. Where a
    sandbox refuses the call, the caller copies piece by piece.
    """
    count = len(to) // 2
    ours, theirs = to.buffer_info()[0], source.buffer_info()[0]
    return bool(_readv(os.getpid(), ours, count, theirs, count, 0) == nbytes)
