"""A copy that goes on while its source is not written: begun in one call, finished at the latest before the next write.

A :class:`CopySplit` says which regions of a layout are copied at once and which later. A :class:`DeferredCopy` moves
the latter in pieces that any thread may take: a background thread takes them one after the other, and a thread that is
about to write calls :meth:`DeferredCopy.finish_before_write`, helps with those that are left, and goes on when all are
copied (copy before overwrite). What lies on an accelerator is queued on a side stream at once; a writer's stream waits
for it, the writer does not.

Writes without that call are found by ``write_detector``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from stagereg.kernel.layout import Layout, Region
from stagereg.kernel.transfer import Batch, CopyTask, move
from stagereg.stagers.write_detector import SamplePoints, WriteDetector

__all__ = ["CopySplit", "DeferredCopy"]

_PIECE_BYTES = 2**22  # a writer waits for one piece of another thread at most: well below a millisecond


class CopySplit:
    """The regions of a layout, split into those that are copied at once and those that are copied later.

    Made once for a layout, as long as the same may be deferred.

    Attributes:
        immediate, deferred: moves in host memory; the deferred ones in pieces.
        immediate_remote, deferred_remote: regions on accelerators.
        points: where to look whether a deferred region has changed.
    """

    def __init__(self, layout: Layout, may_defer: Callable[[Region], bool]) -> None:
        local = [(region, may_defer(region)) for region in layout.regions]
        remote = [(region, may_defer(region)) for region in layout.remote]
        late = [region for region, deferred in local if deferred]
        self.immediate = Batch([(r.offset, r.address, r.nbytes) for r, deferred in local if not deferred])
        self.deferred = [piece for region in late for piece in _pieces(region)]
        self.immediate_remote = [region for region, deferred in remote if not deferred]
        self.deferred_remote = [region for region, deferred in remote if deferred]
        self.points = SamplePoints(late, self.deferred_remote)


def _pieces(region: Region) -> list[Callable[[int], None]]:
    moves = [
        (region.offset + at, region.address + at, min(_PIECE_BYTES, region.nbytes - at))
        for at in range(0, region.nbytes, _PIECE_BYTES)
    ]
    return [functools.partial(move, moves=[each]) for each in moves]


class DeferredCopy:
    """The part of a copy that is made later.

    Args:
        task: the moves in host memory.
        events: by device, the ends of the copies that are queued there.
        detector: knows what the source looks like now.
    """

    def __init__(self, task: CopyTask, events: list[tuple[torch.device, torch.Event]], detector: WriteDetector) -> None:
        self._task = task
        self._events = events
        self._detector = detector
        self._lock = threading.Lock()
        self._written: list[int] | None = None

    def run(self) -> list[int]:
        """Copy all that is left. Called once, on a background thread.

        Returns:
            Indices of the source tensors that were written before they were copied; the copy is of no use if there are
            any.
        """
        self._task.finish()
        for _, event in self._events:
            event.synchronize()
        return self._find_written()

    def finish_before_write(self) -> None:
        """Return when the source may be written. Called by any thread that is about to, any number of times."""
        self._task.finish()
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)
        self._find_written()

    def _find_written(self) -> list[int]:
        """Look for writes once, before the first permitted one."""
        with self._lock:
            if self._written is None:
                self._written = self._detector.written()
            return self._written
