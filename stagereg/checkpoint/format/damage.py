"""What is wrong with a checkpoint: the files that a store has found, compared with the manifest. Touches no disk.

Sizes and kinds of files are known without reading them; reading finds any other content, down to a single bit.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stagereg.checkpoint.format.checksum import combined
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest, step_within

_SHOWN = 8  # files that a message names, of one checkpoint
# Errors of a file system for a file whose bytes it has lost, as against one that cannot be reached now.
_BROKEN = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ})


class InaccessibleFile(str):
    """Why nothing is known about a file: it is there or not, and good or not."""


Found: TypeAlias = FileDigest | int | str
"""What was found under a name: its mark; its size in bytes, where the content was not read; what is wrong with it."""


@dataclass(frozen=True)
class VerificationResult:
    """The condition of the directory of a checkpoint.

    Attributes:
        path: the directory, a path or a URL.
        manifest: its manifest; ``None`` if that cannot be read.
        damages: by the name of a file what is wrong with it, such as ``"truncated: 100 of 4096 bytes"``, or
            :class:`InaccessibleFile`; empty if the checkpoint is complete.
        writer: empty for a checkpoint of a ``Checkpointer``; else who wrote the directory, as
            :mod:`stagereg.checkpoint.store.foreign` has it.
    """

    path: str
    manifest: Manifest | None
    damages: Mapping[str, str] = field(default_factory=dict)
    writer: str = ""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def step(self) -> int | None:
        """The training step, by the name of the directory or else by the manifest."""
        named = step_within(self.name)
        return self.manifest.step if named is None and self.manifest is not None else named

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, if nothing is wrong with it."""
        return Checkpoint(self.path, self.manifest) if self.manifest is not None and not self.damages else None

    def lines(self) -> list[str]:
        """Return what is wrong, a line a file, for the first files."""
        every = [f"{name}: {what}" for name, what in self.damages.items()]
        return [*every[:_SHOWN], f"and {len(every) - _SHOWN} more files"] if len(every) > _SHOWN else every

    def __str__(self) -> str:
        """What is wrong, on one line."""
        return "; ".join(self.lines())


def differences(manifest: Manifest, found: Mapping[str, Found]) -> dict[str, str]:
    """Return what is wrong with the files of a manifest, by name; what is not in ``found`` is missing."""
    compared = {name: difference(mark, found.get(name, "missing")) for name, mark in manifest.files.items()}
    return {name: what for name, what in compared.items() if what}


def damage_of(error: OSError) -> str:
    """Return what an error on the way to a file means for the file."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    text = f"cannot be read ({error.strerror or error})"
    return text if error.errno in _BROKEN else InaccessibleFile(text)


def difference(expected: FileDigest, found: Found) -> str:
    """Return what is wrong with a file, as far as it was looked at; empty if nothing is."""
    if isinstance(found, str):
        return found
    size = found if isinstance(found, int) else found.bytes
    if size != expected.bytes:
        kind = "truncated" if size < expected.bytes else "too long"
        return f"{kind}: {size} of {expected.bytes} bytes"
    if isinstance(found, FileDigest) and found != expected:
        return f"flipped bits: its CRC-32 is {found.crc32:08x} and was {expected.crc32:08x}"
    return ""


# -- which bytes of its files each of several ranks reads, and the marks of parts put together

WHOLE = range(sys.maxsize)  # all bytes of a file, however many there are


def share_of_rank(files: Mapping[str, FileDigest], rank: int, size: int) -> dict[str, range]:
    """Return the bytes of each file that one of ``size`` ranks reads, the same number as each other rank.

    The rank with the last byte of a file reads to its end, however far away that is, so a longer file is noticed.
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


def joined(parts: Iterable[FileDigest]) -> FileDigest:
    """Return the mark of a file, or of a part of it, from those of all its parts in their order."""
    size = crc = 0
    for part in parts:
        crc, size = combined(crc, part.crc32, part.bytes), size + part.bytes
    return FileDigest(size, crc)


def marks_of_shares(shares: Sequence[Mapping[str, Found]]) -> dict[str, Found]:
    """Return what was found of each file, from what the ranks have found of their shares, in rank order."""
    found: dict[str, Found] = {}
    for name in sorted({name for each in shares for name in each}):
        parts = [each[name] for each in shares if name in each]
        other = [part for part in parts if not isinstance(part, FileDigest)]
        found[name] = other[0] if other else joined(part for part in parts if isinstance(part, FileDigest))
    return found
