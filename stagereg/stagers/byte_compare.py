"""Comparing memory with memory, byte by byte, on a few threads.

``memcmp`` is exact and reads both sides once; ctypes lets go of the GIL meanwhile. A hash would read one side and be
wrong once in a while, and a wrong "equal" is a wrong checkpoint.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from stagereg.kernel.transfer import COPY_THREADS

__all__ = ["Comparer", "Pair", "same_elements"]

_CHUNK_BYTES = 2**22
_WORTH_A_THREAD = 2**20

_memcmp = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of bytes in host memory.

    Attributes:
        label: what they belong to.
        one, other: addresses.
        nbytes: bytes of each.
    """

    label: int
    one: int
    other: int
    nbytes: int


class Comparer:
    """Threads that compare. One thread at a time may call it.

    Args:
        threads: threads that compare, the caller's among them.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._workers: ThreadPoolExecutor | None = None

    def differing(self, pairs: Sequence[Pair]) -> set[int]:
        """Return the labels of the pairs that are not equal. A label is looked at no further once it differs."""
        found: set[int] = set()
        total = sum(pair.nbytes for pair in pairs)
        if self._threads == 1 or total < _WORTH_A_THREAD:
            _compare(iter(pairs), found)
            return found
        chunks = [chunk for pair in pairs for chunk in _cut(pair)]
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self._threads - 1, thread_name_prefix=COPY_THREADS)
        todo = iter(chunks)  # a list's iterator: taking from it is one step under the GIL
        pending = [self._workers.submit(_compare, todo, found) for _ in range(self._threads - 1)]
        _compare(todo, found)
        for each in pending:
            each.result()
        return found

    def close(self) -> None:
        """End the threads. Closing twice is harmless."""
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None


def same_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bits, wherever they lie and however they are strided."""
    for dim, n in enumerate(x.shape):
        if n > 1 and x.stride(dim) == y.stride(dim) == 0:  # expanded: all of them are the first
            x, y = x.narrow(dim, 0, 1), y.narrow(dim, 0, 1)
    return torch.equal(_bytes_of(x), _bytes_of(y))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    # Not contiguous(): a single element may be contiguous whatever its strides, and then keeps them.
    flat = torch.empty(x.numel(), dtype=x.dtype)
    flat.view(x.shape).copy_(x)
    return flat.view(torch.uint8)


def _compare(todo: Iterator[Pair], found: set[int]) -> None:
    for pair in todo:
        if pair.label not in found and _memcmp(pair.one, pair.other, pair.nbytes):
            found.add(pair.label)


def _cut(pair: Pair) -> Iterator[Pair]:
    for at in range(0, pair.nbytes, _CHUNK_BYTES):
        yield Pair(pair.label, pair.one + at, pair.other + at, min(_CHUNK_BYTES, pair.nbytes - at))
