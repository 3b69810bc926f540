"""What ``torch.load`` may be given: an archive of records that are stored as they are, and no larger than the file.

A tensor or object in a file of torch's is a zip archive. Torch's reader would inflate a compressed record, and makes
memory for a record of whatever size the archive's directory has; a few kilobytes could ask for all memory. What torch
writes is never compressed. So the directory is looked at first: all records are stored, and no larger than the archive.

Only what torch writes is taken: the directory right before its end records, no comment behind them. So this reader and
torch's (miniz) cannot find two different directories in one file. Format: PKWARE's APPNOTE, 4.3.12 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import io
import struct
from typing import IO, Any

from stagereg.errors import CheckpointError

__all__ = ["expect_stored"]

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_RECORD = struct.Struct("<4s6H3I5H2I")
_FIELD_64 = 1
_IN_FIELD_64 = 0xFFFFFFFF


def expect_stored(stream: IO[bytes] | Any) -> None:
    """Look at the directory of an archive; the stream, which can be sought in, is at its beginning afterwards.

    Raises:
        CheckpointError: it is none, or a record is compressed or larger than the file.
    """
    stream.seek(0, io.SEEK_END)
    size = stream.tell()  # seek returns, of torch's view of a part of a file, an offset in the file
    try:
        begin, end = _directory(stream, size)
        for stored, length in _records(_read(stream, begin, end)):
            if not stored:
                raise CheckpointError("it has compressed records, which torch does not write")
            if length > size:
                raise CheckpointError(f"it has {size} bytes, and a record in it claims to have {length}")
    except (struct.error, ValueError) as error:
        raise CheckpointError("it is no archive as torch writes them") from error
    stream.seek(0)


def _read(stream: Any, begin: int, end: int) -> bytes:
    if not 0 <= begin <= end:
        raise ValueError("out of the file")
    stream.seek(begin)
    data: bytes = stream.read(end - begin)
    return data


def _directory(stream: Any, size: int) -> tuple[int, int]:
    """Return where the directory begins and ends."""
    behind = size - _END.size
    begin_64 = behind - _LOCATOR.size - _END_64.size
    tail = _read(stream, max(0, begin_64), size)
    name, *_, length, begin, comment = _END.unpack(tail[-_END.size :])
    if name != b"PK\x05\x06" or comment:
        raise ValueError("no end record")
    if tail[-_END.size - _LOCATOR.size :].startswith(b"PK\x06\x07"):
        at = _LOCATOR.unpack(tail[_END_64.size : _END_64.size + _LOCATOR.size])[2]
        name, *_, length, begin = _END_64.unpack(tail[: _END_64.size])
        if name != b"PK\x06\x06" or at != begin_64:
            raise ValueError("no end record of 64 bits")
        behind = begin_64
    if begin + length != behind:
        raise ValueError("the directory is not before the end record")
    return begin, behind


def _records(directory: bytes) -> list[tuple[bool, int]]:
    """Return of each record whether it is stored as it is, and its bytes."""
    found = []
    at = 0
    while at < len(directory):
        name, _, _, _, method, _, _, _, packed, length, *lengths, _, _, _, _ = _RECORD.unpack_from(directory, at)
        if name != b"PK\x01\x02":
            raise ValueError("no record")
        named, extra, comment = lengths
        at += _RECORD.size + named
        if _IN_FIELD_64 in (packed, length):
            packed, length = _sizes_64(directory[at : at + extra], packed, length)
        found.append((method == 0 and packed == length, length))
        at += extra + comment
    return found


def _sizes_64(extra: bytes, packed: int, length: int) -> tuple[int, int]:
    at = 0
    while at < len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == _FIELD_64:
            numbers = iter(struct.unpack_from(f"<{size // 8}Q", extra, at))
            length = next(numbers, length) if length == _IN_FIELD_64 else length
            packed = next(numbers, packed) if packed == _IN_FIELD_64 else packed
            return packed, length
        at += size
    raise ValueError("no sizes")
