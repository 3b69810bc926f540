"""Copies a state dict into an equal, independent state dict in host memory.

:class:`HostCopier` is the base of stagers. It decomposes the state dict (``state_dict``), assigns a position in one
block of memory to each tensor (``layout``), leases the memory (``memory``) and copies the bytes (``transfer``). A few
threads copy host memory. A separate stream copies accelerator memory: it waits for the work that the caller has queued,
but the caller's stream never waits.

The layout is reused if addresses, shapes, dtypes and strides are unchanged. Stagers with a different order use
:class:`PendingCopy`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stagereg.base.capture import is_capturing
from stagereg.base.device_copy import DeviceCopy, Packed, Source, await_event
from stagereg.base.hooks import FREES
from stagereg.errors import StagingError
from stagereg.kernel.layout import Layout, Region, plan_layout, region_bytes, signature, tensors_over
from stagereg.kernel.memory import Lease, Pool
from stagereg.kernel.state_dict import Recognizer, TreeSpec, flatten, path_to
from stagereg.kernel.transfer import WORTH_A_THREAD, CopyEngine

_CREATED_BYTES = 4096  # bytes that one thread copies while another one creates a tensor


@dataclass
class PendingCopy:
    """Leased memory for a copy, and the plan to fill it. The memory has no content yet."""

    spec: TreeSpec  # the copy of the state dict, without its tensors
    layout: Layout  # where the bytes of each source tensor go
    lease: Lease
    view: memoryview  # the leased memory
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # storages to keep alive, by tensor index

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        return self.spec.tensors

    @property
    def address(self) -> int:
        return self.lease.block.address

    def hold(self, regions: Sequence[Region]) -> None:
        """Keep the source memory of ``regions`` alive, and copy from it even if the tensors get other storages."""
        self.storages.update((region.source, self.sources[region.source].untyped_storage()) for region in regions)

    @functools.cached_property
    def staged(self) -> list[torch.Tensor]:
        """The tensors of the copy, one for each source tensor. Created on first access."""
        with torch.no_grad():
            return tensors_over(self.view, self.layout)

    def source_of(self, region: Region) -> Source:
        """Return the source bytes of a region. The result keeps the storage alive."""
        x, held = self.sources[region.source], self.storages.get(region.source)
        if held is None and x.nbytes == region.nbytes and x.is_contiguous():
            return Source(region.offset, x.view(-1).view(torch.uint8))
        return Source(region.offset, region_bytes(region, x.untyped_storage() if held is None else held))

    def device_copies(self, regions: Sequence[Region]) -> dict[torch.device, DeviceCopy]:
        """Return, for each accelerator, the copy of its tensors in ``regions`` and of its packed tensors."""
        sources: dict[torch.device, list[Source]] = {}
        views: dict[torch.device, list[Packed]] = {}
        for region in regions:
            source = self.source_of(region)
            sources.setdefault(source.data.device, []).append(source)
        for i in self.layout.remote_packed:
            x, piece = self.sources[i], self.layout.pieces[i]
            views.setdefault(x.device, []).append(Packed(piece.offset, x, piece.stride))
        devices = {**sources, **views}
        return {device: DeviceCopy(self.view, sources.get(device, ()), views.get(device, ())) for device in devices}

    def copy_packed(self) -> None:
        """Copy the packed tensors in host memory."""
        for i in self.layout.packed:
            self.staged[i].copy_(self.sources[i])

    def unflatten(self) -> Any:
        """Return the copy of the state dict. Call only once."""
        with torch.no_grad(), no_collection():
            return self.lease.hand_out(self.spec.unflatten(self.staged))


class HostCopier:
    """Copies state dicts to host memory, for one thread at a time.

    Closing the copier also closes ``pool``. ``type_check``: see :func:`.state_dict.flatten`.
    """

    def __init__(self, pool: Pool, threads: int = 2, type_check: bool = False) -> None:
        self.engine = CopyEngine(threads)
        self.pool = pool
        self.type_check = type_check
        self._layout: Layout | None = None
        self._recognizer: Recognizer | None = None
        self._storages: set[int] = set()  # addresses of the storages of the last state dict
        self._is_outdated = False  # whether one of them was resized since
        self._stop_watching = FREES.add(self._before_free)

    def copy(self, state: Any) -> Any:
        """Return an independent copy of ``state`` in host memory. The copier remains usable after an error."""
        pending = self.prepare(state)
        self.fill(pending)
        return pending.unflatten()

    def prepare(self, state: Any) -> PendingCopy:
        """Do everything that :meth:`copy` does, except copying the bytes. Raises the same errors."""
        self.pool.check_open()
        if is_capturing():
            raise StagingError([], "the current stream captures a CUDA graph. Call stage() before or after the capture")
        if self._is_outdated:
            self._is_outdated, self._layout, self._recognizer = False, None, None
        with torch.no_grad(), no_collection():
            known = None if self._recognizer is None else self._recognizer.match(state)
            spec = self._plan(state) if known is None else known
        assert self._layout is not None
        lease = self.pool.lease(self._layout.nbytes)
        return PendingCopy(spec, self._layout, lease, lease.view())

    def fill(self, pending: PendingCopy) -> None:
        """Copy the bytes, and wait until the copy is complete, also after an error."""
        layout = pending.layout
        # If creating the tensors takes longer than copying, one other thread copies everything meanwhile.
        aside = WORTH_A_THREAD <= layout.nbytes < _CREATED_BYTES * len(layout.pieces)
        pieces = layout.batch.pieces(1 if aside else self.engine.threads)
        moving = self.engine.run(pending.address, pieces, pending, aside)
        events: list[tuple[torch.device, torch.Event]] = []
        try:
            with torch.no_grad(), no_collection():
                copies = pending.device_copies(layout.remote)
                self.engine.fetch(copies, events)
                pending.staged  # noqa: B018  # creates the tensors while bytes are copied
                pending.copy_packed()
        finally:
            try:
                moving.finish()
            finally:  # otherwise queued copies could write to memory that was leased again
                for _, event in events:
                    await_event(event)

    def close(self) -> None:
        """Free plans, threads and unused memory. Returned copies remain valid. Idempotent."""
        self._layout = self._recognizer = None
        self._stop_watching()
        self.pool.close()
        self.engine.close()

    def _before_free(self, x: torch.UntypedStorage | torch.Tensor) -> None:
        """Note that a storage is resized, because it may shrink without changing its address. Any thread."""
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # no storage, such as a sparse tensor
            address = (x if isinstance(x, torch.UntypedStorage) else x.untyped_storage()).data_ptr()
            self._is_outdated |= address in self._storages

    def _plan(self, state: Any) -> TreeSpec:
        spec = flatten(state, self.type_check)
        try:
            rows = signature(spec.tensors)
            if self._layout is None or self._layout.signature != rows:
                self._layout = plan_layout(spec.tensors, rows)
                self._storages = {row[4] for row in rows}
                self._recognizer = None if self.type_check else Recognizer.of(state, spec.tensors)
        except StagingError as error:  # its path contains only the index of a tensor
            (index,) = error.path
            assert isinstance(index, int)
            raise type(error)(path_to(state, index), error.reason) from error.__cause__
        return spec


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection. With many new objects, a full collection would take longer than the copy."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
