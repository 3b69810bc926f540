"""A copy that is started in one call, and finished at the latest before the next write to its source.

A :class:`DeferredCopy` consists of pieces that any thread may take: a background thread takes them one by one, and a
thread that is about to write takes the remaining pieces (copy before overwrite). Regions on an accelerator are copied
on a side stream, which waits for the work that was queued before. Whichever thread comes first queues these copies. A
writer's stream waits for the copies, and the writer itself waits until they are queued.

Two inexpensive checks find unannounced writes. Version counters of tensors change with most in-place operations of
torch. Byte samples are taken at the beginning and compared with the same positions of the *copy*: a write that
bypasses the counters (fused optimizers, gloo collectives, ``.data``, numpy) nearly always writes a whole tensor. On
request, a checksum of every byte (CRC-32) is compared instead of the counters of host memory.

torch changes a counter only when the operation has returned. So the counters are read again while the training thread
runs no operation: :meth:`DeferredCopy.fence`. Until then the copy is complete, but not *confirmed*.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch

from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.layout import Layout, Region, is_in
from stagereg.kernel.transfer import Batch, CopyTask, piece
from stagereg.stagers.device_sources import DeviceSources

_PIECE_BYTES = 2**22  # a writer waits for at most one piece of another thread: well below a millisecond
SAMPLE_BYTES = 64
_MOST_BLOCKS = 4  # maximum number of memory blocks that copies alternate between
_MAX_BYTES_BETWEEN = 2**22  # maximum distance between two samples
_STILL_S = 0.5  # seconds without a fence after which unchanged counters are taken as final
_SLICE_S = 0.05  # seconds; divides the wait, so that a suspended process does not count as unchanged


class CopySplit:
    """The regions of a layout, divided into regions copied immediately and regions copied later.

    Reused for a layout while the same regions may be deferred. Host regions below ``least`` bytes are not deferred.
    """

    def __init__(self, layout: Layout, may_defer: Callable[[Region], bool], least: int) -> None:
        local = [(region, region.nbytes >= least and may_defer(region)) for region in layout.regions]
        remote = [(region, may_defer(region)) for region in layout.remote]
        self.immediate = Batch([(r.offset, r.address, r.nbytes) for r, deferred in local if not deferred])
        self.deferred = [region for region, deferred in local if deferred]
        self.pieces = _pieces(self.deferred)
        self.immediate_remote = [region for region, deferred in remote if not deferred]
        self.deferred_remote = [region for region, deferred in remote if deferred]
        self.streams: dict[torch.device, torch.Stream] = {}  # for these regions, by device; created when needed
        # Indices of the tensors in all deferred regions, and in those on an accelerator.
        self.members_remote = [i for region in self.deferred_remote for i in region.members]
        self.members = [i for region in self.deferred for i in region.members] + self.members_remote
        # Positions of samples in host memory: both ends of each region, and regular points between them.
        self.samples = [(region, at) for region in self.deferred for at in sample_offsets(region.nbytes)]
        self._sampler = functools.lru_cache(_MOST_BLOCKS + 1)(functools.partial(_sampler_of, self.samples))

    def sampled(self, base: int | None = None) -> bytes:
        """Return the samples of the source, concatenated, or of the copy in the block at ``base``."""
        return self._sampler(base)()

    def differing(self, before: bytes, after: bytes) -> list[Region]:
        """Return the regions in which two results of :meth:`sampled` differ."""
        if before == after:
            return []
        pairs = zip(range(0, len(before), SAMPLE_BYTES), self.samples, strict=True)
        return [r for at, (r, _) in pairs if before[at : at + SAMPLE_BYTES] != after[at : at + SAMPLE_BYTES]]


def _pieces(regions: Sequence[Region]) -> list[Callable[[int], None]]:
    """Return functions that copy the regions, small ones together."""
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


def sample_offsets(nbytes: int) -> list[int]:
    """Return where samples of ``nbytes`` bytes begin: at both ends, and at regular points between them."""
    steps = -(-nbytes // _MAX_BYTES_BETWEEN)
    return [max(nbytes - SAMPLE_BYTES, 0) * k // steps for k in range(steps + 1)]


def sampler(starts: Sequence[int], sizes: Sequence[int]) -> Callable[[], bytes]:
    """Return a function that copies bytes of host memory from these addresses, each to its own ``SAMPLE_BYTES``."""
    copy = piece([*zip(range(0, SAMPLE_BYTES * len(starts), SAMPLE_BYTES), starts, sizes, strict=True)])

    def take() -> bytes:
        taken = ctypes.create_string_buffer(SAMPLE_BYTES * len(starts) or 1)
        copy(ctypes.addressof(taken))
        return taken.raw[: SAMPLE_BYTES * len(starts)]

    return take


def _sampler_of(samples: Sequence[tuple[Region, int]], base: int | None) -> Callable[[], bytes]:
    starts = [(region.address if base is None else base + region.offset) + at for region, at in samples]
    return sampler(starts, [min(region.nbytes, SAMPLE_BYTES) for region, _ in samples])


class DeferredCopy:
    """The deferred part of a copy, with the source's content at the time of construction.

    Args:
        pending: the whole copy.
        split: the regions that are copied later.
        events: one event per device, at the end of the copies that are already queued.
        thorough: to find writes, compare every byte in host memory, instead of version counters and samples.
    """

    def __init__(
        self, pending: PendingCopy, split: CopySplit, events: list[tuple[torch.device, torch.Event]], thorough: bool
    ) -> None:
        pending.hold([*split.deferred, *split.deferred_remote, *split.immediate_remote])
        self._storages = dict(pending.storages)
        self._remote = _sources(pending, split)
        self._task = CopyTask(pending.address, [*_queues(self._remote, split, events), *split.pieces])
        self._base = pending.address
        self._split = split
        self._events = events
        self._lock = threading.Lock()
        self._counted = [(i, pending.sources[i]) for i in (split.members_remote if thorough else split.members)]
        self._versions = [x._version for _, x in self._counted]
        self._samples = split.sampled()
        self._checksums = [_checksum(r.address, r.nbytes) for r in split.deferred] if thorough else []
        self._written: list[int] | None = None  # None until the copy is complete
        self._began, self._ended = time.monotonic(), math.inf
        self._fenced = threading.Event()  # set when ``_written`` is final
        self.touched: set[int] = set()  # source tensors written before the fence, including harmless writes

    def run(self) -> list[int]:
        """Copy the remaining pieces. Called once, on a background thread.

        Returns:
            Indices of the source tensors that were written, freed or resized before they were copied. If there are any,
            the copy is unusable.

        Raises:
            StagingError: a source on an accelerator was freed or resized before its copy was queued.
        """
        try:
            self._finish()
        finally:  # queued copies write to the memory, even if not all of them could be queued
            for _, event in self._events:
                event.synchronize()
        written = self._members_of(region for sources in self._remote.values() for region in sources.written())
        self.touched |= written
        return sorted({*self._find_written(), *written})

    def finish_before_write(self) -> None:
        """Block until the source may be written. Called by any thread that is about to write, any number of times.

        That thread runs no operation meanwhile, so the call is also a :meth:`fence`.
        """
        with contextlib.suppress(Exception):  # run() raises the error
            self._finish()
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)
        self._find_written()
        self.fence()

    def fence(self) -> None:
        """Confirm the copy, if it is complete, by reading the counters again. Idempotent.

        Called on the thread that stages and trains, while it runs no operation of torch.
        """
        with self._lock:
            if self._written is None or self._fenced.is_set():
                return
            # Operations that began before the copy ended cannot be distinguished from later ones.
            self.touched.update(self._moved(), self._changed_samples())
            self._written = sorted({*self._written, *self.touched})
            self._fenced.set()

    def await_fence(self) -> list[int]:
        """Return the tensors whose copy may be torn, like :meth:`run`, once this is known. On a background thread.

        Without a fence, this takes 0.5 s, or the duration of the copy if longer, in which no counter changes.
        """
        slices = max(_STILL_S, self._ended - self._began) / _SLICE_S if self._counted else 0
        while slices > 0 and not self._fenced.wait(_SLICE_S):
            slices -= 1
        self.fence()
        return self._written or []

    def reads(self, x: torch.UntypedStorage | torch.Tensor) -> bool:
        """Return whether the copy is incomplete and reads from a storage, or from the storage of a tensor."""
        if self._written is not None:
            return False
        try:
            storage = x if isinstance(x, torch.UntypedStorage) else x.untyped_storage()
        except (RuntimeError, NotImplementedError, ValueError):  # a tensor without a storage, such as a sparse one
            return False
        return any(each._cdata == storage._cdata for each in self._storages.values())

    def _finish(self) -> None:
        if not self._task.is_begun_whole and (replaced := self._replaced()):  # freed memory must not be read
            self._task.cancel()
            with self._lock:
                self._written = self._written or sorted(self._members_of(replaced))
        self._task.finish()

    def _find_written(self) -> list[int]:
        """Check for writes once, after the copying and before the first permitted write."""
        with self._lock:
            if self._written is None:
                self._ended = time.monotonic()
                torn = self._replaced()
                if self._checksums:
                    pairs = zip(self._split.deferred, self._checksums, strict=True)
                    torn += [r for r, before in pairs if _checksum(self._base + r.offset, r.nbytes) != before]
                else:
                    torn += self._split.differing(self._samples, self._split.sampled(self._base))
                self.touched.update(self._moved(), self._members_of(torn))
                self._written = sorted(self.touched)
            return self._written

    def _moved(self) -> set[int]:
        """Return the tensors whose version counters have changed."""
        pairs = zip(self._counted, self._versions, strict=True)
        return {i for (i, x), version in pairs if x._version != version}

    def _replaced(self) -> list[Region]:
        """Return the regions whose storages were freed or resized in place."""
        regions = (*self._split.deferred, *self._split.deferred_remote)
        return [region for region in regions if not is_in(region, self._storages[region.source])]

    def _changed_samples(self) -> set[int]:
        """Return the tensors in host memory whose samples have changed since the beginning."""
        if self._replaced():  # freed memory must not be read
            return set()
        return self._members_of(self._split.differing(self._samples, self._split.sampled()))

    @staticmethod
    def _members_of(regions: Iterable[Region]) -> set[int]:
        return {i for region in regions for i in region.members}


def _sources(pending: PendingCopy, split: CopySplit) -> dict[torch.device, DeviceSources]:
    """Return the sources of the deferred copies by accelerator, with their content on the caller's streams."""
    by_device: dict[torch.device, list[Region]] = {}
    for region in split.deferred_remote:
        by_device.setdefault(pending.sources[region.source].device, []).append(region)
    found: dict[torch.device, DeviceSources] = {}
    for device, regions in by_device.items():
        with torch.accelerator.device_index(device.index):
            found[device] = DeviceSources(pending, regions)
    return found


def _queues(
    remote: dict[torch.device, DeviceSources], split: CopySplit, events: list[tuple[torch.device, torch.Event]]
) -> list[Callable[[int], None]]:
    """Return, per device, a thread-safe function that queues the deferred copies and adds their end event."""

    def queue(base: int, device: torch.device, stream: torch.Stream) -> None:
        # Set the device first: leaving the stream would initialize the thread's other device, at a cost in memory.
        with torch.no_grad(), torch.accelerator.device_index(device.index), stream:
            try:
                remote[device].queue()
            finally:
                events.append((device, stream.record_event()))

    made: list[Callable[[int], None]] = []
    for device in remote:
        stream = split.streams.get(device) or split.streams.setdefault(device, torch.Stream(device))
        stream.wait_event(torch.accelerator.current_stream(device).record_event())  # the caller's current stream
        made.append(functools.partial(queue, device=device, stream=stream))
    return made


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
