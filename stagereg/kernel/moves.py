"""Moving bytes: ``memmove`` on a few threads, and non-blocking copies on side streams.

ctypes lets go of the GIL during a ``memmove``, and one large ``memmove`` uses the C library's non-temporal path, which
``Tensor.copy_`` never does. A :class:`Mover` knows addresses and nothing of state dicts; which bytes go where is said
by ``layout``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from stagereg.errors import StagingError
from stagereg.kernel.vectored import Pieces, read_many
from stagereg.kernel.writers import COPY_THREADS

__all__ = ["Batch", "Move", "Mover", "move", "split"]

Move = tuple[int, int, int]
"""Offset in host memory, address of the source, bytes."""

_SMALL_BYTES = 2**16  # below this, the call costs more than the copying
_MANY = 64  # so many small pieces are worth a system call that takes them all
_SPLIT_BYTES = 2**20  # less than this, or fewer small pieces than that, and another thread costs more than it saves
_SPLIT_COUNT = 2048
_BLOCKS = 4


class Mover:
    """Threads and streams that copy. One thread at a time may call it.

    Args:
        threads: threads that copy from host memory, the caller's among them.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise StagingError([], f"threads must be at least 1, not {threads}")
        self._threads = threads
        self._workers: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def memmove(self, base: int, batch: Batch) -> None:
        """Copy host memory to host memory; ``base`` is what the offsets count from. Returns when it is done."""
        pending: list[Future[None]] = []
        try:
            for share in batch.shares(self._threads)[1:]:
                pending.append(self._crew().submit(share, base))
            batch.shares(self._threads)[0](base)
        finally:
            wait(pending)
        for done in pending:
            done.result()

    def fetch(
        self,
        device: torch.device,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        behind: Sequence[torch.Event] = (),
    ) -> torch.Event | None:
        """Copy tensor by tensor, each pair being where to and where from.

        From an accelerator the copies are queued on a stream of their own, behind the given events or, if there are
        none, behind what the caller has queued so far; the caller's stream is not made to wait.

        Returns:
            The event that tells when they are done; None from host memory, where they are.
        """
        if device.type == "cpu":
            for to, source in pairs:
                to.copy_(source)
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        for event in behind or [torch.accelerator.current_stream(device).record_event()]:
            stream.wait_event(event)
        with stream:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            done: torch.Event = stream.record_event()
        return done

    def close(self) -> None:
        """End the threads. Closing twice is harmless."""
        self._streams.clear()
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None

    def _crew(self) -> ThreadPoolExecutor:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self._threads - 1, thread_name_prefix=COPY_THREADS)
        return self._workers


class Batch:
    """Moves from host memory to host memory that are made together, any number of times."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._small = [move for move in moves if move[2] < _SMALL_BYTES]
        self._other = [move for move in moves if move[2] >= _SMALL_BYTES]
        self._shares: dict[int, list[_Share]] = {}

    def shares(self, threads: int) -> list[_Share]:
        """Return what each of some threads is to do; fewer shares where sharing would cost more than it saves."""
        made = self._shares.get(threads)
        if made is None:
            total = sum(nbytes for _, _, nbytes in self._other)
            ways = threads if total >= _SPLIT_BYTES or len(self._small) >= _SPLIT_COUNT else 1
            other = split(self._other, ways) if self._other else []
            size = -(-len(self._small) // ways)
            made = self._shares[threads] = [
                _Share(other[k] if k < len(other) else [], self._small[k * size : (k + 1) * size]) for k in range(ways)
            ]
        return made


class _Share:
    """What one thread copies."""

    def __init__(self, moves: Sequence[Move], small: Sequence[Move]) -> None:
        self._moves = moves
        self._small = small
        self._sizes = [nbytes for _, _, nbytes in small]
        self._sources = Pieces([source for _, source, _ in small], self._sizes)
        self._targets: dict[int, Pieces] = {}

    def __call__(self, base: int) -> None:
        if len(self._small) < _MANY or not read_many(self._at(base), self._sources):
            move(base, self._small)
        move(base, self._moves)

    def _at(self, base: int) -> Pieces:
        """Where the small pieces go; blocks of memory are used in turns, so the last few are remembered."""
        pieces = self._targets.get(base)
        if pieces is None:
            if len(self._targets) >= _BLOCKS:
                self._targets.clear()
            pieces = self._targets[base] = Pieces([base + to for to, _, _ in self._small], self._sizes)
        return pieces


def move(base: int, moves: Sequence[Move]) -> None:
    """Copy host memory to host memory on the calling thread."""
    memmove = ctypes.memmove
    for to, source, nbytes in moves:
        memmove(base + to, source, nbytes)


def split(moves: Sequence[Move], ways: int) -> list[list[Move]]:
    """Deal ``moves`` out in ``ways`` shares of equal bytes, cutting a move where a share is full."""
    share = -(-sum(nbytes for _, _, nbytes in moves) // ways)
    shares: list[list[Move]] = [[]]
    room = share
    for to, source, nbytes in moves:
        while nbytes:
            if room == 0:
                shares.append([])
                room = share
            cut = min(nbytes, room)
            shares[-1].append((to, source, cut))
            to, source, nbytes, room = to + cut, source + cut, nbytes - cut, room - cut
    return shares
