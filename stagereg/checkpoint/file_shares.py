"""Which bytes of a checkpoint's files each of several ranks reads, and the marks of parts put together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from stagereg.checkpoint.checksum import combined
from stagereg.checkpoint.damage import Found
from stagereg.checkpoint.manifest import FileMark

WHOLE = range(sys.maxsize)
"""All bytes of a file, however many there are."""


def share(files: Mapping[str, FileMark], rank: int, size: int) -> dict[str, range]:
    """Return which bytes of which files one of ``size`` ranks reads, as many as each other rank; in order of names.

    A part with the last byte of a file goes to its end, however far away that is, so a longer file is noticed.
    """
    names = sorted(files)
    total = sum(files[name].bytes + 1 for name in names)  # the end of each file counts, or else nobody had empty ones
    begin, end = total * rank // size, total * (rank + 1) // size
    found: dict[str, range] = {}
    base = 0
    for name in names:
        length = files[name].bytes + 1
        low, high = max(begin - base, 0), min(end - base, length)
        if low < high:
            found[name] = range(low, WHOLE.stop if high == length else high)
        base += length
    return found


def joined(parts: Iterable[FileMark]) -> FileMark:
    """Return the mark of a file, or of a part of it, from those of all its parts in their order."""
    size = crc = 0
    for part in parts:
        crc, size = combined(crc, part.crc32, part.bytes), size + part.bytes
    return FileMark(size, crc)


def marks_of_shares(shares: Sequence[Mapping[str, Found]]) -> dict[str, Found]:
    """Return what was found of each file, from what the ranks have found of their shares, in rank order."""
    found: dict[str, Found] = {}
    for name in sorted({name for each in shares for name in each}):
        parts = [each[name] for each in shares if name in each]
        other = [part for part in parts if not isinstance(part, FileMark)]
        found[name] = other[0] if other else joined(part for part in parts if isinstance(part, FileMark))
    return found
