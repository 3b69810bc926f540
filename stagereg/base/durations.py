"""Parse and write durations: ``duration("1h30m")``.

Valid strings are ``30s``, ``1h30m``, ``2 days``, ``500ms``, and a number of seconds.
"""

from __future__ import annotations

import datetime
import re
from fractions import Fraction

from stagereg.errors import ConfigError, nearest

_SECOND = 1_000_000  # microseconds, the resolution of timedelta
_UNITS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1_000),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), _SECOND),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60 * _SECOND),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600 * _SECOND),
    **dict.fromkeys(("d", "day", "days"), 86_400 * _SECOND),
    **dict.fromkeys(("w", "week", "weeks"), 604_800 * _SECOND),
}
_NUMBER = r"(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
_SECONDS = re.compile(rf"([+-]?{_NUMBER}(?:e[+-]?\d\d?)?)", re.IGNORECASE | re.ASCII)
_PIECE = re.compile(rf"({_NUMBER}) *([^\W\d_]+)[ ,]*")
_PIECES = re.compile(rf"([+-]?) *((?:{_PIECE.pattern})+)")
_DURATIONS = "Write a duration as 30s, 1h30m, 2 days, 500ms or a number of seconds."


def duration(text: str) -> datetime.timedelta:
    """Return the duration that ``text`` describes."""
    try:
        found = datetime.timedelta(microseconds=_microseconds(text.strip().lower(), text))
    except OverflowError:
        raise ConfigError(f"{text!r} is too long for a duration. {_DURATIONS}") from None
    if found < datetime.timedelta(0):
        raise ConfigError(f"{text!r} is negative. {_DURATIONS}")
    return found


def seconds_of(text: str) -> float:
    """Return the seconds of the duration that ``text`` describes."""
    return duration(text).total_seconds()


def _microseconds(plain: str, text: str) -> int:
    if found := _SECONDS.fullmatch(plain):
        return round(Fraction(found[1]) * _SECOND)
    pieces = _PIECES.fullmatch(plain)
    if pieces is None:
        raise ConfigError(f"{text!r} is not a duration. {_DURATIONS}")
    total = Fraction(0)
    for number, unit in _PIECE.findall(pieces[2]):
        if unit not in _UNITS:
            near = nearest(unit, (each for each in _UNITS if each[0] == unit[0]))
            raise ConfigError(f"{text!r} has no valid unit of time after {number}.{near} {_DURATIONS}")
        total += Fraction(number) * _UNITS[unit]
    return round(-total if pieces[1] == "-" else total)


def write_duration(value: datetime.timedelta) -> str:
    """Return the shortest string, in units from days to seconds, that :func:`duration` parses to ``value``."""
    left = abs(value) // datetime.timedelta(microseconds=1)
    pieces = []
    for unit in ("d", "h", "m"):
        count, left = divmod(left, _UNITS[unit])
        pieces.append(f"{count}{unit}" if count else "")
    if left or not any(pieces):
        pieces.append(f"{left // _SECOND}.{left % _SECOND:06}".rstrip("0").rstrip(".") + "s")
    return ("-" if value < datetime.timedelta(0) else "") + "".join(pieces)
