"""Parse and write sizes in bytes: ``ByteSize("4GiB")``.

A size is an ``int``; only its string has a unit. In a config, an option of this type is a string.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from stagereg.errors import ConfigError, nearest

_BINARY = {unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB"), 1)}
_DECIMAL = {unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB", "PB"), 1)}
_UNITS: Final = {"B": 1, **_BINARY, **_DECIMAL}
_FOLDED = {unit.lower(): size for unit, size in _UNITS.items()}
_TEXT = re.compile(r"\s*\+?(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(e[+-]?\d\d?)?\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_EXAMPLES = "Write a size as 4GiB, 512MB, 1.5KiB, 100B or a plain number of bytes."


class ByteSize(int):
    """A number of bytes, constructed from a string with a unit or from a number.

    ``ByteSize("4GiB") == 2**32``, ``ByteSize("1.5KB") == 1500``, ``ByteSize(512) == 512``. Units are B; KiB, MiB, GiB,
    TiB, PiB (powers of 1024); KB, MB, GB, TB, PB (powers of 1000); case-insensitive. ``str()`` returns the shortest
    string that parses to the same size: ``"4GiB"``. Sums and products are plain ``int``.

    Args:
        value: the string or the number. A fraction of a unit is rounded down to whole bytes.

    Raises:
        ConfigError: The value is not a size, is negative, or is a fraction of a byte. The message shows examples.
    """

    __slots__ = ()

    def __new__(cls, value: str | int | float = 0) -> ByteSize:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ConfigError(f"{value!r} is not a size in bytes. {_EXAMPLES}")
        if isinstance(value, int) and value >= 0:
            return super().__new__(cls, value)
        text = str(value)
        found = _TEXT.fullmatch(text.replace("_", ""))
        if found is None:
            raise ConfigError(f"{text!r} is not a size in bytes. {_EXAMPLES}")
        number, exponent, unit = found.groups()
        if unit and unit.lower() not in _FOLDED:
            raise ConfigError(f"{text!r} has no valid unit of bytes.{nearest(unit, _UNITS)} {_EXAMPLES}")
        size = Fraction(number + (exponent or "")) * _FOLDED[unit.lower() or "b"]
        if _FOLDED[unit.lower() or "b"] == 1 and size.denominator != 1:
            raise ConfigError(f"{text!r} is a fraction of a byte. {_EXAMPLES}")
        return super().__new__(cls, int(size))

    def __str__(self) -> str:
        fitting = [f"{self // size}{unit}" for unit, size in _UNITS.items() if self % size == 0 and self >= size]
        return min(fitting, key=len, default="0B")

    def __repr__(self) -> str:
        return f"ByteSize({str(self)!r})"
