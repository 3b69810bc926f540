"""The checksum of files: CRC-32 as in zip and gzip, by the fastest library that is installed (``isal``, ``zlib-ng``).

All libraries release the GIL. A manifest names the algorithm by its key: ``"crc32"``.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable

_POLYNOMIAL = 0xEDB88320  # the highest bit is the coefficient of x**0
_ONE = 1 << 31
_EIGHTH_POWER = 1 << 23  # x**8, the factor of one zero byte


def _fastest() -> Callable[..., int]:
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            found: Callable[..., int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return found
    return zlib.crc32


crc32 = _fastest()  # CRC-32 of bytes; with a second argument, the CRC-32 so far, of all bytes. Any thread.


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of bytes from the CRC-32 of their first part and of the rest, which has ``length`` bytes.

    A CRC is a remainder modulo a polynomial over GF(2); the following bytes multiply the first remainder.
    """
    return _product(first, _power(length)) ^ second


@functools.lru_cache(256)  # most parts have the same length
def _power(length: int) -> int:
    """Return the factor of ``length`` zero bytes."""
    found, power = _ONE, _EIGHTH_POWER
    while length:
        if length & 1:
            found = _product(found, power)
        power, length = _product(power, power), length >> 1
    return found


def _product(a: int, b: int) -> int:
    """Multiply two polynomials."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
