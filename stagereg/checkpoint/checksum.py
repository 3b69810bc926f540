"""The checksum of files: CRC-32 as in zip and gzip, by the fastest library that is installed.

``isal`` and ``zlib-ng`` compute the same number as ``zlib``, several times as fast. All three let other threads run
meanwhile. A manifest names the algorithm by its key: ``"crc32"``.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable

__all__ = ["crc32"]


def _fastest() -> Callable[..., int]:
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            found: Callable[..., int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return found
    return zlib.crc32


crc32 = _fastest()
"""CRC-32 of bytes; given the number of the bytes before as well, that of all so far. Any thread."""
