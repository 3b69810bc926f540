"""Finds the corrupt files of a checkpoint by comparing its files with the manifest. Does no I/O.

Sizes and types are compared without reading the files. Checksums require a read, and detect even one changed bit.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from stagereg.checkpoint.format.checksum import combined
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest, step_within

_SHOWN = 8  # maximum files of a checkpoint in a message
# Error codes of a file whose content is lost; after any other error, a later read may succeed.
_BROKEN = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EILSEQ})


class InaccessibleFile(str):
    """The reason why a file could not be accessed. The file may be valid, corrupt or missing."""


Found: TypeAlias = FileDigest | int | str
"""The result of checking a file: its digest; its size in bytes, if it was not read; or a description of the error."""


@dataclass(frozen=True)
class VerificationResult:
    """The result of verifying the directory of a checkpoint.

    Attributes:
        path: the directory, a path or a URL.
        manifest: the manifest; ``None`` if it cannot be read.
        damages: the error of each corrupt file, by name, such as ``"truncated: 100 of 4096 bytes"``; an
            :class:`InaccessibleFile` if the file could not be accessed; empty if the checkpoint is valid.
        writer: the program that wrote the directory (:mod:`stagereg.checkpoint.store.foreign`); empty for a
            ``Checkpointer``.
    """

    path: str
    manifest: Manifest | None
    damages: Mapping[str, str] = field(default_factory=dict)
    writer: str = ""

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def step(self) -> int | None:
        """The training step in the name of the directory; if the name has none, the step in the manifest."""
        named = step_within(self.name)
        return self.manifest.step if named is None and self.manifest is not None else named

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint; ``None`` if it is not valid."""
        return Checkpoint(self.path, self.manifest) if self.manifest is not None and not self.damages else None

    def lines(self) -> list[str]:
        """Return one line for each of the first eight files with an error, and a line that counts the others."""
        every = [f"{name}: {what}" for name, what in self.damages.items()]
        return [*every[:_SHOWN], f"and {len(every) - _SHOWN} more files"] if len(every) > _SHOWN else every

    def __str__(self) -> str:
        """Return the errors on one line."""
        return "; ".join(self.lines())


def differences(manifest: Manifest, found: Mapping[str, Found]) -> dict[str, str]:
    """Return a description of each error, by file name. Files of the manifest that ``found`` lacks count as missing."""
    compared = {name: difference(mark, found.get(name, "missing")) for name, mark in manifest.files.items()}
    return {name: what for name, what in compared.items() if what}


def damage_of(error: OSError) -> str:
    """Describe the error of a file from the ``OSError`` that an access to the file has raised."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    text = f"cannot be read ({error.strerror or error})"
    return text if error.errno in _BROKEN else InaccessibleFile(text)


def difference(expected: FileDigest, found: Found) -> str:
    """Describe how a file differs from its expected digest. Return an empty string if no difference was found."""
    if isinstance(found, str):
        return found
    size = found if isinstance(found, int) else found.bytes
    if size != expected.bytes:
        return f"{'truncated' if size < expected.bytes else 'too long'}: {size} of {expected.bytes} bytes"
    if isinstance(found, FileDigest) and found != expected:
        return f"CRC-32 mismatch: expected {expected.crc32:08x}, got {found.crc32:08x}"
    return ""


# -- dividing the files among the ranks that read them, and merging the digests of the portions

WHOLE = range(sys.maxsize)  # all bytes of a file of any size


def share_of_rank(files: Mapping[str, FileDigest], rank: int, size: int) -> dict[str, range]:
    """Return the range of each file that ``rank`` reads, so that ``size`` ranks read equal numbers of bytes.

    The rank that reads the last expected byte of a file also reads all later bytes, to detect a file that is too long.
    """
    names = sorted(files)
    total = sum(files[name].bytes + 1 for name in names)  # one more per file, so that empty files count
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
    """Return the digest of a file from the digests of its consecutive portions."""
    size = crc = 0
    for part in parts:
        crc, size = combined(crc, part.crc32, part.bytes), size + part.bytes
    return FileDigest(size, crc)


def marks_of_shares(shares: Sequence[Mapping[str, Found]]) -> dict[str, Found]:
    """Merge the ranks' results for their portions of files into one result per file. ``shares`` is in rank order."""
    found: dict[str, Found] = {}
    for name in sorted({name for each in shares for name in each}):
        parts = [each[name] for each in shares if name in each]
        other = [part for part in parts if not isinstance(part, FileDigest)]
        found[name] = other[0] if other else joined(part for part in parts if isinstance(part, FileDigest))
    return found
