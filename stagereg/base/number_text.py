"""Numbers in texts of other programs and people."""

from __future__ import annotations


def decimal(text: str, most: int = 18) -> int | None:
    """Return the whole number that ``text`` is: at most ``most`` ASCII digits; ``None`` if it is anything else.

    ``int`` takes more: signs, blanks, ``1_0``, digits of other scripts; and it raises for some thousand digits.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None
