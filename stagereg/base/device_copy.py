"""Copies from one accelerator into a block of host memory, in few calls, on a side stream.

A call of torch takes microseconds on the host, and a small copy uses little of the link. So small sources that are
adjacent in the block are first gathered into one buffer on the device. Views with gaps are packed into that buffer. The
buffer is allocated while the caller's stream is current: with torch's caching allocator, memory belongs to the stream
that was current when it was allocated, and only that stream uses it again.

The code that constructs a :class:`DeviceCopy` must keep it alive until the copies are complete.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from stagereg.base.capture import relaxed_capture
from stagereg.base.pages import LOCKED_BYTES

_SMALL_BYTES = 2**18  # smaller sources are gathered
BUFFER_BYTES = 2**26  # maximum bytes of a gathered group, and of all groups before a deferred copy
_GAP_BYTES = 64  # adjacent sources are less than this apart in the block
_SHORTEST_POLL_S, _LONGEST_POLL_S = 2e-5, 2e-4


class Source(NamedTuple):
    """Bytes on a device, as a one-dimensional uint8 tensor, and the offset of their copy in the block."""

    offset: int
    data: torch.Tensor


class Packed(NamedTuple):
    """A view with gaps, the offset of its copy in the block, and the dense strides of the copy."""

    offset: int
    data: torch.Tensor
    stride: tuple[int, ...]


class Step(NamedTuple):
    """A function that queues copies on the current stream, and the number of bytes that these copy."""

    nbytes: int
    queue: Callable[[], None]


class DeviceCopy:
    """Copies from one accelerator into the block ``view``. Construct it while the caller's stream is current.

    ``sources`` are sorted by offset. ``packed`` are views with gaps. ``piece_bytes``: maximum bytes that one of the
    ``steps`` queues from one source; None: no maximum. ``steps``: the copies. Any thread may queue a step; all steps
    must be queued with the same stream current.
    """

    def __init__(
        self, view: memoryview, sources: Sequence[Source], packed: Sequence[Packed] = (), piece_bytes: int | None = None
    ) -> None:
        self._view = view
        self._lock = threading.Lock()  # held while a step fills the buffer and queues the copy of the buffer
        groups = list(grouped(sources))
        self._buffer = _allocate(groups, packed)
        if self._buffer is None:
            groups = [[source] for source in sources]
        self.steps: list[Step] = []
        for group in groups:
            if len(group) > 1:
                self.steps.append(Step(_span(group), functools.partial(self._copy_gathered, group)))
            else:
                parts = _pieces(group[0], piece_bytes)
                self.steps += [Step(part.data.numel(), functools.partial(self._copy, part)) for part in parts]
        self.steps += [Step(each.data.nbytes, functools.partial(self._copy_packed, each)) for each in packed]

    def _copy(self, source: Source) -> None:
        for offset, data in _pieces(source, LOCKED_BYTES):
            to = torch.frombuffer(self._view, dtype=torch.uint8, count=data.numel(), offset=offset)
            to.copy_(data, non_blocking=True)

    def _copy_gathered(self, group: Sequence[Source]) -> None:
        assert self._buffer is not None
        with self._lock:
            self._copy(Source(group[0].offset, gathered(group, self._buffer)))

    def _copy_packed(self, packed: Packed) -> None:
        data = packed.data
        with self._lock:
            room = _empty(data.nbytes, data.device) if self._buffer is None else self._buffer[: data.nbytes]
            room.view(data.dtype).as_strided(data.shape, packed.stride).copy_(data)
            self._copy(Source(packed.offset, room))


def grouped(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Yield the sources in groups: small sources that are adjacent in the block together, any other source alone."""
    group: list[Source] = []
    for source in sources:
        if group and not (
            max(source.data.numel(), group[-1].data.numel()) < _SMALL_BYTES
            and 0 <= source.offset - _end(group) < _GAP_BYTES
            and _span([group[0], source]) <= BUFFER_BYTES
        ):
            yield group
            group = []
        group.append(source)
    if group:
        yield group


def fits(group: Sequence[Source], nbytes: int) -> bool:
    """Return whether a group of :func:`grouped` has small sources, which take at most ``nbytes`` when gathered."""
    return group[0].data.numel() < _SMALL_BYTES and _span(group) <= nbytes


def gathered(group: Sequence[Source], into: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of a group on the device, with the gaps that it has in the block; in ``into`` or in new memory."""
    parts: list[torch.Tensor] = []
    end, gap = group[0].offset, torch.zeros(_GAP_BYTES, dtype=torch.uint8, device=group[0].data.device)
    for offset, data in group:
        if offset > end:
            parts.append(gap[: offset - end])
        parts.append(data)
        end = offset + data.numel()
    nbytes = _span(group)
    return torch.cat(parts, out=_empty(nbytes, gap.device) if into is None else into[:nbytes])


def await_event(event: torch.Event) -> None:
    """Block until an event is complete. Sleeps, because on CUDA ``torch.Event.synchronize`` would use a whole core."""
    pause_s = _SHORTEST_POLL_S
    with relaxed_capture():
        while not event.query():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


def _allocate(groups: Sequence[Sequence[Source]], packed: Sequence[Packed]) -> torch.Tensor | None:
    sizes = [_span(group) for group in groups if len(group) > 1]
    sizes += [each.data.nbytes for each in packed]
    if not sizes:
        return None
    device = packed[0].data.device if packed else groups[0][0].data.device
    try:
        return _empty(max(sizes), device)
    except torch.OutOfMemoryError:  # copy each source separately
        return None


def _pieces(source: Source, most: int | None) -> Iterator[Source]:
    """Cut a source at the multiples of ``most`` bytes in the block."""
    offset, data = source
    while most is not None and data.numel() > most - offset % most:
        room = most - offset % most
        yield Source(offset, data[:room])
        offset, data = offset + room, data[room:]
    yield Source(offset, data)


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # threads outside the caller's inference mode write into the result
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _end(group: Sequence[Source]) -> int:
    return group[-1].offset + group[-1].data.numel()


def _span(group: Sequence[Source]) -> int:
    return _end(group) - group[0].offset
