"""A copy that takes no more host memory than it is given: what does not fit is read where it is.

The bound is for the whole machine, and each rank on it has an equal share. :class:`BoundedCopier` copies as much of a
state as fits into the share. What becomes of the rest, which is whole regions, depends on the reader:

- A reader that has promised to release its copies, as the project's checkpointer does, gets tensors over the source's
  own memory. A writer that takes one tensor after the other needs no more host memory than the bound and what it has in
  hand. The source must not change until these have been written: :meth:`BoundedCopier.settle` returns when they have.
- For any other reader, such as torch's ``async_save``, the whole state is copied into fresh memory beyond the bound,
  which is logged once. That memory is not kept.
"""

from __future__ import annotations

import functools
import gc
import logging
import queue
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack

from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier, no_collection
from stagereg.kernel.layout import Layout, Region, plan_layout, region_bytes, signature
from stagereg.kernel.memory import Pool
from stagereg.machine import ranks_here

_log = logging.getLogger("stagereg")


def copier_within(host_memory_gb: float | None, pool: Pool, threads: int, type_check: bool) -> HostCopier:
    """Return a copier over ``pool``.

    With ``host_memory_gb``, the copies of all ranks on this machine take at most so many GiB together.
    """
    if host_memory_gb is None:
        return HostCopier(pool, threads, type_check)
    return BoundedCopier(pool, host_memory_gb, threads, type_check)


class BoundedCopier(HostCopier):
    """Copies what fits, and lends the rest as it is.

    Args:
        pool: where the memory comes from; closed together with the copier.
        host_memory_gb: GiB for all copies that may be in flight on this machine, those of its other ranks included.
        threads: threads that copy from host memory, the caller's among them.
        type_check: as for :class:`.HostCopier`.

    Raises:
        StagingError: the bound is not positive.
    """

    def __init__(self, pool: Pool, host_memory_gb: float, threads: int = 2, type_check: bool = False) -> None:
        if host_memory_gb <= 0:
            raise StagingError([], f"host_memory_gb must be more than 0, not {host_memory_gb}; None is no bound")
        super().__init__(pool, threads, type_check)
        self._bytes = host_memory_gb * 2**30 / pool.max_in_flight
        self._beyond = Pool(max_in_flight=None, keep=False, pin=False, threads=threads)
        self._overdrawn = False
        self._part: tuple[Layout, list[Region], list[int], Layout] | None = None
        self._lent: set[int] = set()
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()  # put() is safe in finalizers
        self._serial = 0

    @functools.cached_property
    def _limit(self) -> int:
        """Bytes of one copy. Asked for by the first one, when the process group is there."""
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return int(self._bytes / ranks_here(ranks))

    def copy(self, state: Any) -> Any:
        """As :meth:`.HostCopier.copy`; tensors that do not fit may be over the source's memory, on its device."""
        spec, whole = self.plan(state), self.layout
        assert whole is not None
        fits = whole.nbytes <= self._limit
        if fits or not self.pool.readers_release:
            memory = self.pool if fits else self._memory_beyond(whole.nbytes)
            pending = self.lease(spec.tensors, whole, spec, memory)
            self.fill(pending)
            return pending.unflatten()
        staying, others, layout = self._split(whole, spec.tensors)
        pending = self.lease([spec.tensors[i] for i in others], layout)
        self.fill(pending)
        staged = self._lend(staying, whole, spec.tensors) | dict(zip(others, pending.staged, strict=True))
        with torch.no_grad(), no_collection():
            return pending.lease.hand_out(spec.unflatten([staged[i] for i in range(len(spec.tensors))]))

    def settle(self) -> None:
        """Return when the source is no longer read.

        Raises:
            StagingError: the reader holds tensors that did not fit, and let go of none for ``wait_s`` seconds.
                The source must not be written while it is held.
        """
        if self._lent:
            gc.collect()  # a copy in a dead reference cycle is held by no reader
        until = time.monotonic() + self.pool.wait_s
        while self._lent:
            try:
                self._lent.discard(self._dropped.get(timeout=max(0.0, until - time.monotonic())))
                until = time.monotonic() + self.pool.wait_s
            except queue.Empty:
                raise StagingError(
                    [],
                    f"{len(self._lent)} parts of the state did not fit into host_memory_gb, and are still held "
                    f"{self.pool.wait_s:g} s later; drop the copy before the state changes, or give more memory",
                ) from None

    def _split(self, whole: Layout, tensors: Sequence[torch.Tensor]) -> tuple[list[Region], list[int], Layout]:
        """Choose the largest regions, as many as must stay so that the others fit.

        Return them, the indices of all other tensors, and a plan for those.
        """
        if self._part is None or self._part[0] is not whole:
            excess = whole.nbytes - self._limit
            staying: list[Region] = []
            for region in sorted((*whole.regions, *whole.remote), key=lambda region: region.nbytes, reverse=True):
                if excess <= 0:
                    break
                staying.append(region)
                excess -= region.nbytes
            lent = {i for region in staying for i in region.members}
            others = [i for i in range(len(tensors)) if i not in lent]
            part = [tensors[i] for i in others]
            self._part = whole, staying, others, plan_layout(part, signature(part))
        return self._part[1:]

    def _memory_beyond(self, nbytes: int) -> Pool:
        if not self._overdrawn:
            self._overdrawn = True
            _log.warning(
                "stagereg: %.3f GiB of the state do not fit into host_memory_gb, and the reader does not release its "
                "copies, so it is copied into memory beyond it; a stagereg.Checkpointer keeps the bound",
                (nbytes - self._limit) / 2**30,
            )
        return self._beyond

    def _lend(
        self, regions: Sequence[Region], layout: Layout, tensors: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return tensors over the source's memory; each region has a storage of its own that reports its end."""
        made: dict[int, torch.Tensor] = {}
        for region in regions:
            with torch.no_grad():
                whole = region_bytes(region, tensors[region.source].untyped_storage())
            if whole.device.type != "cpu":  # readers queue their copies elsewhere
                torch.accelerator.current_stream(whole.device).record_event().synchronize()
            storage = torch.utils.dlpack.from_dlpack(whole).untyped_storage()
            self._serial += 1
            self._lent.add(self._serial)
            weakref.finalize(storage, self._dropped.put, self._serial).atexit = False
            for i in region.members:
                x, piece = tensors[i], layout.pieces[i]
                start = (x.data_ptr() - region.address) // x.element_size()
                empty = torch.empty(0, dtype=x.dtype, device=x.device)
                made[i] = empty.set_(storage, start, piece.shape, piece.stride)
        return made
