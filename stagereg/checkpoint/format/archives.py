"""Finds the records in a zip archive that ``torch.save`` wrote, and builds a new archive of them for ``torch.load``.

So torch never parses the zip structure of an untrusted file. Records must be uncompressed and must not overlap, so
they cannot need more memory than the file has bytes.
"""

from __future__ import annotations

import bisect
import io
import itertools
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

_LOCAL, _ENTRY = b"PK\3\4", b"PK\1\2"
_LOCAL_FORM, _ENTRY_FORM = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")
_SHORT, _LONG = (1 << 16) - 1, (1 << 32) - 1  # in a 2- or 4-byte field: the value is in an 8-byte field
_BIG = 1  # type of the zip64 extra field, which has 8-byte numbers
_NAME = re.compile(r"[^/]+/([\w.+/-]+)", re.ASCII)


def records(data: bytes | bytearray | memoryview) -> dict[str, memoryview]:
    """Map record names, without the folder, to views of the records. Raises: ``ValueError`` for invalid archives."""
    view = memoryview(data).cast("B")
    try:
        with zipfile.ZipFile(_Parts([view])) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises many kinds of errors for invalid files
        raise ValueError("the data is not an archive of torch.save") from error
    if view[:4] != _LOCAL:
        raise ValueError("the data is not an archive of torch.save")
    found: dict[str, memoryview] = {}
    end = 0
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
            raise ValueError("the archive has compressed or encrypted records, which torch.save does not write")
        begin = entry.header_offset
        if not end <= begin <= len(view) - _LOCAL_FORM.size:
            raise ValueError("the records of the archive overlap, or are not in the order of the directory")
        begin += _LOCAL_FORM.size + sum(_LOCAL_FORM.unpack_from(view, begin)[-2:])
        end = begin + entry.file_size
        name = _NAME.fullmatch(entry.filename)
        if name is None or end > len(view):
            raise ValueError("the archive has a record that is truncated or has an invalid name")
        found[name[1]] = view[begin:end]
    if len({name.lower() for name in found}) < len(entries):  # torch ignores case in names
        raise ValueError("the archive has two records with the same name")
    return found


class _Parts(io.RawIOBase):
    """A read-only file that consists of several buffers, which are not copied."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = [memoryview(part).cast("B") for part in parts if len(part)]
        self._begins = [0, *itertools.accumulate(map(len, self._parts))]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._begins[-1])[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any, /) -> int:
        into = memoryview(memory).cast("B")
        count = 0
        while count < len(into) and self._at < self._begins[-1]:
            which = bisect.bisect_right(self._begins, self._at) - 1
            part = self._parts[which][self._at - self._begins[which] :][: len(into) - count]
            into[count : count + len(part)] = part
            count += len(part)
            self._at += len(part)
        return count


class Archive(_Parts):
    """An archive of records as a file object for ``torch.load``; the records are not copied."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        parts, directory, at = [], [], 0
        for name, content in found.items():
            encoded = f"archive/{name}".encode()
            rest = struct.pack("<2H3Q", _BIG, 24, len(content), len(content), at)
            common = (45, 0, 0, 0, 0, 0, _LONG, _LONG, len(encoded), len(rest))  # CRC-32 0: torch does not check it
            header = _LOCAL_FORM.pack(_LOCAL, *common) + encoded + rest
            directory.append(_ENTRY_FORM.pack(_ENTRY, 45, *common, 0, 0, 0, 0, _LONG) + encoded + rest)
            parts += [header, content]
            at += len(header) + len(content)
        entries = b"".join(directory)
        count, end = len(directory), at + len(entries)
        ends = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(entries), at)
        ends += _LOCATOR.pack(b"PK\6\7", 0, end, 1) + _END.pack(b"PK\5\6", 0, 0, _SHORT, _SHORT, _LONG, _LONG, 0)
        super().__init__([*parts, entries, ends])
