"""A copy that takes no more host memory than it is given: what does not fit is read where it is.

:class:`BoundedCopier` copies as much of a state as fits into its bound. The rest, whole regions of it, is handed out as
tensors over the source's own memory, each with a storage of its own that tells when its last reader is gone. A writer
that takes one tensor after the other, as torch's do, then brings an accelerator's tensors over one by one, so that a
state of any size needs no more host memory than the bound and what the writer has in hand. The price is that the source
must not change until the writer has read those: :meth:`BoundedCopier.settle` returns when it has.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.dlpack

from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier
from stagereg.kernel.layout import Layout, Region, plan_layout, signature
from stagereg.kernel.memory import Pool
from stagereg.kernel.replay import Match
from stagereg.kernel.state_dict import TreeSpec
from stagereg.kernel.waiting import wait_while
from stagereg.kernel.writers import Span, writer_at_work

__all__ = ["BoundedCopier"]


class BoundedCopier(HostCopier):
    """Copies what fits, and lends out the rest as it is.

    Args:
        pool: where the memory comes from; closed together with the copier.
        limit: bytes of host memory for one copy.
        wait_s: seconds that :meth:`settle` waits at most from one release to the next.
        threads: threads that copy from host memory, the caller's among them.
        type_check: as for :class:`HostCopier`.
    """

    def __init__(self, pool: Pool, limit: int, wait_s: float, threads: int = 2, type_check: bool = False) -> None:
        super().__init__(pool, threads, type_check)
        self._limit = limit
        self._wait_s = wait_s
        self._whole: Layout | None = None
        self._lent: dict[int, Span] = {}
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()  # put() is safe in finalizers
        self._serial = 0

    def remember(self, state: Any, taken: TreeSpec | Match) -> None:
        """Nothing: what is laid out is a part of the state."""

    def copy_tensors(self, tensors: Sequence[torch.Tensor], layout: Layout | None = None) -> list[torch.Tensor]:
        """As :meth:`HostCopier.copy_tensors`; tensors that do not fit are over the source's memory, on its device."""
        self.check_open()
        with torch.no_grad():
            whole = self._fit_whole(tensors)
        staying = _beyond(whole, self._limit)
        if not staying:
            return super().copy_tensors(tensors)
        lent: dict[int, torch.Tensor] = {}
        copied = iter(super().copy_tensors(_all_but(staying, tensors)))
        with torch.no_grad():
            for region in staying:
                lent.update(self._lend(region, whole, tensors))
        return [lent[i] if i in lent else next(copied) for i in range(len(tensors))]

    def settle(self) -> None:
        """Return when nobody reads the source any more.

        Torch's ``async_save`` calls this with the copy still in a variable of its own, which it has handed to a writer
        before and does not use again; so under it, staging is over when no writer is at work any more.

        Raises:
            StagingError: somebody still holds a tensor that did not fit and is not at work on it, or has let go of none
                for ``wait_s`` seconds. The source must not be written while it is held.
        """
        self._collect()
        if self._lent:
            gc.collect()  # a copy in a dead reference cycle is nobody's copy
        while self._lent:
            if not wait_while(self._at_work, self._released_one, self._wait_s):
                break
        if not self._lent or (_handed_on() and not self._at_work()):
            return
        raise StagingError(
            [],
            f"{len(self._lent)} parts of the state did not fit into host_memory_gb, and whoever has the copy still "
            "holds them without writing; drop the copy before the state changes, or give more memory",
        )

    def _fit_whole(self, tensors: Sequence[torch.Tensor]) -> Layout:
        rows = signature(tensors)
        if self._whole is None or self._whole.signature != rows:
            self._whole = plan_layout(tensors, rows, self.margins)
        return self._whole

    def _lend(self, region: Region, layout: Layout, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        owner = tensors[region.source]
        whole = torch.empty(0, dtype=torch.uint8, device=owner.device)
        whole.set_(owner.untyped_storage(), region.begin, (region.nbytes,), (1,))
        if owner.device.type != "cpu":  # readers queue their copies elsewhere
            torch.accelerator.current_stream(owner.device).record_event().synchronize()
        storage = torch.utils.dlpack.from_dlpack(whole).untyped_storage()
        self._serial += 1
        self._lent[self._serial] = (region.address, region.nbytes)
        weakref.finalize(storage, self._released.put, self._serial).atexit = False
        made: dict[int, torch.Tensor] = {}
        for i in region.members:
            x, piece = tensors[i], layout.pieces[i]
            start = (x.data_ptr() - region.address) // x.element_size()
            empty = torch.empty(0, dtype=x.dtype, device=x.device)
            made[i] = empty.set_(storage, start, piece.shape, piece.stride)
        return made

    def _at_work(self) -> bool:
        return writer_at_work(list(self._lent.values()))

    def _released_one(self, timeout_s: float) -> bool:
        before = len(self._lent)
        if timeout_s:
            with contextlib.suppress(queue.Empty):
                self._lent.pop(self._released.get(timeout=timeout_s), None)
        self._collect()
        return len(self._lent) < before

    def _collect(self) -> None:
        while not self._released.empty():
            self._lent.pop(self._released.get(), None)


def _handed_on() -> bool:
    """Whether the caller is torch's checkpointing, which keeps a copy that it does not use again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint."):
            return True
        frame = frame.f_back
    return False


def _beyond(layout: Layout, limit: int) -> list[Region]:
    """The largest regions, as many as must stay so that the others fit."""
    excess = layout.nbytes - limit
    staying: list[Region] = []
    for region in sorted((*layout.regions, *layout.remote), key=lambda region: region.nbytes, reverse=True):
        if excess <= 0:
            break
        staying.append(region)
        excess -= region.nbytes
    return staying


def _all_but(staying: Sequence[Region], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    left = {i for region in staying for i in region.members}
    return [x for i, x in enumerate(tensors) if i not in left]
