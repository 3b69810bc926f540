"""Whether a source was written between the call that promised its copy and the copying.

Two things are looked at, both cheap. The version counters of the tensors, which every in-place operation of torch moves
that goes through the tensor, a view of it or ``detach()``. And samples of the bytes, taken at the call and compared
with the same points of the *copy*: what bypasses the counters (fused optimizers, gloo collectives, ``.data``, numpy)
nearly always writes a whole tensor. A write after the copying changes no sample of the copy, so nothing is reported
that did no harm. With ``thorough``, a checksum of every byte (CRC-32) is compared as well, which reads the whole
source.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

import torch

from stagereg.kernel.layout import Region

__all__ = ["SamplePoints", "WriteDetector"]

_SAMPLE_BYTES = 64
_MAX_BYTES_BETWEEN = 2**22


class SamplePoints:
    """Where some regions are looked at: at both ends of each and at regular points between them.

    Made once for a layout.

    Args:
        regions: in host memory.
        remote: on accelerators, whose bytes are not looked at.

    Attributes:
        regions: those in host memory.
        members: indices of the tensors in all of them.
    """

    def __init__(self, regions: Sequence[Region], remote: Sequence[Region]) -> None:
        self.regions = regions
        self.members = [i for region in (*regions, *remote) for i in region.members]
        self._points = [(region, at) for region in regions for at in _offsets(region.nbytes)]
        self._sizes = [min(region.nbytes, _SAMPLE_BYTES) for region, _ in self._points]

    def of_source(self) -> list[bytes]:
        """Return the samples of the source as it is now."""
        return list(map(ctypes.string_at, [region.address + at for region, at in self._points], self._sizes))

    def of_copy(self, base: int) -> list[bytes]:
        """Return the samples of a copy whose memory begins at ``base``."""
        return list(map(ctypes.string_at, [base + region.offset + at for region, at in self._points], self._sizes))

    def differing(self, before: list[bytes], after: list[bytes]) -> list[Region]:
        """Return the regions whose samples are not the same."""
        samples = zip(self._points, before, after, strict=True)
        return [region for (region, _), one, other in samples if one != other]


def _offsets(nbytes: int) -> list[int]:
    steps = -(-nbytes // _MAX_BYTES_BETWEEN)
    return [max(nbytes - _SAMPLE_BYTES, 0) * k // steps for k in range(steps + 1)]


class WriteDetector:
    """Knows what a source looks like at the time of construction.

    Args:
        sources: the tensors that are to be copied.
        points: where to look.
        base: where the copy begins in host memory.
        thorough: look at every byte in host memory.
    """

    def __init__(self, sources: Sequence[torch.Tensor], points: SamplePoints, base: int, thorough: bool) -> None:
        self._sources = sources
        self._points = points
        self._base = base
        self._versions = [sources[i]._version for i in points.members]
        self._samples = points.of_source()
        self._checksums = [_checksum(r.address, r.nbytes) for r in points.regions] if thorough else None

    def written(self) -> list[int]:
        """Return the indices of the tensors that were written before they were copied. Call it after the copying."""
        versions = zip(self._points.members, self._versions, strict=True)
        found = {i for i, version in versions if self._sources[i]._version != version}
        torn = self._points.differing(self._samples, self._points.of_copy(self._base))
        if self._checksums is not None:
            pairs = zip(self._points.regions, self._checksums, strict=True)
            torn += [r for r, checksum in pairs if _checksum(self._base + r.offset, r.nbytes) != checksum]
        return sorted(found.union(*(region.members for region in torn)))


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
