"""Durations that are written as people write them: ``duration("1h30m")``, and back.

Read are ``30s``, ``1h30m``, ``2 days``, ``500ms``; ``00:05:00``, from the right seconds, minutes, hours, as YAML reads
it too; a number, of seconds; and what ``str()`` makes of a ``timedelta``.
"""

from __future__ import annotations

import datetime
import re
from fractions import Fraction

from stagereg.errors import ConfigError, nearest

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
    """Return the duration that ``text`` describes; see above."""
    try:
        return datetime.timedelta(microseconds=_microseconds(text.strip().lower(), text))
    except OverflowError:
        raise ConfigError(f"{text!r} is too long for a duration. {_DURATIONS}") from None


def seconds_of(text: str) -> float:
    """Return the seconds of the duration that ``text`` describes."""
    return duration(text).total_seconds()


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


def write_duration(value: datetime.timedelta) -> str:
    """Return the shortest text in units from days to seconds that :func:`duration` reads as the same."""
    left = abs(value) // datetime.timedelta(microseconds=1)
    pieces = []
    for unit in ("d", "h", "m"):
        count, left = divmod(left, _UNITS[unit])
        pieces.append(f"{count}{unit}" if count else "")
    if left or not any(pieces):
        pieces.append(f"{left // _SECOND}.{left % _SECOND:06}".rstrip("0").rstrip(".") + "s")
    return ("-" if value < datetime.timedelta(0) else "") + "".join(pieces)
