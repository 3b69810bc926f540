"""Compares the output of a command that a page of the documentation shows with what the command printed."""

from __future__ import annotations

import re

__all__ = ["fits"]


def fits(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what a page shows, line by line; ``...`` stands for anything, and so does each number."""
    lines = ["(?:.*\n)*" if line == "..." else f"{_pattern(line)}\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


def _pattern(line: str) -> str:
    number = r"\d+(?:[.,]\d+)*"
    parts = [re.escape(re.sub(number, "\0", part)) for part in line.split()]
    return r"\s*" + r"\s+".join(part.replace(re.escape("..."), ".*").replace("\0", number) for part in parts)
