"""Comparing memory with memory, byte by byte, on a few threads.

``memcmp`` is exact and reads both sides once; ctypes releases the GIL meanwhile. A hash would read one side and be
wrong once in a while, and a wrong "equal" is a wrong checkpoint.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from stagereg.kernel.transfer import CopyEngine, CopyTask

__all__ = ["Pair", "differing", "same_elements"]

Pair = tuple[int, int, int, int]
"""Two runs of bytes in host memory: a label, the two addresses, bytes of each."""

_CHUNK_BYTES = 2**22
_WORTH_A_THREAD = 2**20

_memcmp = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


def differing(pairs: Sequence[Pair], engine: CopyEngine) -> set[int]:
    """Return the labels of the pairs that are not equal, compared on the threads of ``engine``.

    A label is looked at no further once it differs.
    """
    found: set[int] = set()
    chunks = iter(  # taking from a list's iterator is one step under the GIL
        [
            (label, one + at, other + at, min(_CHUNK_BYTES, nbytes - at))
            for label, one, other, nbytes in pairs
            for at in range(0, nbytes, _CHUNK_BYTES)
        ]
    )

    def compare(base: int) -> None:
        for label, one, other, nbytes in chunks:
            if label not in found and _memcmp(one, other, nbytes):
                found.add(label)

    is_much = sum(nbytes for _, _, _, nbytes in pairs) >= _WORTH_A_THREAD
    engine.run(CopyTask(0, [compare] * engine.threads), is_much).finish()
    return found


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
