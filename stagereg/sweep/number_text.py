"""Numbers as people read them: few digits, but enough to tell numbers apart, and the units and nouns behind them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence

_FEWEST, _MOST = 3, 8  # digits of the numbers in a column
_LONG = 9  # digits before the point from which on a number has an exponent
_ROUNDING = 1e-6  # relative difference of numbers that may have the same text
_DIGITS = 12  # of a swept value; more are rounding, as in 0.30000000000000004
_FINEST = 6  # digits behind the point, at most


def counted(number: float, noun: str) -> str:
    """Return such as ``1 run`` and ``2,000 runs``."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def quantity(value: float, unit: str) -> str:
    """Return the number with its unit behind it."""
    return f"{shown(value)}{unit}" if unit == "%" else f"{shown(value)} {unit}".rstrip()


def percent(part: float) -> str:
    """Return a part of 1 in percent, in two digits: ``9 %``, ``0.4 %``, ``140 %``."""
    return f"{float(f'{100 * part:.2g}'):,.6g} %"


def shown(value: float) -> str:
    """A number in three digits, or all digits before the point: ``0.0123``, ``1.2``, ``12,346``, ``1e+09``.

    A number that is not whole has enough digits, up to six, to show that: ``0.9999``.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 9:
        return f"{value:.3g}"
    digits = max(0, 2 - magnitude)
    while 0 < digits < _FINEST and value % 1 and float(f"{value:.{digits}f}").is_integer():
        digits += 1
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def column_texts(values: Sequence[float]) -> list[str]:
    """Return the numbers of a column in three or four digits, and those that look equal but are not in more."""
    finite = sorted({value for value in values if math.isfinite(value)})
    whole = all(value == round(value) and _size(value) < _LONG for value in finite)
    digits = dict.fromkeys(finite, _LONG if whole else _FEWEST)
    for most in range(_FEWEST, _MOST):
        unclear = {value for value in finite if _grown(value, digits[value])}
        for one, other in itertools.pairwise(finite):
            same = _text(one, digits[one]) == _text(other, digits[other])
            unclear |= {one, other} if same and not math.isclose(one, other, rel_tol=_ROUNDING) else set()
        more = finite if unclear and most == _FEWEST else unclear
        digits |= {value: digits[value] + 1 for value in more}
    return [_text(value, digits.get(value, _FEWEST)) for value in values]


def _grown(value: float, digits: int) -> bool:
    """Whether rounding makes a number as large as the next power of ten: 0.9999 is not 1."""
    return _size(float(_text(value, digits).replace(",", ""))) > _size(value)


def _size(value: float) -> int:
    """The power of ten of the first digit."""
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _text(value: float, digits: int) -> str:
    if not math.isfinite(value) or not -4 <= _size(value) < _LONG:
        return f"{value:.{digits}g}"
    return f"{value + 0.0:,.{max(0, digits - 1 - _size(value)) if value and digits < _LONG else 0}f}"


def duration(seconds: float) -> str:
    """Return such as ``45 s``, ``1 min 10 s`` and ``2 h 5 min``."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    parts = (minutes // 60, "h"), (minutes % 60, "min"), (rest, "s")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def parameter_text(value: str) -> str:
    """Return the value of an override as people write it: ``0.3`` for ``0.30000000000000004``."""
    with contextlib.suppress(ValueError):
        text = f"{float(value):.{_DIGITS}g}"
        return text if "." in value and len(text) < len(value) > _DIGITS else value
    return value
