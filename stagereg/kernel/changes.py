"""Whether a source was written between the call that promised its copy and the copying.

Two things are looked at, both cheap. The version counters of the tensors, which every in-place operation of torch moves
that goes through the tensor, a view of it or ``detach()``. And samples of the bytes, taken at the call and compared
with the same places of the *copy*: what bypasses the counters (fused optimizers, gloo collectives, ``.data``, numpy)
nearly always writes a whole tensor. A write after the copying changes no sample of the copy, so nothing is reported
that did no harm. With ``thorough``, the samples are a checksum of every byte (CRC-32), which reads the whole source.

Samples of many places are taken by one system call, ``process_vm_readv``; where that is refused, by ``memmove``.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import zlib
from collections.abc import Sequence

import torch

from stagereg.kernel.layout import Region

__all__ = ["Watch"]

_SAMPLE_BYTES = 64
_MOST_BYTES_BETWEEN = 2**22
_AT_ONCE = 1024  # pieces that one process_vm_readv takes (IOV_MAX)


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
    room = bytearray(len(places) * _SAMPLE_BYTES)
    if not places:
        return bytes(room)
    to = ctypes.addressof(ctypes.c_char.from_buffer(room))
    if not _read_at_once(to, places, sizes):
        for k, (place, nbytes) in enumerate(zip(places, sizes, strict=True)):
            ctypes.memmove(to + k * _SAMPLE_BYTES, place, nbytes)
    return bytes(room)


def _read_at_once(to: int, places: Sequence[int], sizes: Sequence[int]) -> bool:
    readv = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if readv is None:
        return False
    theirs = _vector(places, sizes)
    ours = _vector(range(to, to + len(places) * _SAMPLE_BYTES, _SAMPLE_BYTES), sizes)
    readv.restype = ctypes.c_ssize_t
    readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    process = os.getpid()
    for begin in range(0, len(places), _AT_ONCE):
        count = min(_AT_ONCE, len(places) - begin)
        skip = begin * 2 * theirs.itemsize
        done = readv(process, ours.buffer_info()[0] + skip, count, theirs.buffer_info()[0] + skip, count, 0)
        if done != sum(sizes[begin : begin + count]):
            return False
    return True


def _vector(places: Sequence[int], sizes: Sequence[int]) -> array.array[int]:
    """A C array of ``struct iovec``: address and bytes, one after the other."""
    return array.array("Q", itertools.chain.from_iterable(zip(places, sizes, strict=True)))
