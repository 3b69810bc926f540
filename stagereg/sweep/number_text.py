"""Formats numbers for display, with units or nouns, and with just enough digits to distinguish values."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence

_FEWEST, _MOST = 3, 8  # minimum and maximum number of digits for the numbers of a column
_LONG = 9  # numbers with more digits before the point than this are shown with an exponent
_ROUNDING = 1e-6  # numbers that differ relatively by less than this may look equal
_DIGITS = 12  # maximum digits of a swept value, because further digits are rounding errors: 0.30000000000000004
_FINEST = 6  # maximum number of digits after the point


def counted(number: float, noun: str) -> str:
    """Format a count: ``1 run``, ``2,000 runs``."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def quantity(value: float, unit: str) -> str:
    """Format a number with its unit."""
    return f"{shown(value)}{unit}" if unit == "%" else f"{shown(value)} {unit}".rstrip()


def percent(part: float) -> str:
    """Format a fraction as a percentage with two digits: ``9 %``, ``0.4 %``, ``140 %``."""
    return f"{float(f'{100 * part:.2g}'):,.6g} %"


def shown(value: float) -> str:
    """Format a number with three digits, or with all digits before the point: ``0.0123``, ``12,346``, ``1e+09``.

    If rounding would make a number look like an integer, it gets up to six digits after the point: ``0.9999``.
    """
    if not math.isfinite(value) or not -4 <= _size(value) < _LONG:
        return f"{value:.3g}"
    digits = max(0, 2 - _size(value))
    while 0 < digits < _FINEST and value % 1 and float(f"{value:.{digits}f}").is_integer():
        digits += 1
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def column_texts(values: Sequence[float]) -> list[str]:
    """Format the numbers of a column with three or four digits, and with more digits if they would look equal."""
    finite = sorted({value for value in values if math.isfinite(value)})
    whole = all(value == round(value) and _size(value) < _LONG for value in finite)
    digits = dict.fromkeys(finite, _LONG if whole else _FEWEST)
    for most in range(_FEWEST, _MOST):
        # Rounding may increase the power of ten of the first digit, for example from 0.9999 to 1.
        rounded = {value: float(_text(value, digits[value]).replace(",", "")) for value in finite}
        unclear = {value for value in finite if _size(rounded[value]) > _size(value)}
        for one, other in itertools.pairwise(finite):
            same = _text(one, digits[one]) == _text(other, digits[other])
            unclear |= {one, other} if same and not math.isclose(one, other, rel_tol=_ROUNDING) else set()
        more = finite if unclear and most == _FEWEST else unclear
        digits |= {value: digits[value] + 1 for value in more}
    return [_text(value, digits.get(value, _FEWEST)) for value in values]


def _size(value: float) -> int:
    """Return the power of ten of the first digit, for example 2 for 123."""
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _text(value: float, digits: int) -> str:
    if not math.isfinite(value) or not -4 <= _size(value) < _LONG:
        return f"{value:.{digits}g}"
    return f"{value + 0.0:,.{max(0, digits - 1 - _size(value)) if value and digits < _LONG else 0}f}"


def duration(seconds: float) -> str:
    """Format a duration: ``45 s``, ``1 min 10 s``, ``2 h 5 min``."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    parts = (minutes // 60, "h"), (minutes % 60, "min"), (rest, "s")
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def parameter_text(value: str) -> str:
    """Format the value of an override without rounding errors: ``0.3`` for ``0.30000000000000004``."""
    with contextlib.suppress(ValueError):
        text = f"{float(value):.{_DIGITS}g}"
        return text if "." in value and len(text) < len(value) > _DIGITS else value
    return value
