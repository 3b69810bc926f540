"""Copy a state dict into an equal, independent state dict in host memory.

:class:`HostCopier` is the base of stagers. It decomposes the state dict (``state_dict``), plans the position of its
bytes or reuses the last plan (``layout``), leases memory (``memory``) and copies the bytes (``transfer``): host memory
with a few threads, accelerator memory on a separate stream. This stream waits for the work that the caller has queued;
the caller's stream never waits.

A plan is reused only if addresses, shapes, dtypes and strides are unchanged. Stagers that copy in another order use a
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

from stagereg.errors import StagingError
from stagereg.kernel.layout import Layout, Region, plan_layout, region_bytes, signature, tensors_over
from stagereg.kernel.memory import Lease, Pool
from stagereg.kernel.state_dict import Recognizer, TreeSpec, flatten, path_to
from stagereg.kernel.transfer import CopyEngine


@dataclass
class PendingCopy:
    """Memory for a copy that has no content yet."""

    spec: TreeSpec  # the copy without its tensors
    layout: Layout  # destination of the bytes of the source's tensors
    lease: Lease
    view: memoryview  # the leased memory
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # kept alive, by source index

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        return self.spec.tensors

    @property
    def address(self) -> int:
        return self.lease.block.address

    def hold(self, regions: Sequence[Region]) -> None:
        """Keep the memory of regions alive, and copy from it even if their tensors get other storages."""
        self.storages.update((region.source, self.sources[region.source].untyped_storage()) for region in regions)

    @functools.cached_property
    def staged(self) -> list[torch.Tensor]:
        """The tensors over the memory, one per source; created on first access."""
        with torch.no_grad():
            return tensors_over(self.view, self.layout)

    def pairs(self, regions: Sequence[Region], packed: Sequence[int] = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the argument of ``CopyEngine.fetch`` for some of the layout's regions and packed tensors."""
        copied = [(self.bytes_of(region), region_bytes(region, self._storage_of(region))) for region in regions]
        return [*copied, *((self.staged[i], self.sources[i]) for i in packed)]

    def bytes_of(self, region: Region) -> torch.Tensor:
        """Return the bytes of the copy of a region."""
        return torch.frombuffer(self.view, dtype=torch.uint8, count=region.nbytes, offset=region.offset)

    def _storage_of(self, region: Region) -> torch.UntypedStorage:
        held = self.storages.get(region.source)
        return self.sources[region.source].untyped_storage() if held is None else held

    def unflatten(self) -> Any:
        """Return the state dict's copy. Call only once."""
        with torch.no_grad(), no_collection():
            return self.lease.hand_out(self.spec.unflatten(self.staged))


class HostCopier:
    """Copies state dicts to host memory, for one thread at a time.

    Closing the copier closes its pool. For ``type_check``, see :func:`.state_dict.flatten`.
    """

    def __init__(self, pool: Pool, threads: int = 2, type_check: bool = False) -> None:
        self.engine = CopyEngine(threads)
        self.pool = pool
        self.type_check = type_check
        self._layout: Layout | None = None
        self._recognizer: Recognizer | None = None

    def copy(self, state: Any) -> Any:
        """Return an independent copy of ``state`` in host memory. After an error the copier remains usable."""
        pending = self.prepare(state)
        self.fill(pending)
        return pending.unflatten()

    def prepare(self, state: Any) -> PendingCopy:
        """Do everything in :meth:`copy` except copying the bytes. Raises the same errors."""
        self.pool.check_open()
        with torch.no_grad(), no_collection():
            known = None if self._recognizer is None else self._recognizer.match(state)
            spec = self._plan(state) if known is None else known
        assert self._layout is not None
        lease = self.pool.lease(self._layout.nbytes)
        return PendingCopy(spec, self._layout, lease, lease.view())

    def fill(self, pending: PendingCopy) -> None:
        """Copy the bytes. Blocks until they have arrived."""
        moving = self.engine.run(pending.address, pending.layout.batch.pieces(self.engine.threads), pending)
        try:
            with torch.no_grad(), no_collection():
                pending.staged  # noqa: B018  # created while other threads copy
                events = self.engine.fetch(pending.pairs(pending.layout.remote, pending.layout.packed))
        finally:
            moving.finish()
        for _, event in events:
            event.synchronize()

    def close(self) -> None:
        """Free plans, threads and unused memory. Returned copies remain valid. Idempotent."""
        self._layout = self._recognizer = None
        self.pool.close()
        self.engine.close()

    def _plan(self, state: Any) -> TreeSpec:
        """Decompose ``state``, and plan its tensors' positions unless they fit the last plan."""
        spec = flatten(state, self.type_check)
        try:
            rows = signature(spec.tensors)
            if self._layout is None or self._layout.signature != rows:
                self._layout = plan_layout(spec.tensors, rows)
                self._recognizer = None if self.type_check else Recognizer.of(state, spec.tensors)
        except StagingError as error:  # error.path is the index of a tensor
            (index,) = error.path
            assert isinstance(index, int)
            raise type(error)(path_to(state, index), error.reason) from error.__cause__
        return spec


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection: a full collection among many new objects would take longer than the copy."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
