"""Types that a config holds as text and a component gets as objects: dtypes, devices, durations, sizes.

A :class:`Text` knows one such type: how its text is read and how an object of it is written, so that reading what was
written gives an equal object. Torch's types are known where torch has been imported, which a component with one in its
signature has done: nothing is imported here.

====================== =================================================================================================
``torch.dtype``        ``bfloat16``, ``torch.bfloat16``, and torch's other names for the same (``half``, ``long``)
``torch.device``       ``cpu``, ``cuda``, ``cuda:0``
``datetime.timedelta`` ``30s``, ``1h30m``, ``2 days``, ``500ms``; ``00:05:00``, from the right seconds, minutes, hours,
                       as YAML reads it too; or a number, of seconds. What ``str()`` makes of one is read as well.
``stagereg.ByteSize``  ``4GiB``, ``512MB``; or a number, of bytes
====================== =================================================================================================
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from stagereg.errors import ConfigError, nearest
from stagereg.sizes import ByteSize

__all__ = ["Text", "duration", "text_of", "written"]


@dataclass(frozen=True)
class Text:
    """One type that a config holds as text.

    Attributes:
        type: what the component gets.
        read: makes the object from text; raises a ``ConfigError`` that says what is wrong and what would be right.
        write: makes the text that :attr:`read` takes for an equal object.
    """

    type: type
    read: Callable[[str], Any]
    write: Callable[[Any], str]


def text_of(hint: Any) -> Text | None:
    """Return how the type ``hint`` is read and written, or ``None`` where it is no type of this sort."""
    if hint is ByteSize:
        return Text(ByteSize, ByteSize, str)
    if hint is datetime.timedelta:
        return Text(datetime.timedelta, duration, _duration_text)
    torch: Any = sys.modules.get("torch")
    dtype, device = getattr(torch, "dtype", None), getattr(torch, "device", None)
    if dtype is not None and hint is dtype:
        return Text(dtype, _dtype, lambda value: str(value).removeprefix("torch."))
    return Text(device, _device, str) if device is not None and hint is device else None


def written(value: Any) -> Any:
    """Return ``value`` as a config holds it: the text of an object of these types, everything else as it is."""
    text = text_of(type(value))
    return value if text is None else text.write(value)


_SECOND = 1_000_000  # durations are counted in microseconds, exactly, as timedelta does
_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": _SECOND,
    "m": 60 * _SECOND,
    "h": 3_600 * _SECOND,
    "d": 86_400 * _SECOND,
    "w": 604_800 * _SECOND,
}
_UNIT_NAMES = {
    **{name: name for name in _UNITS},
    **dict.fromkeys(("µs", "μs", "microsecond", "microseconds"), "us"),
    **dict.fromkeys(("millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("week", "weeks"), "w"),
}
_NUMBER = r"(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
_SECONDS = re.compile(rf"([+-]?{_NUMBER}(?:e[+-]?\d\d?)?)", re.IGNORECASE | re.ASCII)
_CLOCK = re.compile(r"(?:([+-]?\d{1,20}) days?, *)?([+-]?)(?:(\d{1,20}):)?(\d{1,20}):(\d\d?(?:\.\d{1,20})?)", re.ASCII)
_PIECE = re.compile(rf"({_NUMBER}) *([^\W\d_]+)[ ,]*")
_PIECES = re.compile(rf"([+-]?) *((?:{_PIECE.pattern})+)")
_DURATIONS = "Write a duration as 30s, 1h30m, 2 days, 500ms, 00:05:00 or a number of seconds."


def duration(text: str) -> datetime.timedelta:
    """Return the duration that ``text`` tells; see the table above.

    Raises:
        ConfigError: it tells none, or one that ``timedelta`` cannot hold; the message has examples.
    """
    try:
        return datetime.timedelta(microseconds=_microseconds(text.strip().lower(), text))
    except OverflowError:
        raise ConfigError(f"{text!r} is too long for a duration. {_DURATIONS}") from None


def _microseconds(plain: str, text: str) -> int:
    if found := _SECONDS.fullmatch(plain):
        return round(Fraction(found[1]) * _SECOND)
    if found := _CLOCK.fullmatch(plain):
        days, sign, hours, minutes, seconds = found.groups()
        clock = int(hours or 0) * _UNITS["h"] + int(minutes) * _UNITS["m"] + round(Fraction(seconds) * _SECOND)
        return int(days or 0) * _UNITS["d"] + (-clock if sign == "-" else clock)
    pieces = _PIECES.fullmatch(plain)
    if pieces is None:
        raise ConfigError(f"{text!r} is not a duration. {_DURATIONS}")
    total = Fraction(0)
    for number, unit in _PIECE.findall(pieces[2]):
        if unit not in _UNIT_NAMES:
            near = nearest(unit, [*_UNIT_NAMES, *_UNITS])
            raise ConfigError(f"{text!r} has no unit of time after {number}.{near} {_DURATIONS}")
        total += Fraction(number) * _UNITS[_UNIT_NAMES[unit]]
    return round(-total if pieces[1] == "-" else total)


def _duration_text(value: datetime.timedelta) -> str:
    left = abs(value) // datetime.timedelta(microseconds=1)
    pieces = []
    for unit in ("d", "h", "m"):
        count, left = divmod(left, _UNITS[unit])
        pieces.append(f"{count}{unit}" if count else "")
    if left or not any(pieces):
        pieces.append(f"{left // _SECOND}.{left % _SECOND:06}".rstrip("0").rstrip(".") + "s")
    return ("-" if value < datetime.timedelta(0) else "") + "".join(pieces)


def _dtype(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    name = text.strip().removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        dtypes = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
        common = [d for d in sorted(dtypes) if re.fullmatch(r"b?float\d+|u?int(8|16|32|64)|bool|complex\d+", d)]
        raise ConfigError(
            f"{text!r} is not a dtype.{nearest(name, common) or nearest(name, sorted(dtypes))} "
            f"It is one of: {', '.join(common)} and torch's other dtypes."
        )
    return found


def _device(text: str) -> Any:
    torch: Any = sys.modules["torch"]
    try:
        return torch.device(text.strip())
    except (RuntimeError, ValueError) as error:
        kind = text.strip().partition(":")[0]
        types = ["cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "meta"]
        near = "" if kind in types else nearest(kind, types)
        raise ConfigError(f"{text!r} is not a device.{near} Write it as cpu, cuda or cuda:0.") from error
