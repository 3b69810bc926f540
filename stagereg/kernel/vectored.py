"""Many small pieces of memory copied by one system call, without the GIL.

``process_vm_readv`` of Linux copies up to a thousand pieces from one process to another, or within one, which is always
allowed. A sandbox may refuse the call, and other systems do not have it; then the answer is False and the caller copies
piece by piece.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

__all__ = ["AT_ONCE", "Pieces", "read_many"]

AT_ONCE = 1024
"""Pieces that one call takes (IOV_MAX)."""


class Pieces:
    """Some places in memory, in the form the call takes: an array of ``struct iovec``, address and bytes of each.

    Args:
        places: addresses.
        sizes: bytes of each.
    """

    def __init__(self, places: Iterable[int], sizes: Sequence[int]) -> None:
        self._pairs = array("Q", chain.from_iterable(zip(places, sizes, strict=True)))
        self._bytes = [sum(sizes[at : at + AT_ONCE]) for at in range(0, len(sizes), AT_ONCE)]

    def parts(self) -> list[tuple[int, int, int]]:
        """Return address, length and total bytes of each part that one call takes."""
        address, count = self._pairs.buffer_info()
        step = 2 * AT_ONCE
        return [
            (address + at * self._pairs.itemsize, min(step, count - at) // 2, nbytes)
            for at, nbytes in zip(range(0, count, step), self._bytes, strict=True)
        ]


def read_many(to: Pieces, source: Pieces) -> bool:
    """Copy pieces of the same sizes from one place to another; whether it was done."""
    readv = _readv()
    if readv is None:
        return False
    process = os.getpid()
    for (ours, count, nbytes), (theirs, _, _) in zip(to.parts(), source.parts(), strict=True):
        if readv(process, ours, count, theirs, count, 0) != nbytes:
            return False
    return True


@functools.cache
def _readv() -> Callable[..., int] | None:
    readv = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if readv is not None:
        readv.restype = ctypes.c_ssize_t
        readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    return readv
