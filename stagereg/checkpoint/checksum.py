"""The checksum of files: CRC-32 as in zip and gzip, by the fastest library that is installed.

``isal`` and ``zlib-ng`` compute the same number as ``zlib``, several times as fast. All three let other threads run
meanwhile. A manifest names the algorithm by its key: ``"crc32"``.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from mmap import mmap
from typing import Any, TypeAlias

__all__ = ["crc32"]

_FASTEST_FIRST = ("isal.isal_zlib", "zlib_ng.zlib_ng")

Data: TypeAlias = bytes | bytearray | memoryview | mmap


def crc32(data: Data, value: int = 0) -> int:
    """Return the CRC-32 of ``data``; of all so far, where ``value`` is that of the bytes before. Any thread."""
    return _crc32(data, value)


def _fastest() -> Callable[[Any, int], int]:
    for name in _FASTEST_FIRST:
        try:
            found: Callable[[Any, int], int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return found
    return zlib.crc32


_crc32 = _fastest()
