"""A copy that goes on while its source is not written: begun in one call, finished at the latest before the next write.

A :class:`CopySplit` says which regions of a layout are copied at once and which later. A :class:`DeferredCopy` moves
the latter in pieces that any thread may take: a background thread takes them one after the other, and a thread that is
about to write calls :meth:`DeferredCopy.finish_before_write`, helps with those that are left, and goes on when all are
copied (copy before overwrite). What lies on an accelerator is copied on a side stream, which waits from the beginning
for what was queued before. Its copies, at some microseconds each, are queued by whichever thread comes first. A
writer's stream waits for them; the writer waits no longer than until they are queued.

Writes without that call are found by two things, both cheap. The version counters of the tensors, which most in-place
operations of torch move. And samples of the bytes, taken at the beginning and compared with the same points of the
*copy*: what bypasses the counters (fused optimizers, gloo collectives, ``.data``, numpy) nearly always writes a whole
tensor. A write after the copying changes no sample of the copy, so nothing is reported that did no harm. On request, a
checksum of every byte (CRC-32) is compared as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import zlib
from collections.abc import Callable, Sequence

import torch

from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.layout import Layout, Region
from stagereg.kernel.transfer import Batch, CopyTask, piece

_PIECE_BYTES = 2**22  # a writer waits for one piece of another thread at most: well below a millisecond
_SAMPLE_BYTES = 64
_MOST_BLOCKS = 4  # of memory that are used in turns
_MAX_BYTES_BETWEEN = 2**22  # from one sample to the next


class CopySplit:
    """The regions of a layout, split into those that are copied at once and those that are copied later.

    Made once for a layout, as long as the same may be deferred. In host memory, regions below ``least`` bytes are not.
    """

    def __init__(self, layout: Layout, may_defer: Callable[[Region], bool], least: int) -> None:
        local = [(region, region.nbytes >= least and may_defer(region)) for region in layout.regions]
        remote = [(region, may_defer(region)) for region in layout.remote]
        self.immediate = Batch([(r.offset, r.address, r.nbytes) for r, deferred in local if not deferred])
        self.deferred = [region for region, deferred in local if deferred]
        self.pieces = _pieces(self.deferred)
        self.immediate_remote = [region for region, deferred in remote if not deferred]
        self.deferred_remote = [region for region, deferred in remote if deferred]
        self.streams: dict[torch.device, torch.Stream] = {}  # for those, by device; made when needed
        # Indices of the tensors in all deferred regions.
        self.members = [i for region in (*self.deferred, *self.deferred_remote) for i in region.members]
        # Where to look for a change in host memory: both ends of each region, and regular points between them.
        self.samples = [(region, at) for region in self.deferred for at in _sampled(region.nbytes)]
        self._taker = functools.lru_cache(_MOST_BLOCKS + 1)(functools.partial(_taker, self.samples))

    def sampled(self, base: int | None = None) -> bytes:
        """Return the samples of the source, one after the other, or of the copy in the block at ``base``."""
        taken = ctypes.create_string_buffer(_SAMPLE_BYTES * len(self.samples) or 1)
        self._taker(base)(ctypes.addressof(taken))
        return taken.raw


def _pieces(regions: Sequence[Region]) -> list[Callable[[int], None]]:
    """Return what copies regions, small ones together."""
    pieces: list[list[tuple[int, int, int]]] = []
    room = 0
    for region in regions:
        for at in range(0, region.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, region.nbytes - at)
            if nbytes > room:
                pieces.append([])
                room = _PIECE_BYTES
            pieces[-1].append((region.offset + at, region.address + at, nbytes))
            room -= nbytes
    return [*map(piece, pieces)]


def _sampled(nbytes: int) -> list[int]:
    steps = -(-nbytes // _MAX_BYTES_BETWEEN)
    return [max(nbytes - _SAMPLE_BYTES, 0) * k // steps for k in range(steps + 1)]


def _taker(samples: Sequence[tuple[Region, int]], base: int | None) -> Callable[[int], None]:
    """Return what takes samples: of the source, or of the copy in the block at ``base``."""
    starts = [(region.address if base is None else base + region.offset) + at for region, at in samples]
    sizes = [min(region.nbytes, _SAMPLE_BYTES) for region, _ in samples]
    return piece([*zip(range(0, _SAMPLE_BYTES * len(samples), _SAMPLE_BYTES), starts, sizes, strict=True)])


class DeferredCopy:
    """The part of a copy that is made later, of a source that is as it is at the time of construction.

    Args:
        pending: the whole copy.
        split: which part is made later.
        events: by device, the ends of the copies that are queued already.
        thorough: look at every byte in host memory to find writes.
    """

    def __init__(
        self, pending: PendingCopy, split: CopySplit, events: list[tuple[torch.device, torch.Event]], thorough: bool
    ) -> None:
        self._task = CopyTask(pending.address, [*_queues(pending, split, events), *split.pieces])
        self._sources = pending.sources
        self._base = pending.address
        self._split = split
        self._events = events
        self._lock = threading.Lock()
        self._written: list[int] | None = None
        self._versions = [self._sources[i]._version for i in split.members]
        self._samples = split.sampled()
        self._checksums = [_checksum(r.address, r.nbytes) for r in split.deferred] if thorough else []

    def run(self) -> list[int]:
        """Copy all that is left. Called once, on a background thread.

        Returns:
            Indices of the source tensors that were written before they were copied; the copy is of no use if there are
            any.
        """
        try:
            self._task.finish()
        finally:  # what is queued writes to the memory, whether or not all of it could be
            for _, event in self._events:
                event.synchronize()
        return self._find_written()

    def finish_before_write(self) -> None:
        """Return when the source may be written. Called by any thread that is about to, any number of times."""
        with contextlib.suppress(Exception):  # run() raises it
            self._task.finish()
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)
        self._find_written()

    def _find_written(self) -> list[int]:
        """Look for writes once, after the copying and before the first permitted write."""
        with self._lock:
            if self._written is None:
                versions = zip(self._split.members, self._versions, strict=True)
                found = {i for i, version in versions if self._sources[i]._version != version}
                before, after = self._samples, self._split.sampled(self._base)
                torn = [
                    region
                    for i, (region, _) in enumerate(self._split.samples if before != after else ())
                    if before[_SAMPLE_BYTES * i :][:_SAMPLE_BYTES] != after[_SAMPLE_BYTES * i :][:_SAMPLE_BYTES]
                ]
                checksums = zip(self._split.deferred, self._checksums, strict=False)  # none, if they were not taken
                torn += [r for r, before in checksums if _checksum(self._base + r.offset, r.nbytes) != before]
                self._written = sorted(found.union(*(region.members for region in torn)))
            return self._written


def _queues(
    pending: PendingCopy, split: CopySplit, events: list[tuple[torch.device, torch.Event]]
) -> list[Callable[[int], None]]:
    """Return, by device, what queues the deferred copies and adds the event of their end, on any thread."""
    by_device: dict[torch.device, list[Region]] = {}
    for region in split.deferred_remote:
        by_device.setdefault(pending.sources[region.source].device, []).append(region)

    def queue(base: int, device: torch.device, stream: torch.Stream) -> None:
        # The device first: a thread may have another one, which leaving the stream would set up, at a cost in memory.
        with torch.no_grad(), torch.accelerator.device_index(device.index), stream:
            try:
                for to, source in pending.pairs(by_device[device]):
                    to.copy_(source, non_blocking=True)
            finally:
                events.append((device, stream.record_event()))

    made: list[Callable[[int], None]] = []
    for device in by_device:
        stream = split.streams.get(device) or split.streams.setdefault(device, torch.Stream(device))
        stream.wait_event(torch.accelerator.current_stream(device).record_event())  # that of the caller, as it is now
        made.append(functools.partial(queue, device=device, stream=stream))
    return made


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
