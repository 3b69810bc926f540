"""What a page of the documentation tells of a command, held against what the command printed."""

from __future__ import annotations

import re

__all__ = ["fits"]


def fits(told: str, printed: str) -> bool:
    """Whether what a page tells is what was printed: line by line; ``...`` is anything, and so is each number."""
    lines = ["(?:.*\n)*" if line == "..." else f"{_pattern(line)}\n" for line in told.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def _pattern(line: str) -> str:
    number = r"\d+(?:[.,]\d+)*"
    words = [re.escape(re.sub(number, "\0", word)) for word in line.split()]
    return r"\s*" + r"\s+".join(word.replace(re.escape("..."), ".*").replace("\0", number) for word in words)
