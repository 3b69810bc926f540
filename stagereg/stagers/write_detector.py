"""Whether a source was written between the call that promised its copy and the copying.

Two things are looked at, both cheap. The version counters of the tensors, which every in-place operation of torch moves
that goes through the tensor, a view of it or ``detach()``. And samples of the bytes, taken at the call and compared
with the same places of the *copy*: what bypasses the counters (fused optimizers, gloo collectives, ``.data``, numpy)
nearly always writes a whole tensor. A write after the copying changes no sample of the copy, so nothing is reported
that did no harm. With ``thorough``, the samples are a checksum of every byte (CRC-32), which reads the whole source.

Samples of many places are taken by one system call (``vectored``).
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Iterable, Sequence

import torch

from stagereg.kernel.layout import Region
from stagereg.kernel.transfer import Pieces, read_many

__all__ = ["Places", "Watch"]

_SAMPLE_BYTES = 64
_MOST_BYTES_BETWEEN = 2**22


class Places:
    """Where some regions are looked at: at both ends of each and at regular places between them.

    Made once for a layout. :meth:`of_source` is for one thread at a time, :meth:`of_copy` for any.

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
        self._counts = [1 + -(-region.nbytes // _MOST_BYTES_BETWEEN) for region in regions]
        steps = [
            (region, max(region.nbytes - _SAMPLE_BYTES, 0) * k // (count - 1))
            for region, count in zip(regions, self._counts, strict=True)
            for k in range(count)
        ]
        self._sizes = [min(region.nbytes, _SAMPLE_BYTES) for region, _ in steps]
        self._in_copy = [region.offset + at for region, at in steps]
        self._in_source = [region.address + at for region, at in steps]
        self._source = Pieces(self._in_source, self._sizes)
        self._fields = bytearray(len(steps) * _SAMPLE_BYTES)
        self._to = Pieces(_fields_of(self._fields), self._sizes)

    def of_source(self) -> bytes:
        """Return the samples of the source as it is now."""
        if not read_many(self._to, self._source):
            _read(self._fields, self._in_source, self._sizes)
        return bytes(self._fields)

    def of_copy(self, base: int) -> bytes:
        """Return the samples of a copy whose memory begins at ``base``."""
        fields = bytearray(len(self._fields))
        places = [base + at for at in self._in_copy]
        if not read_many(Pieces(_fields_of(fields), self._sizes), Pieces(places, self._sizes)):
            _read(fields, places, self._sizes)
        return bytes(fields)

    def differing(self, before: bytes, after: bytes) -> list[Region]:
        """Return the regions whose samples are not the same."""
        ends = [count * _SAMPLE_BYTES for count in itertools.accumulate(self._counts, initial=0)]
        spans = zip(self.regions, itertools.pairwise(ends), strict=True)
        return [region for region, (begin, end) in spans if before[begin:end] != after[begin:end]]


class Watch:
    """What a source looks like at the time of construction.

    Args:
        sources: the tensors that a pending is to copy.
        places: where to look.
        base: where the copy begins in host memory.
        thorough: look at every byte in host memory.
    """

    def __init__(self, sources: Sequence[torch.Tensor], places: Places, base: int, thorough: bool) -> None:
        self._sources = sources
        self._places = places
        self._base = base
        self._versions = [sources[i]._version for i in places.members]
        self._samples = places.of_source()
        self._checksums = self._sum((r.address, r.nbytes) for r in places.regions) if thorough else None

    def changed(self) -> list[int]:
        """Return the indices of the tensors that were written before they were copied. Call it after the copying."""
        versions = zip(self._places.members, self._versions, strict=True)
        written = [i for i, version in versions if self._sources[i]._version != version]
        samples = self._places.of_copy(self._base)
        torn = self._places.differing(self._samples, samples) if samples != self._samples else []
        if self._checksums is not None:
            sums = self._sum((self._base + r.offset, r.nbytes) for r in self._places.regions)
            pairs = zip(self._places.regions, self._checksums, sums, strict=True)
            torn += [region for region, before, after in pairs if before != after]
        return sorted({*written, *(i for region in torn for i in region.members)})

    @staticmethod
    def _sum(spans: Iterable[tuple[int, int]]) -> list[int]:
        return [zlib.crc32((ctypes.c_char * nbytes).from_address(address)) for address, nbytes in spans]


def _fields_of(fields: bytearray) -> range:
    """The addresses of fields of ``_SAMPLE_BYTES``."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(fields)) if fields else 0
    return range(begin, begin + len(fields), _SAMPLE_BYTES)


def _read(fields: bytearray, places: Sequence[int], sizes: Sequence[int]) -> None:
    for to, place, nbytes in zip(_fields_of(fields), places, sizes, strict=True):
        ctypes.memmove(to, place, nbytes)
