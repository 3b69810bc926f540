"""CRC-32 of files, as in zip and gzip, computed by the fastest installed library: ``isal``, ``zlib-ng`` or ``zlib``.

All three release the GIL. In a manifest the key ``"crc32"`` names the algorithm.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable

_POLYNOMIAL = 0xEDB88320  # the highest bit is the coefficient of x**0
_ONE = 1 << 31
_EIGHTH_POWER = 1 << 23  # x**8, the factor that appends one zero byte


def _fastest() -> Callable[..., int]:
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            found: Callable[..., int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return found
    return zlib.crc32


crc32 = _fastest()  # crc32(data, crc=0); ``crc`` is the CRC-32 of the bytes before ``data``. Thread-safe.


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte strings from their CRC-32s. ``length``: the size of the second string.

    A CRC is a remainder modulo a polynomial over GF(2); each appended byte multiplies it by ``x**8``.
    """
    return _product(first, _power(length)) ^ second


@functools.lru_cache(256)  # most calls have the same length
def _power(length: int) -> int:
    """Return the polynomial whose product with a CRC appends ``length`` zero bytes."""
    found, power = _ONE, _EIGHTH_POWER
    while length:
        if length & 1:
            found = _product(found, power)
        power, length = _product(power, power), length >> 1
    return found


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo the polynomial of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
