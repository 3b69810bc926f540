"""The corrupt files of a checkpoint: the files that a store has found, compared with the manifest. Touches no disk.

Sizes and kinds of files are known without reading them; reading finds every changed byte, down to a single bit.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stagereg.checkpoint.format.checksum import combined
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest, step_within

_SHOWN = 8  # files of one checkpoint that a message names
# Errors of a file system that has lost the bytes of a file; other errors mean that it cannot be accessed now.
_BROKEN = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ})


class InaccessibleFile(str):
    """The reason why a file could not be accessed: the file may exist or not, and be valid or not."""


Found: TypeAlias = FileDigest | int | str
"""The result for a file: its digest; its size in bytes, if the content was not read; or a description of the error."""


@dataclass(frozen=True)
class VerificationResult:
    """The condition of the directory of a checkpoint.

    Attributes:
        path: the directory, a path or a URL.
        manifest: its manifest; ``None`` if the manifest cannot be read.
        damages: the error of each file, by name, such as ``"truncated: 100 of 4096 bytes"``, or
            :class:`InaccessibleFile`; empty if the checkpoint is complete.
        writer: empty for a checkpoint of a ``Checkpointer``; otherwise the program that wrote the directory, as in
            :mod:`stagereg.checkpoint.store.foreign`.
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
        """The training step, by the name of the directory or otherwise by the manifest."""
        named = step_within(self.name)
        return self.manifest.step if named is None and self.manifest is not None else named

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, if it is valid."""
        return Checkpoint(self.path, self.manifest) if self.manifest is not None and not self.damages else None

    def lines(self) -> list[str]:
        """Return the errors, one line per file, for the first files."""
        every = [f"{name}: {what}" for name, what in self.damages.items()]
        return [*every[:_SHOWN], f"and {len(every) - _SHOWN} more files"] if len(every) > _SHOWN else every

    def __str__(self) -> str:
        """The errors on one line."""
        return "; ".join(self.lines())


def differences(manifest: Manifest, found: Mapping[str, Found]) -> dict[str, str]:
    """Return the errors of the files of a manifest, by name; a file that is not in ``found`` is missing."""
    compared = {name: difference(mark, found.get(name, "missing")) for name, mark in manifest.files.items()}
    return {name: what for name, what in compared.items() if what}


def damage_of(error: OSError) -> str:
    """Return the error of a file for an ``OSError`` that was raised on access."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    text = f"cannot be read ({error.strerror or error})"
    return text if error.errno in _BROKEN else InaccessibleFile(text)


def difference(expected: FileDigest, found: Found) -> str:
    """Return the error of a file, as far as the file was checked; empty if there is no error."""
    if isinstance(found, str):
        return found
    size = found if isinstance(found, int) else found.bytes
    if size != expected.bytes:
        kind = "truncated" if size < expected.bytes else "too long"
        return f"{kind}: {size} of {expected.bytes} bytes"
    if isinstance(found, FileDigest) and found != expected:
        return f"CRC-32 mismatch: expected {expected.crc32:08x}, got {found.crc32:08x}"
    return ""


# -- which bytes of its files each of several ranks reads, and how the digests of the portions are merged

WHOLE = range(sys.maxsize)  # all bytes of a file of any size


def share_of_rank(files: Mapping[str, FileDigest], rank: int, size: int) -> dict[str, range]:
    """Return the bytes of each file that one of ``size`` ranks reads; all ranks read equally many bytes.

    The rank with the last byte of a file reads to the end of the file, so a file that is too long is detected.
    """
    names = sorted(files)
    total = sum(files[name].bytes + 1 for name in names)  # counts the end of each file, so that empty files count
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
    """Return the digest of a file, or of a range of it, from the digests of its portions in order."""
    size = crc = 0
    for part in parts:
        crc, size = combined(crc, part.crc32, part.bytes), size + part.bytes
    return FileDigest(size, crc)


def marks_of_shares(shares: Sequence[Mapping[str, Found]]) -> dict[str, Found]:
    """Return the result for each file, from the results of the ranks for their portions, in rank order."""
    found: dict[str, Found] = {}
    for name in sorted({name for each in shares for name in each}):
        parts = [each[name] for each in shares if name in each]
        other = [part for part in parts if not isinstance(part, FileDigest)]
        found[name] = other[0] if other else joined(part for part in parts if isinstance(part, FileDigest))
    return found
