"""The copy: a state dict in, an equal and independent state dict in host memory out.

:class:`HostCopier` is what stagers are built on. It takes the state dict apart (``state_dict``), plans where its bytes
go or keeps the plan it has (``layout``), leases memory (``memory``) and has the bytes moved (``transfer``): host memory
by a few threads, an accelerator's on a stream of its own, which waits for the work already queued by the caller and
makes the caller's stream wait for nothing.

When :meth:`HostCopier.copy` returns, the bytes are there: no later write to the source shows in the copy. What is
handed out stays as it is until the last tensor over it is gone. Plans and memory are reused; correctness never depends
on it, since addresses, shapes, dtypes and strides are compared on every call.

A stager that copies in another order takes a :class:`PendingCopy`, which is a copy whose bytes are not there yet.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagereg.errors import StagingError
from stagereg.kernel.layout import Layout, Region, plan_layout, region_bytes, signature, tensors_over
from stagereg.kernel.memory import Lease, Pool, register_padding
from stagereg.kernel.state_dict import Recognizer, TreeSpec, flatten, path_to
from stagereg.kernel.transfer import CopyEngine

__all__ = ["HostCopier", "PendingCopy", "naming", "no_collection"]


@dataclass(slots=True)
class PendingCopy:
    """Memory for a copy that has no content yet.

    Attributes:
        sources: the tensors to be copied; holding them keeps their memory alive.
        layout: where their bytes are to go.
        lease: of the memory.
        view: the memory.
        address: of its first byte.
        spec: the copy without its tensors; None for a part of a copy.
    """

    sources: Sequence[torch.Tensor]
    layout: Layout
    lease: Lease
    view: memoryview
    address: int
    spec: TreeSpec | None = None
    _staged: list[torch.Tensor] | None = None

    @property
    def staged(self) -> list[torch.Tensor]:
        """The tensors over the memory, one for each source; made when they are first asked for."""
        if self._staged is None:
            with torch.no_grad():
                self._staged = tensors_over(self.view, self.layout, self.sources)
        return self._staged

    def pairs(
        self, regions: Sequence[Region], packed: Sequence[int]
    ) -> dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return what ``CopyEngine.fetch`` takes, by device, for some of the layout's regions and packed tensors."""
        away: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for region in regions:
            source = region_bytes(region, self.sources[region.source])
            to = torch.frombuffer(self.view, dtype=torch.uint8, count=region.nbytes, offset=region.offset)
            away.setdefault(source.device, []).append((to, source))
        for i in packed:
            away.setdefault(self.sources[i].device, []).append((self.staged[i], self.sources[i]))
        return away

    def unflatten(self) -> Any:
        """Return the state dict's copy. To be called once."""
        assert self.spec is not None
        with torch.no_grad(), no_collection():
            return self.lease.hand_out(self.spec.unflatten(self.staged))


class HostCopier:
    """Copies state dicts to host memory.

    Args:
        pool: where the memory comes from; closed together with the copier.
        threads: threads that copy from host memory, the caller's among them.
        type_check: refuse leaves of types that torch's checkpoint does not name (see :func:`.state_dict.flatten`).

    One thread at a time may call it.
    """

    def __init__(self, pool: Pool, threads: int = 2, type_check: bool = False) -> None:
        self.engine = CopyEngine(threads)
        self.pool = pool
        self.type_check = type_check
        self.margins = (0, 0)
        self._layout: Layout | None = None
        self._recognizer: Recognizer | None = None

    def reserve_padding(self, before: int, after: int) -> None:
        """Leave bytes free around each tensor from the next copy on, see :func:`.memory.padding_around`."""
        self.margins = (before, after)
        self._layout = self._recognizer = None

    def copy(self, state: Any) -> Any:
        """Return an independent copy of ``state`` in host memory.

        Raises:
            StagingError: an entry cannot be staged (its path is named), or memory ran out; the copier stays usable.
            StagerClosedError: after :meth:`close`.
        """
        pending = self.prepare(state)
        self.fill(pending)
        return pending.unflatten()

    def prepare(self, state: Any) -> PendingCopy:
        """Do all of :meth:`copy` but the copying. Raises as that does."""
        spec, layout = self.plan(state)
        return self.lease(spec.tensors, layout, spec)

    def plan(self, state: Any) -> tuple[TreeSpec, Layout]:
        """Take ``state`` apart and plan where it goes; the short way if it is as it was the last time."""
        self.check_open()
        with torch.no_grad(), no_collection():
            if self._recognizer is not None and self._layout is not None:
                known = self._recognizer.match(state)
                if known is not None:
                    return known, self._layout
            spec, before = flatten(state, self.type_check), self._layout
            with naming(state):
                layout = self._plan(spec.tensors)
            if layout is not before and not self.type_check:
                self._recognizer = Recognizer.of(state, spec.tensors)
            return spec, layout

    def lease(
        self,
        tensors: Sequence[torch.Tensor],
        layout: Layout,
        spec: TreeSpec | None = None,
        memory: Pool | None = None,
    ) -> PendingCopy:
        """Return memory for a copy that is laid out so; from ``memory``, if it is to be other memory."""
        lease = self.pool.lease()
        ref = (memory or self.pool).take(layout.nbytes)
        view = lease.view(ref)
        if self.margins != (0, 0):
            register_padding(view, self.margins, layout.spans)
        return PendingCopy(tensors, layout, lease, view, ref.block.address, spec)

    def fill(self, pending: PendingCopy) -> None:
        """Copy the bytes; return when they are there."""
        layout = pending.layout
        moving = self.engine.start(pending.address, layout.batch)
        try:
            with torch.no_grad(), no_collection():
                pending.staged  # noqa: B018  # made while other threads copy
                away = pending.pairs(layout.remote, layout.packed)
                events = [self.engine.fetch(device, pairs) for device, pairs in away.items()]
        finally:
            moving.finish()
        for event in events:
            if event is not None:
                event.synchronize()

    def check_open(self) -> None:
        """Raise ``StagerClosedError`` after :meth:`close`."""
        self.pool.check_open()

    def close(self) -> None:
        """Free plans, threads and kept memory. Copies handed out stay valid. Closing twice is harmless."""
        self._layout = self._recognizer = None
        self.pool.close()
        self.engine.close()

    def _plan(self, tensors: Sequence[torch.Tensor]) -> Layout:
        rows = signature(tensors)
        if self._layout is None or self._layout.signature != rows:
            self._layout = plan_layout(tensors, rows, self.margins)
            self._recognizer = None
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
