"""A copy that goes on while its source is not written: begun in one call, finished at the latest before the next write.

A :class:`LateCopy` moves some regions of a :class:`~stagereg.kernel.copier.PendingCopy` in pieces that any thread may
take: a background thread takes them one after the other, and whoever is about to write calls
:meth:`LateCopy.let_write`, helps with those that are left, and goes on when all are copied (copy before overwrite). An
accelerator's copies are queued on a side stream, and a writer's stream is made to wait for them, not the writer.

Whether anybody wrote without asking is found by ``changes``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch

from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.layout import Layout, Region
from stagereg.kernel.transfer import Batch, CopyEngine, CopyTask, move
from stagereg.stagers.write_detector import Places, Watch

__all__ = ["LateCopy", "Parting"]

_PIECE_BYTES = 2**22  # a writer waits for one piece of another thread at most: well below a millisecond


class Parting:
    """The regions of a layout, parted into those that are copied at once and those that may be copied later.

    Made once for a layout, as long as the same may be copied later.

    Attributes:
        late, remote: regions to be copied later, in host memory and on accelerators.
        now: regions on accelerators to be copied at once.
        batch: moves in host memory to be made at once.
        pieces: moves in host memory to be made later, in pieces.
        places: where to look whether the source has changed.
    """

    def __init__(self, layout: Layout, may_wait: Callable[[Region], bool]) -> None:
        self.late = [region for region in layout.regions if may_wait(region)]
        self.remote = [region for region in layout.remote if may_wait(region)]
        waiting = {id(region) for region in (*self.late, *self.remote)}
        self.now = [region for region in layout.remote if id(region) not in waiting]
        each = zip(layout.moves, layout.regions, strict=True)
        self.batch = Batch([move for move, region in each if id(region) not in waiting])
        self.pieces = _pieces(self.late)
        self.places = Places(self.late, self.remote)


class LateCopy:
    """The part of a copy that is made later.

    Args:
        pending: the copy; what is to be copied at once is the caller's work.
        parting: what is to be copied later.
        engine: copies from accelerators; not used by another thread meanwhile.
        watch: what the source looks like now.
        at_once: by device, when the copies end that the caller has queued there already; the copy is not complete
            before.
    """

    def __init__(
        self,
        pending: PendingCopy,
        parting: Parting,
        engine: CopyEngine,
        watch: Watch,
        at_once: dict[torch.device, torch.Event],
    ) -> None:
        self._pending = pending
        self._job = CopyTask(pending.address, parting.pieces)
        self._remote = parting.remote
        self._engine = engine
        self._watch = watch
        self._lock = threading.Lock()
        self._queued = threading.Event()
        self._at_once = at_once
        self._events: dict[torch.device, torch.Event] = {}
        devices = sorted({pending.sources[region.source].device for region in parting.remote}, key=str)
        self._behind = [_now(device) for device in devices]
        self._changed: list[int] | None = None
        self._failure: Exception | None = None
        if not parting.remote:
            self._queued.set()

    def run(self) -> list[int]:
        """Copy all that is left. Called once, on a background thread.

        Returns:
            Indices of the source tensors that were written before they were copied; the copy is of no use if there are
            any.
        """
        self._queue()
        self._job.finish()
        for event in (*self._at_once.values(), *self._events.values()):
            event.synchronize()
        self._settle()
        if self._failure is not None:
            raise self._failure
        assert self._changed is not None
        return self._changed

    def let_write(self) -> None:
        """Return when the source may be written. Called by any thread that is about to, any number of times."""
        self._job.finish()
        self._queued.wait()
        for device, event in (*self._at_once.items(), *self._events.items()):
            torch.accelerator.current_stream(device).wait_event(event)
        self._settle()

    def _queue(self) -> None:
        if not self._remote:
            return
        try:
            for device, pairs in self._pending.pairs(self._remote, []).items():
                event = self._engine.fetch(device, pairs, self._behind)
                if event is not None:
                    self._events[device] = event
        except Exception as error:
            self._failure = error
        finally:
            self._queued.set()

    def _settle(self) -> None:
        """Look for changes once, before the first permitted write."""
        with self._lock:
            if self._changed is None:
                self._changed = self._watch.changed()


def _now(device: torch.device) -> torch.Event:
    event: torch.Event = torch.accelerator.current_stream(device).record_event()
    return event


def _pieces(regions: Sequence[Region]) -> list[Callable[[int], None]]:
    cuts = [(region, at) for region in regions for at in range(0, region.nbytes, _PIECE_BYTES)]
    moves = [(r.offset + at, r.address + at, min(_PIECE_BYTES, r.nbytes - at)) for r, at in cuts]
    return [functools.partial(move, moves=[each]) for each in moves]
