"""The copy: a state dict in, an equal and independent state dict in host memory out.

:class:`HostCopier` is what every stager is built on. It walks the state dict (``tree``), fits a plan to it or keeps the
one it has (``layout``), borrows memory (``memory``) and moves the bytes:

* from host memory with ``memmove`` on a few threads; ctypes lets go of the GIL meanwhile, and one large ``memmove``
  uses the C library's non-temporal path, which ``Tensor.copy_`` never does;
* from an accelerator with non-blocking copies on a stream of their own, which waits for the work already queued by the
  caller; one event tells when they are done. The caller's stream is never made to wait.

When :meth:`HostCopier.copy` returns, the bytes are there: no later write to the source shows in the copy. What is
handed out stays as it is until the last tensor over it is gone. Plans and memory are reused; correctness never depends
on it, since the plan's signature (addresses, shapes, dtypes, strides) is compared on every call.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.layout import Layout, Move, Piece, Region, lay_out, sign
from stagereg.kernel.memory import Loan, Pool
from stagereg.kernel.tree import path_to, unravel
from stagereg.kernel.writers import COPY_THREADS

__all__ = ["HostCopier"]

_SPLIT_BYTES = 2**20  # below this, handing a copy to another thread costs more than it saves


class HostCopier:
    """Copies state dicts to host memory.

    Args:
        pool: where the memory comes from; closed together with the copier.
        threads: threads that copy from host memory, the caller's among them.
        type_check: refuse leaves of types that torch's checkpoint does not name (see :func:`.tree.unravel`).

    One thread at a time may call :meth:`copy`.
    """

    def __init__(self, pool: Pool, threads: int = 2, type_check: bool = False) -> None:
        if threads < 1:
            raise StagingError([], f"threads must be at least 1, not {threads}")
        self._pool = pool
        self._threads = threads
        self._type_check = type_check
        self._layout: Layout | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._closed = False

    def copy(self, state: Any) -> Any:
        """Return an independent copy of ``state`` in host memory.

        Raises:
            StagingError: an entry cannot be staged (its path is named), or memory ran out; the copier stays usable.
            StagerClosedError: after :meth:`close`.
        """
        if self._closed:
            raise StagerClosedError
        with torch.no_grad():
            with _no_collection():
                skeleton = unravel(state, self._type_check)
                layout = self._fit(state, skeleton.tensors)
            loan = self._pool.borrow(layout.nbytes)
            with _no_collection():
                staged = _tensors_over(loan, layout, skeleton.tensors)
                self._move(loan, layout, skeleton.tensors, staged)
                return skeleton.fill(staged)

    def close(self) -> None:
        """Free plans, threads and kept memory. Copies handed out stay valid. Closing twice is harmless."""
        self._closed = True
        self._layout = None
        self._streams.clear()
        self._pool.close()
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None

    def _fit(self, state: Any, tensors: Sequence[torch.Tensor]) -> Layout:
        try:
            signature = sign(tensors)
            if self._layout is None or self._layout.signature != signature:
                self._layout = lay_out(tensors, signature)
            return self._layout
        except StagingError as error:
            (index,) = error.path
            assert isinstance(index, int)
            raise StagingError(path_to(state, index), error.reason) from error.__cause__

    # -- moving

    def _move(
        self, loan: Loan, layout: Layout, tensors: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]
    ) -> None:
        away: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for region in layout.remote:
            away.setdefault(tensors[region.source].device, []).append(_region_pair(loan, region, tensors))
        for i in layout.packed:
            away.setdefault(tensors[i].device, []).append((staged[i], tensors[i]))
        events = [self._fetch(device, pairs) for device, pairs in away.items()]
        self._memmove(loan.address, layout.moves)
        for event in events:
            if event is not None:
                event.synchronize()

    def _fetch(self, device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event | None:
        """Copy tensor by tensor; from an accelerator on the side stream, returning the event that ends it."""
        if device.type == "cpu":
            for to, source in pairs:
                to.copy_(source)
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            event: torch.Event = stream.record_event()
        return event

    def _memmove(self, base: int, moves: Sequence[Move]) -> None:
        large = [move for move in moves if move[2] >= _SPLIT_BYTES]
        shares = _split(large, self._threads) if large else []
        pending: list[Future[None]] = []
        try:
            for share in shares[1:]:
                pending.append(self._crew().submit(_run, base, share))
            _run(base, shares[0] if shares else [])
            _run(base, moves if not large else [move for move in moves if move[2] < _SPLIT_BYTES])
        finally:
            wait(pending)

    def _crew(self) -> ThreadPoolExecutor:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self._threads - 1, thread_name_prefix=COPY_THREADS)
        return self._workers


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Many objects are made at once and none is garbage: a full collection in between would cost more than the copy."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(base: int, moves: Sequence[Move]) -> None:
    memmove = ctypes.memmove
    for to, source, nbytes in moves:
        memmove(base + to, source, nbytes)


def _split(moves: Sequence[Move], ways: int) -> list[list[Move]]:
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


def _region_pair(loan: Loan, region: Region, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A region as bytes: where it goes, and where it lies on its device."""
    owner = tensors[region.source]
    source = torch.empty(0, dtype=torch.uint8, device=owner.device)
    source.set_(owner.untyped_storage(), region.begin, (region.nbytes,), (1,))
    return torch.frombuffer(loan.view, dtype=torch.uint8, count=region.nbytes, offset=region.offset), source


# -- tensors over a loan


def _tensors_over(loan: Loan, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make the staged tensors; those of one region share one storage, which has the region's bytes and no more."""
    shared: dict[int, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    for piece, x in zip(layout.pieces, tensors, strict=True):
        if piece.alone:
            flat = torch.frombuffer(loan.view, dtype=x.dtype, count=piece.span, offset=piece.offset)
            made.append(flat if len(piece.shape) == 1 else flat.resize_(piece.shape))
        else:
            made.append(_tensor_over(loan, piece, x.dtype, shared))
    return made


def _tensor_over(loan: Loan, piece: Piece, dtype: torch.dtype, shared: dict[int, torch.Tensor]) -> torch.Tensor:
    if piece.span == 0:
        return torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device="cpu")
    base = shared.get(piece.offset)
    if base is None:
        base = torch.frombuffer(loan.view, dtype=torch.uint8, count=piece.nbytes, offset=piece.offset)
        shared[piece.offset] = base
    made = torch.empty(0, dtype=dtype, device="cpu")
    return made.set_(base.untyped_storage(), piece.start, piece.shape, piece.stride)
