"""A copy that is started in one call, and finished at the latest before the next write to its source.

A :class:`DeferredCopy` consists of pieces that any thread may copy. A background thread copies piece after piece; a
thread that is about to write to the source first copies the remaining pieces. Memory on an accelerator is copied on a
side stream, after the work that was queued before; the first thread that copies queues these copies. A writer's stream
waits for the copies; the writer itself waits only until they are queued.

Two inexpensive checks detect writes that the stager was not notified of. Most in-place operations of torch change the
version counter of the tensor. Writes that bypass the counters (fused optimizers, gloo collectives, ``.data``, numpy)
nearly always write a whole tensor, so the stager samples bytes of the source at the beginning, and compares them with
the *copy*. On request, it compares a CRC-32 of every byte instead of the counters of host memory.

torch changes a counter only after the operation. So the counters are read again while the training thread runs no
operation (:meth:`DeferredCopy.fence`). Until then, the copy is complete but not *confirmed*.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from stagereg.base.capture import is_capturing, relaxed_capture
from stagereg.base.device_copy import Step, await_event
from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.layout import Layout, Region, is_in
from stagereg.kernel.transfer import Batch, CopyTask, piece
from stagereg.stagers.device_sources import DeviceSources

_PIECE_BYTES = 2**22  # bytes; a writer waits for at most one piece of another thread, well below a millisecond
SAMPLE_BYTES = 64
_MOST_BLOCKS = 4  # maximum number of memory blocks that the copies use alternately
_MAX_BYTES_BETWEEN = 2**22  # maximum distance between two samples of a region
_POLL_S = 5e-4  # seconds between two checks whether the next piece may be queued
_STILL_S = 0.5  # seconds; after this time without a fence, unchanged counters are final
_SLICE_S = 0.05  # seconds; the wait is counted in such slices, so that suspension of the process does not count


class CopySplit:
    """The regions of a layout: those that are copied immediately, and those that are copied later (deferred).

    Reused for a layout while the same regions may be deferred. Host regions smaller than ``least`` bytes are not
    deferred.
    """

    def __init__(self, layout: Layout, may_defer: Callable[[Region], bool], least: int) -> None:
        local = [(region, region.nbytes >= least and may_defer(region)) for region in layout.regions]
        remote = [(region, may_defer(region)) for region in layout.remote]
        self.immediate = Batch([(r.offset, r.address, r.nbytes) for r, deferred in local if not deferred])
        self.deferred = [region for region, deferred in local if deferred]
        self.pieces = _pieces(self.deferred)
        self.immediate_remote = [region for region, deferred in remote if not deferred]
        self.deferred_remote = [region for region, deferred in remote if deferred]
        self.streams: dict[torch.device, torch.Stream] = {}  # side streams by device; created when needed
        # Indices of the tensors in deferred regions: first only on accelerators, then in all memory.
        self.members_remote = [i for region in self.deferred_remote for i in region.members]
        self.members = [i for region in self.deferred for i in region.members] + self.members_remote
        # Positions of samples in host memory: both ends of each region, and points at regular distances between them.
        self.samples = [(region, at) for region in self.deferred for at in sample_offsets(region.nbytes)]
        self._sampler = functools.lru_cache(_MOST_BLOCKS + 1)(functools.partial(_sampler_of, self.samples))

    def sampled(self, base: int | None = None) -> bytes:
        """Return the samples, concatenated: of the source, or of the copy in the block at address ``base``."""
        return self._sampler(base)()

    def differing(self, before: bytes, after: bytes) -> list[Region]:
        """Return the regions in which two results of :meth:`sampled` differ."""
        if before == after:
            return []
        pairs = zip(range(0, len(before), SAMPLE_BYTES), self.samples, strict=True)
        return [r for at, (r, _) in pairs if before[at : at + SAMPLE_BYTES] != after[at : at + SAMPLE_BYTES]]


def _pieces(regions: Sequence[Region]) -> list[Callable[[int], None]]:
    """Return functions that copy the regions. Small regions share a function; large ones are split."""
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
    """Return the offsets of samples in ``nbytes`` bytes: both ends, and points at regular distances between them."""
    steps = -(-nbytes // _MAX_BYTES_BETWEEN)
    return [max(nbytes - SAMPLE_BYTES, 0) * k // steps for k in range(steps + 1)]


def sampler(starts: Sequence[int], sizes: Sequence[int]) -> Callable[[], bytes]:
    """Return a function that reads samples from host memory and returns their bytes.

    ``starts``: the addresses of the samples; ``sizes``: their sizes. Each sample takes ``SAMPLE_BYTES`` in the result.
    """
    copy = piece([*zip(range(0, SAMPLE_BYTES * len(starts), SAMPLE_BYTES), starts, sizes, strict=True)])

    def take() -> bytes:
        taken = ctypes.create_string_buffer(SAMPLE_BYTES * len(starts) or 1)
        copy(ctypes.addressof(taken))
        return taken.raw[: SAMPLE_BYTES * len(starts)]

    return take


def _sampler_of(samples: Sequence[tuple[Region, int]], base: int | None) -> Callable[[], bytes]:
    starts = [(region.address if base is None else base + region.offset) + at for region, at in samples]
    return sampler(starts, [min(region.nbytes, SAMPLE_BYTES) for region, _ in samples])


class Pace(NamedTuple):
    """How copies from an accelerator are queued while training continues. A write to the source ends the delays.

    ``piece_bytes``: queue at most this many bytes, and the next bytes when these are copied. None: queue all at once.
    ``bytes_per_s``: maximum rate, for pieces. None: the rate of the link.
    """

    piece_bytes: int | None = None
    bytes_per_s: float | None = None


UNPACED = Pace()


class DeferredCopy:
    """The deferred part of a copy. Copies the content that the source has at the time of construction.

    ``pending``: the whole copy. ``split``: the regions that are copied later. ``events``: one event per device,
    recorded after the copies that are already queued. ``thorough``: whether to detect writes by comparing every byte in
    host memory, not by version counters and samples. ``pace``: how to delay the copies from accelerators.
    """

    def __init__(
        self,
        pending: PendingCopy,
        split: CopySplit,
        events: list[tuple[torch.device, torch.Event]],
        thorough: bool,
        pace: Pace = UNPACED,
    ) -> None:
        self._remote = _remote(pending, split, pace)
        self._unended = [*self._remote]  # the copies whose end is not queued yet
        pending.hold([*split.deferred, *split.deferred_remote, *split.immediate_remote])
        self._storages = dict(pending.storages)
        queues = [queue for each in self._remote for queue in each.queues()]
        self._task = CopyTask(pending.address, [*queues, *split.pieces])
        self._base = pending.address
        self._split = split
        self._events = events
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._counted = [(i, pending.sources[i]) for i in (split.members_remote if thorough else split.members)]
        self._versions = [x._version for _, x in self._counted]
        self._samples = split.sampled()
        self._checksums = [_checksum(r.address, r.nbytes) for r in split.deferred] if thorough else []
        self._written: list[int] | None = None  # None until the copy is complete
        self._began, self._ended = time.monotonic(), math.inf
        self._fenced = threading.Event()  # set when ``_written`` can no longer change
        self.touched: set[int] = set()  # tensors that were written before the fence, even after their copy

    def run(self) -> list[int]:
        """Copy the remaining pieces. Called once, on a background thread.

        Return the indices of the source tensors that were written, freed or resized before they were copied. Unless
        this list is empty, the copy is unusable. Raises: ``StagingError`` if a source on an accelerator was freed or
        resized before its copy was queued.
        """
        try:
            self._finish()
        finally:
            self.settle()
        written = self._members_of(region for each in self._remote for region in each.sources.written())
        self.touched |= written
        return sorted({*self._find_written(), *written})

    def settle(self) -> None:
        """Block until no queued copy writes to the memory, even if not all copies could be queued."""
        for _, event in self._events:
            await_event(event)

    def finish_before_write(self) -> None:
        """Block until the source may be written. Any thread that is about to write calls this, any number of times.

        That thread runs no torch operation during the call, so the call is also a :meth:`fence`.
        """
        for each in self._remote:
            each.hurry()
        with contextlib.suppress(Exception):  # run() raises this error
            self._finish()
        captures = is_capturing()
        for device, event in self._events:
            if captures:  # the graph must not depend on an event from before its capture
                await_event(event)
            else:
                torch.accelerator.current_stream(device).wait_event(event)
        self._find_written()
        self.fence()

    def fence(self) -> None:
        """If the copy is complete, confirm it by reading the version counters again. Idempotent.

        Called on the thread that stages and trains, while it runs no operation of torch.
        """
        with self._lock:
            if self._written is None or self._fenced.is_set():
                return
            # A changed counter does not show whether the operation began before or after the end of the copy.
            self.touched.update(self._moved(), self._changed_samples())
            self._written = sorted({*self._written, *self.touched})
            self._fenced.set()

    def await_fence(self) -> list[int]:
        """Wait for the fence, and return the tensors whose copy may be torn (see :meth:`run`). For a background thread.

        Without a fence, waits for 0.5 s or the duration of the copy, whichever is longer. A counter that changes counts
        as a write.
        """
        slices = max(_STILL_S, self._ended - self._began) / _SLICE_S if self._counted else 0
        while slices > 0 and not self._fenced.wait(_SLICE_S):
            slices -= 1
        self.fence()
        return self._written or []

    def reads(self, x: torch.UntypedStorage | torch.Tensor) -> bool:
        """Return whether the copy is incomplete and reads from the storage ``x`` or the storage of the tensor ``x``."""
        if self._written is not None:
            return False
        try:
            storage = x if isinstance(x, torch.UntypedStorage) else x.untyped_storage()
        except (RuntimeError, NotImplementedError, ValueError):  # no storage, such as a sparse tensor
            return False
        return any(each._cdata == storage._cdata for each in self._storages.values())

    def _finish(self) -> None:
        if not self._task.is_begun_whole and (replaced := self._replaced()):  # freed memory must not be read
            self._task.cancel()
            with self._lock:
                self._written = self._written or sorted(self._members_of(replaced))
        try:
            self._task.finish()
        finally:
            with self._ending:
                while self._unended:  # digests of freed memory must not be computed
                    self._unended.pop().end(not self._replaced(), self._events)

    def _find_written(self) -> list[int]:
        """Check for writes, once: after the last piece is copied and before the first permitted write."""
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
        return {i for (i, x), version in zip(self._counted, self._versions, strict=True) if x._version != version}

    def _replaced(self) -> list[Region]:
        regions = (*self._split.deferred, *self._split.deferred_remote)
        return [region for region in regions if not is_in(region, self._storages[region.source])]

    def _changed_samples(self) -> set[int]:
        """Return the tensors in host memory whose samples have changed since construction."""
        if self._replaced():  # freed memory must not be read
            return set()
        return self._members_of(self._split.differing(self._samples, self._split.sampled()))

    @staticmethod
    def _members_of(regions: Iterable[Region]) -> set[int]:
        return {i for region in regions for i in region.members}


class _RemoteCopy:
    """The deferred copies from one accelerator, queued on ``stream``. Construct it on the caller's stream."""

    def __init__(self, sources: DeviceSources, device: torch.device, stream: torch.Stream, pace: Pace) -> None:
        self.sources, self._device, self._stream, self._pace = sources, device, stream, pace
        self._hurried = threading.Event()
        self._last: torch.Event | None = None  # the end of the last piece
        self._next_at = 0.0  # the time from which on the next piece may be queued
        stream.wait_event(torch.accelerator.current_stream(device).record_event())

    def queues(self) -> Iterator[Callable[[int], None]]:
        """Yield functions for a :class:`CopyTask`: one for all steps, or with a pace, one for each piece."""
        most, nbytes, piece = self._pace.piece_bytes or math.inf, 0, list[Step]()
        for step in self.sources.steps:
            if piece and nbytes + step.nbytes > most:
                yield functools.partial(self._queue, piece, nbytes)
                nbytes, piece = 0, []
            nbytes += step.nbytes
            piece.append(step)
        if piece:
            yield functools.partial(self._queue, piece, nbytes)

    def hurry(self) -> None:
        """End the delays."""
        self._hurried.set()

    def end(self, with_digests: bool, events: list[tuple[torch.device, torch.Event]]) -> None:
        """Queue the digests, and append to ``events`` the event after the last copy."""
        with self._current():
            try:
                if with_digests:
                    self.sources.queue_digests()
            finally:
                events.append((self._device, self._stream.record_event()))

    def _queue(self, steps: Sequence[Step], nbytes: int, _base: int) -> None:
        self._await_turn()
        with self._current():
            for step in steps:
                step.queue()
            if self._pace.piece_bytes is not None:
                self._last = self._stream.record_event()
            if self._pace.bytes_per_s is not None:
                self._next_at = time.monotonic() + nbytes / self._pace.bytes_per_s

    def _await_turn(self) -> None:
        with relaxed_capture():
            while not self._hurried.is_set():
                left_s = self._next_at - time.monotonic()
                if left_s <= 0 and (self._last is None or self._last.query()):
                    return
                self._hurried.wait(max(left_s, _POLL_S))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        # Set the device first. Otherwise, leaving the stream would initialize another device, which costs memory.
        with torch.no_grad(), relaxed_capture(), torch.accelerator.device_index(self._device.index), self._stream:
            yield


def _remote(pending: PendingCopy, split: CopySplit, pace: Pace) -> list[_RemoteCopy]:
    by_device: dict[torch.device, list[Region]] = {}
    for region in split.deferred_remote:
        by_device.setdefault(pending.sources[region.source].device, []).append(region)
    found = []
    for device, regions in by_device.items():
        stream = split.streams.get(device) or split.streams.setdefault(device, torch.Stream(device))
        with torch.accelerator.device_index(device.index):
            sources = DeviceSources(pending, regions, pace.piece_bytes)
        found.append(_RemoteCopy(sources, device, stream, pace))
    return found


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
