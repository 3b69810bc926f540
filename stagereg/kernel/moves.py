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
from stagereg.kernel.layout import Move
from stagereg.kernel.writers import COPY_THREADS

__all__ = ["Mover", "move", "split"]

_SPLIT_BYTES = 2**20  # below this, handing a copy to another thread costs more than it saves


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

    def memmove(self, base: int, moves: Sequence[Move]) -> None:
        """Copy host memory to host memory; ``base`` is what the offsets count from. Returns when it is done."""
        large = [move for move in moves if move[2] >= _SPLIT_BYTES]
        shares = split(large, self._threads) if large else []
        pending: list[Future[None]] = []
        try:
            for share in shares[1:]:
                pending.append(self._crew().submit(move, base, share))
            move(base, shares[0] if shares else [])
            move(base, moves if not large else [move for move in moves if move[2] < _SPLIT_BYTES])
        finally:
            wait(pending)

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
