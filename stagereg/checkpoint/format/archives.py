"""The zip archives of ``torch.save``, read strictly, so that no two readers see different things in one.

What is accepted is what torch writes: records that are stored as they are, one after the other from the first byte on,
then their directory, then the end. Headers and directory say the same. torch is handed the records in an archive that
is made here.
"""

from __future__ import annotations

import bisect
import io
import itertools
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

_LOCAL, _ENTRY, _DESCRIPTOR = b"PK\3\4", b"PK\1\2", b"PK\7\x08"
_LOCAL_FORM, _ENTRY_FORM = struct.Struct("<4s5H3L2H"), struct.Struct("<4s6H3L5H2L")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")
_END_BYTES = _END64.size + _LOCATOR.size + _END.size
_SHORT, _LONG = (1 << 16) - 1, (1 << 32) - 1  # where a number has two or four bytes, they say that eight have it
_UTF8, _DESCRIBED = 1 << 11, 1 << 3  # flags: a descriptor with the sizes follows the content
_BIG, _PADDING = 1, 0x4246  # kinds of extra fields: numbers of eight bytes, and torch's padding
_NAME = re.compile(rb"[^/]+/([\w.+/-]+)", re.ASCII)


class _Entry(NamedTuple):
    """The entry of a record in the directory."""

    name: bytes
    flags: int
    when: tuple[int, int]
    crc32: int
    length: int
    offset: int
    sizes: tuple[int, int]  # as they are in four bytes each
    big: bytes  # the numbers that have eight bytes instead


def records(data: bytes | bytearray | memoryview) -> dict[str, memoryview]:
    """Return the records of an archive by their names in its folder, without a copy. Raises: ``ValueError``."""
    view = memoryview(data).cast("B")
    if view[:4] != _LOCAL:
        raise ValueError("it is no archive as torch writes them")
    try:
        entries, end = _directory(view)
        found: dict[str, memoryview] = {}
        at = 0
        for entry in entries:
            if entry.offset != at:
                raise ValueError("there is something between its records")
            begin = at + _header_length(view, entry)
            at = _described(view, entry, begin + entry.length)
            found[_name(entry, entries[0])] = view[begin : begin + entry.length]
    except struct.error:
        raise ValueError("it ends within a header") from None
    if at != end:
        raise ValueError("there is something between its records and its directory")
    if len({name.lower() for name in found}) < len(entries):  # torch does not tell cases apart
        raise ValueError("it has two records of one name")
    return found


def _directory(view: memoryview) -> tuple[list[_Entry], int]:
    """Return the entries of the directory, and its first byte's offset."""
    at = len(view) - _END_BYTES
    if at < 0:
        raise ValueError("it is too short")
    _, _, _, _, _, _, _, count, nbytes, begin = big = _END64.unpack_from(view, at)
    places = (0, 0, min(count, _SHORT), min(count, _SHORT), min(nbytes, _LONG), min(begin, _LONG), 0)
    expected = [
        (b"PK\6\6", 44, *big[2:4], 0, 0, count, count, nbytes, begin),
        (b"PK\6\7", 0, at, 1),
        (b"PK\5\6", *places),
    ]
    ends = [big, _LOCATOR.unpack_from(view, at + _END64.size), _END.unpack_from(view, len(view) - _END.size)]
    if ends != expected or begin + nbytes != at:
        raise ValueError("its end is not as torch writes it")
    entries, here = [], begin
    while here < at:
        entry, here = _entry(view, here)
        entries.append(entry)
    if here != at or len(entries) != count:
        raise ValueError("its directory has another length")
    return entries, begin


def _entry(view: memoryview, at: int) -> tuple[_Entry, int]:
    """Return an entry of the directory, and where it ends."""
    form = _ENTRY_FORM.unpack_from(view, at)
    flags, method, *when = form[3:7]
    crc32, packed, length, name, extra, comment, disk = form[7:14]
    offset = form[16]
    if method:
        raise ValueError("it has compressed records, which torch does not write")
    sizes, at = (packed, length), at + _ENTRY_FORM.size
    wide = [each == _LONG for each in (length, packed, offset)]
    big = bytes(view[at + name : at + name + extra])
    if any(wide):
        kind, size, *numbers = struct.unpack(f"<2H{sum(wide)}Q", big)
        if (kind, size) != (_BIG, 8 * sum(wide)):
            raise ValueError("its directory has an extra field that torch does not write")
        length, packed, offset = (
            numbers.pop(0) if is_wide else each for is_wide, each in zip(wide, (length, packed, offset), strict=True)
        )
    elif big:
        raise ValueError("its directory has an extra field that torch does not write")
    if form[0] != _ENTRY or packed != length or flags & ~(_UTF8 | _DESCRIBED) or comment or disk:
        raise ValueError("its directory has an entry that torch does not write")
    entry = _Entry(bytes(view[at : at + name]), flags, tuple(when), crc32, length, offset, sizes, big)
    return entry, at + name + extra


def _header_length(view: memoryview, entry: _Entry) -> int:
    """Return the length of what is before the content of a record, which says what the directory does."""
    form = _LOCAL_FORM.unpack_from(view, entry.offset)
    sizes = (0, 0, 0) if entry.flags & _DESCRIBED else (entry.crc32, *entry.sizes)
    expected = (_LOCAL, form[1], entry.flags, 0, *entry.when, *sizes, len(entry.name), form[10])
    begin = entry.offset + _LOCAL_FORM.size
    extra = bytes(view[begin + len(entry.name) : begin + len(entry.name) + form[10]])
    if form != expected or view[begin : begin + len(entry.name)] != entry.name or len(extra) != form[10]:
        raise ValueError("a record's own header differs from the directory")
    big = entry.big if len(entry.big) < 20 else entry.big[:12] + bytes(8) + entry.big[20:]  # nothing is packed yet
    padding = extra.removeprefix(big)
    if padding and struct.unpack_from("<2H", padding) != (_PADDING, len(padding) - 4):
        raise ValueError("a record's own header has an extra field that torch does not write")
    return _LOCAL_FORM.size + len(entry.name) + len(extra)


def _described(view: memoryview, entry: _Entry, at: int) -> int:
    """Return where a record ends of which the content ends at ``at``."""
    if not entry.flags & _DESCRIBED:
        return at
    form = struct.Struct("<4sL2Q" if entry.big else "<4s3L")
    if form.unpack_from(view, at) != (_DESCRIPTOR, entry.crc32, entry.length, entry.length):
        raise ValueError("a record's own end differs from the directory")
    return at + form.size


def _name(entry: _Entry, first: _Entry) -> str:
    found = _NAME.fullmatch(entry.name)
    if found is None or entry.name.partition(b"/")[0] != first.name.partition(b"/")[0]:
        raise ValueError("it has a record with a name that torch does not give")
    return found[1].decode()


class Archive(io.RawIOBase):
    """A file for ``torch.load``: an archive of records, which are not copied."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        parts, directory, at = [], [], 0
        for name, content in found.items():
            encoded = f"archive/{name}".encode()
            rest = struct.pack("<2H3Q", _BIG, 24, len(content), len(content), at)
            common = (45, 0, 0, 0, 0, 0, _LONG, _LONG, len(encoded), len(rest))  # a CRC-32 of 0: torch ignores it
            header = _LOCAL_FORM.pack(_LOCAL, *common) + encoded + rest
            directory.append(_ENTRY_FORM.pack(_ENTRY, 45, *common, 0, 0, 0, 0, _LONG) + encoded + rest)
            parts += [header, content]
            at += len(header) + len(content)
        entries = b"".join(directory)
        count, end = len(directory), at + len(entries)
        ends = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(entries), at)
        ends += _LOCATOR.pack(b"PK\6\7", 0, end, 1) + _END.pack(b"PK\5\6", 0, 0, _SHORT, _SHORT, _LONG, _LONG, 0)
        self._parts = [memoryview(part).cast("B") for part in (*parts, entries, ends) if len(part)]
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
