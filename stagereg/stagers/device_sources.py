"""The sources of a deferred copy on one accelerator, and a check that no kernel wrote to them during the copy.

The host queues work long before the device runs it. A write that changes no version counter (``tensor.data``) can run
while the copy engine still reads the tensor, and the host does not detect it. Two measures prevent or detect this:

- Small tensors are gathered into buffers on the device, on the caller's stream. Later writes do not reach the buffers.
- For each larger region, a digest is computed on the caller's stream, and again after the copy. The digest has the sums
  of the rows and of the columns of the memory, arranged as a table of 64-bit integers. It changes with every write that
  changes a value or exchanges values, unless the changes cancel out in each row and in each column. A digest reads the
  memory twice, at the speed of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagereg.base.device_copy import BUFFER_BYTES, DeviceCopy, Source, Step, fits, gathered, grouped
from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.layout import Region

_WIDTH = 1024  # 64-bit integers in a row of a digest's table


class DeviceSources:
    """The regions to copy from one accelerator. The copy gets their content at the time of construction.

    ``pending``: the whole copy. ``regions``: regions of its layout, all on the same accelerator. The caller's stream
    must be current. ``piece_bytes``: see :class:`.DeviceCopy`. ``steps``: the copies, for a stream that waits for the
    caller's stream.
    """

    def __init__(self, pending: PendingCopy, regions: Sequence[Region], piece_bytes: int | None) -> None:
        by_offset = {region.offset: region for region in regions}
        sources: list[Source] = []
        watched: list[Source] = []
        room = BUFFER_BYTES
        for group in grouped([pending.source_of(region) for region in regions]):
            if (buffer := _gathered_in(group, room)) is not None:
                room -= buffer.numel()
                sources.append(Source(group[0].offset, buffer))
            else:
                sources += group
                watched += group
        self._watched = [source.data for source in watched]
        self._regions = [by_offset[source.offset] for source in watched]
        self._before, self._lengths = digests(self._watched)
        self._differ = torch.empty(0, dtype=torch.bool, device="cpu")
        self.steps: list[Step] = DeviceCopy(pending.view, sources, piece_bytes=piece_bytes).steps

    def queue_digests(self) -> None:
        """Queue new digests on the current stream, after all steps."""
        self._differ = (self._before != digests(self._watched)[0]).to("cpu", non_blocking=True)

    def written(self) -> list[Region]:
        """Return the regions that were written before their copy ended. Call this when the queued work is complete."""
        if not self._differ.numel():  # the copy failed before the digests were queued, or no region is watched
            return []
        differ = self._differ.split(self._lengths)
        return [region for region, differs in zip(self._regions, differ, strict=True) if differs.any()]


def _gathered_in(group: Sequence[Source], room: int) -> torch.Tensor | None:
    """Return a copy of a small group on the device, or ``None`` if it is not small or exceeds ``room`` bytes."""
    try:
        return gathered(group) if fits(group, room) else None
    except torch.OutOfMemoryError:  # use digests instead, which need almost no memory
        return None


def digests(sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return the digests of tensors, one after the other, as an int64 vector on their device; and their lengths.

    ``sources``: one-dimensional uint8 tensors, at addresses that are multiples of 8.
    """
    parts, lengths = [torch.empty(0, dtype=torch.int64, device=sources[0].device if sources else "cpu")], []
    for source in sources:
        words = source[: source.numel() // 8 * 8].view(torch.int64)
        rows = words.numel() // _WIDTH
        table, rest = words[: rows * _WIDTH].view(rows, _WIDTH), words[rows * _WIDTH :]
        digest = [table.sum(0), table.sum(1), rest, source[8 * words.numel() :].to(torch.int64)]
        lengths.append(sum(map(len, digest)))
        parts += filter(len, digest)
    return torch.cat(parts), lengths
