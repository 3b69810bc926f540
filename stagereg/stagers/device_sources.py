"""The sources of a deferred copy on one accelerator, and a check that no kernel wrote to them during the copy.

The host queues work long before the device runs it. A write that changes no version counter (``tensor.data``) can run
while the copy engine still reads the tensor, and the host does not detect it. Two measures prevent or detect this:

- Small tensors are gathered into one buffer on the device, on the caller's stream. Later writes do not reach the
  buffer.
- For each larger region, a digest is computed on the caller's stream, and again after the copy. The digest is the sum
  of the bytes as 64-bit integers. It changes with every write, unless all changes of the write cancel out. Both digests
  read the memory at the speed of the device, which is about 80 times the speed of the link to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.layout import Region

_SMALL_BYTES = 2**18  # bytes; smaller tensors are gathered
_MOST_GATHERED_BYTES = 2**26  # bytes on each device


class DeviceSources:
    """The regions to copy from one accelerator. The copy gets their content at the time of construction.

    Args:
        pending: the whole copy.
        regions: regions of its layout, all on the same accelerator.
    """

    def __init__(self, pending: PendingCopy, regions: Sequence[Region]) -> None:
        gathered = _gather(pending, regions)
        self._large = [region for region in regions if id(region) not in gathered]
        pairs = pending.pairs(self._large)
        self._watched = [source for _, source in pairs]
        self._pairs = [*pairs, *gathered.values()]
        self._before = digests(self._watched)
        self._differ = torch.empty(0, dtype=torch.bool, device="cpu")

    def queue(self) -> None:
        """Queue the copies and new digests on the current stream, which already waits for the caller's stream."""
        for to, source in self._pairs:
            to.copy_(source, non_blocking=True)
        self._differ = (self._before != digests(self._watched)).to("cpu", non_blocking=True)

    def written(self) -> list[Region]:
        """Return the regions that were written before their copy ended. Call this when the queued work is complete."""
        # ``_differ`` is empty if the copy failed before the digests were queued.
        return [region for region, differs in zip(self._large, self._differ.tolist(), strict=False) if differs]


def digests(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one digest per tensor, as an int64 tensor of shape ``[len(sources)]`` on the device of the tensors.

    Args:
        sources: one-dimensional uint8 tensors, at addresses that are multiples of 8.
    """
    if not sources:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    sums = []
    for source in sources:
        whole = source.numel() // 8 * 8
        found = source[:whole].view(torch.int64).sum()
        sums.append(found if whole == source.numel() else found + source[whole:].sum())
    return torch.stack(sums)


def _gather(pending: PendingCopy, regions: Sequence[Region]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Copy small tensors into one device buffer. Return (destination, buffer slice), by ``id`` of the region."""
    small: list[Region] = []
    taken: list[torch.Tensor] = []
    room = _MOST_GATHERED_BYTES
    for region in regions:
        source = pending.sources[region.source]
        whole = source.nbytes == region.nbytes and source.is_contiguous()
        if whole and region.nbytes < _SMALL_BYTES and region.nbytes <= room:
            room -= region.nbytes
            small.append(region)
            taken.append(source.view(-1).view(torch.uint8))
    if not small:
        return {}
    try:
        buffer = torch.cat(taken)
    except torch.OutOfMemoryError:  # use digests instead, which need almost no memory
        return {}
    parts = buffer.split([region.nbytes for region in small])
    return {id(region): (pending.bytes_of(region), part) for region, part in zip(small, parts, strict=True)}
