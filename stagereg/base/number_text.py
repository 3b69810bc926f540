"""Parse numbers in untrusted strings."""

from __future__ import annotations


def decimal(text: str, most: int = 18) -> int | None:
    """Return ``text`` as a number if it consists of 1 to ``most`` ASCII digits; ``None`` for any other string.

    ``int(text)`` would also accept signs, blanks, ``1_0`` and digits of other scripts, and raise for very long strings.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None
