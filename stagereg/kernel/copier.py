"""The copy: a state dict in, an equal and independent state dict in host memory out.

:class:`HostCopier` is what every stager is built on. It walks the state dict (``tree``), fits a plan to it or keeps the
one it has (``layout``), borrows memory (``memory``) and has the bytes moved (``moves``): host memory by a few threads,
an accelerator's on a stream of its own, which waits for the work already queued by the caller and makes the caller's
stream wait for nothing.

When :meth:`HostCopier.copy` returns, the bytes are there: no later write to the source shows in the copy. What is
handed out stays as it is until the last tensor over it is gone. Plans and memory are reused; correctness never depends
on it, since the plan's signature (addresses, shapes, dtypes, strides) is compared on every call.

A stager that copies in another order takes a :class:`PendingCopy`, which is a copy whose bytes are not there yet.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.layout import Layout, Piece, Region, plan_layout, signature
from stagereg.kernel.memory import Lease, Pool, register_padding
from stagereg.kernel.replay import Match, Replay
from stagereg.kernel.state_dict import TreeSpec, flatten, path_to
from stagereg.kernel.transfer import CopyEngine

__all__ = ["HostCopier", "PendingCopy", "naming", "no_collection"]


@dataclass(slots=True)
class PendingCopy:
    """Memory for a copy that has no content yet.

    Attributes:
        sources: the tensors to be copied; holding them keeps their memory alive.
        layout: where their bytes are to go.
        lease: the memory.
    """

    sources: Sequence[torch.Tensor]
    layout: Layout
    lease: Lease
    _staged: list[torch.Tensor] | None = None

    @property
    def staged(self) -> list[torch.Tensor]:
        """The tensors over the memory, one for each source; made when they are first asked for."""
        if self._staged is None:
            with torch.no_grad():
                self._staged = _tensors_over(self.lease, self.layout, self.sources)
        return self._staged

    def pairs(
        self, regions: Sequence[Region], packed: Sequence[int]
    ) -> dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return what ``CopyEngine.fetch`` takes, by device, for some of the layout's regions and packed tensors."""
        away: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for region in regions:
            owner = self.sources[region.source]
            away.setdefault(owner.device, []).append(_region_pair(self.lease, region, owner))
        for i in packed:
            away.setdefault(self.sources[i].device, []).append((self.staged[i], self.sources[i]))
        return away


class HostCopier:
    """Copies state dicts to host memory.

    Args:
        pool: where the memory comes from; closed together with the copier.
        threads: threads that copy from host memory, the caller's among them.
        type_check: refuse leaves of types that torch's checkpoint does not name (see :func:`.tree.flatten`).

    One thread at a time may call it.
    """

    def __init__(self, pool: Pool, threads: int = 2, type_check: bool = False) -> None:
        self.engine = CopyEngine(threads)
        self.type_check = type_check
        self._pool = pool
        self.margins = (0, 0)
        self._layout: Layout | None = None
        self._is_new = False
        self._replay: Replay | None = None
        self._closed = False

    def reserve_padding(self, before: int, after: int) -> None:
        """Leave bytes free around each tensor from the next copy on, see :func:`.memory.padding_around`."""
        self.margins = (before, after)
        self._layout = self._replay = None

    def copy(self, state: Any) -> Any:
        """Return an independent copy of ``state`` in host memory.

        Raises:
            StagingError: an entry cannot be staged (its path is named), or memory ran out; the copier stays usable.
            StagerClosedError: after :meth:`close`.
        """
        taken = self.take(state)
        with naming(state):
            staged = self.copy_tensors(taken.tensors, taken.layout)
        self.remember(state, taken)
        with torch.no_grad(), no_collection():
            return taken.unflatten(staged)

    def take(self, state: Any) -> TreeSpec | Match:
        """Take ``state`` apart, the short way if it is as it was the last time. Raises as :meth:`copy` does."""
        self.check_open()
        with torch.no_grad(), no_collection():
            match = self._replay.match(state) if self._replay is not None else None
            return match or flatten(state, self.type_check)

    def remember(self, state: Any, taken: TreeSpec | Match) -> None:
        """Have the next :meth:`take` go the short way, where ``state`` has just been laid out anew."""
        if self._is_new and self._layout is not None and not self.type_check:
            with torch.no_grad(), no_collection():
                self._replay = Replay.of(state, taken.tensors, self._layout)
        self._is_new = False

    def copy_tensors(self, tensors: Sequence[torch.Tensor], layout: Layout | None = None) -> list[torch.Tensor]:
        """Return independent copies of plain strided tensors; what shares memory goes on sharing it.

        Args:
            tensors: on any devices.
            layout: the plan for them, if one is known to fit.

        Raises:
            StagingError: one cannot be staged; ``path`` is its index. Or memory ran out.
            StagerClosedError: after :meth:`close`.
        """
        pending = self.prepare(tensors, layout)
        layout = pending.layout
        moving = self.engine.start(pending.lease.address, layout.batch)
        try:
            with torch.no_grad(), no_collection():
                staged = pending.staged
                away = pending.pairs(layout.remote, layout.packed)
                events = [self.engine.fetch(device, pairs) for device, pairs in away.items()]
        finally:
            moving.finish()
        for event in events:
            if event is not None:
                event.synchronize()
        return staged

    def prepare(self, tensors: Sequence[torch.Tensor], layout: Layout | None = None) -> PendingCopy:
        """Do all of :meth:`copy_tensors` but the copying. Raises as that does."""
        self.check_open()
        if layout is None:
            with torch.no_grad(), no_collection():
                layout = self._fit(tensors)
        lease = self._pool.borrow(layout.nbytes)
        if self.margins != (0, 0):
            register_padding(lease.view, self.margins, layout.spans)
        return PendingCopy(tensors, layout, lease)

    def check_open(self) -> None:
        """Raise ``StagerClosedError`` after :meth:`close`."""
        if self._closed:
            raise StagerClosedError

    def close(self) -> None:
        """Free plans, threads and kept memory. Copies handed out stay valid. Closing twice is harmless."""
        self._closed = True
        self._layout = self._replay = None
        self._pool.close()
        self.engine.close()

    def _fit(self, tensors: Sequence[torch.Tensor]) -> Layout:
        rows = signature(tensors)
        if self._layout is None or self._layout.signature != rows:
            self._layout = plan_layout(tensors, rows, self.margins)
            self._is_new, self._replay = True, None
        return self._layout


@contextlib.contextmanager
def naming(state: Any) -> Iterator[None]:
    """Give an error about the tensor of some index the path that leads to it in ``state``."""
    try:
        yield
    except StagingError as error:
        if len(error.path) != 1 or not isinstance(error.path[0], int):
            raise
        raise type(error)(path_to(state, error.path[0]), error.reason) from error.__cause__


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Many objects are made at once and none is garbage: a full collection in between would cost more than the copy."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _region_pair(lease: Lease, region: Region, owner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A region as bytes: where it goes, and where it lies on its device."""
    source = torch.empty(0, dtype=torch.uint8, device=owner.device)
    source.set_(owner.untyped_storage(), region.begin, (region.nbytes,), (1,))
    return torch.frombuffer(lease.view, dtype=torch.uint8, count=region.nbytes, offset=region.offset), source


# -- tensors over a lease


def _tensors_over(lease: Lease, layout: Layout, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make the staged tensors; those of one region share one storage, which has the region's bytes and no more."""
    view, frombuffer = lease.view, torch.frombuffer
    made: list[Any] = [each and frombuffer(view, dtype=each[0], count=each[1], offset=each[2]) for each in layout.alone]
    shared: dict[int, torch.Tensor] = {}
    for i in layout.unfinished:
        piece = layout.pieces[i]
        made[i] = made[i].resize_(piece.shape) if piece.alone else _tensor_over(lease, piece, tensors[i].dtype, shared)
    return made


def _tensor_over(lease: Lease, piece: Piece, dtype: torch.dtype, shared: dict[int, torch.Tensor]) -> torch.Tensor:
    if piece.span == 0:
        return torch.empty_strided(piece.shape, piece.stride, dtype=dtype, device="cpu")
    base = shared.get(piece.offset)
    if base is None:
        base = torch.frombuffer(lease.view, dtype=torch.uint8, count=piece.nbytes, offset=piece.offset)
        shared[piece.offset] = base
    made = torch.empty(0, dtype=dtype, device="cpu")
    return made.set_(base.untyped_storage(), piece.start, piece.shape, piece.stride)
