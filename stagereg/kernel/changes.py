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
from collections.abc import Sequence

import torch

from stagereg.kernel.layout import Region
from stagereg.kernel.vectored import Pieces, read_many

__all__ = ["Watch"]

_SAMPLE_BYTES = 64
_MOST_BYTES_BETWEEN = 2**22


class Watch:
    """What some regions of a source look like at the time of construction.

    Args:
        sources: the tensors that a draft is to copy.
        regions: the regions to be watched, in host memory or not.
        base: where the copy begins in host memory.
        thorough: look at every byte. Only regions in host memory have samples.
    """

    def __init__(self, sources: Sequence[torch.Tensor], regions: Sequence[Region], base: int, thorough: bool) -> None:
        self._members = [i for region in regions for i in region.members]
        self._sources = sources
        self._versions = [sources[i]._version for i in self._members]
        self._here = [region for region in regions if sources[region.source].device.type == "cpu"]
        self._base = base
        self._look = _checksums if thorough else _samples
        self._seen = self._look([(region.address, region.nbytes) for region in self._here])

    def changed(self) -> list[int]:
        """Return the indices of the tensors that were written before they were copied. Call it after the copying."""
        written = [
            i for i, version in zip(self._members, self._versions, strict=True) if self._sources[i]._version != version
        ]
        copied = self._look([(self._base + region.offset, region.nbytes) for region in self._here])
        for region, before, after in zip(self._here, self._seen, copied, strict=True):
            if before != after:
                written += region.members
        return sorted(set(written))


def _checksums(spans: Sequence[tuple[int, int]]) -> list[object]:
    return [zlib.crc32((ctypes.c_char * nbytes).from_address(address)) for address, nbytes in spans]


def _samples(spans: Sequence[tuple[int, int]]) -> list[object]:
    """The bytes at both ends of each span and at regular places between them."""
    counts = [1 + -(-nbytes // _MOST_BYTES_BETWEEN) if nbytes > _SAMPLE_BYTES else 1 for _, nbytes in spans]
    places: list[int] = []
    for (address, nbytes), count in zip(spans, counts, strict=True):
        last = max(nbytes - _SAMPLE_BYTES, 0)
        places += [address + last * k // max(count - 1, 1) for k in range(count)]
    sizes = [min(nbytes, _SAMPLE_BYTES) for (_, nbytes), n in zip(spans, counts, strict=True) for _ in range(n)]
    read = _read(places, sizes)
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return [read[begin * _SAMPLE_BYTES : end * _SAMPLE_BYTES] for begin, end in itertools.pairwise(bounds)]


def _read(places: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Return the bytes at ``places``, each in a field of ``_SAMPLE_BYTES``."""
    fields = bytearray(len(places) * _SAMPLE_BYTES)
    if not places:
        return bytes(fields)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(fields))
    to = range(begin, begin + len(fields), _SAMPLE_BYTES)
    if not read_many(Pieces(to, sizes), Pieces(places, sizes)):
        for field, place, nbytes in zip(to, places, sizes, strict=True):
            ctypes.memmove(field, place, nbytes)
    return bytes(fields)
