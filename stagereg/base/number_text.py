"""Parse numbers in untrusted text."""

from __future__ import annotations


def decimal(text: str, most: int = 18) -> int | None:
    """Return the whole number in ``text``, which has 1 to ``most`` ASCII digits; ``None`` for any other text.

    ``int`` accepts more: signs, blanks, ``1_0`` and digits of other scripts; it raises for thousands of digits.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None
