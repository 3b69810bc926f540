"""Files and directories of this machine: a path of a URL, marks, flushing, one name for another in one step."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from stagereg.base.small_files import open_regular, temporary, temporary_of
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, joined
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.errors import ConfigError

FILE_URL = "file://"
_THREADS = min(4, os.cpu_count() or 1)
_PIECE_BYTES = 1 << 23
_BLOCK_BYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a path or ``file://`` URL; ``~`` is the user's home. Raises: ``ConfigError``."""
    if isinstance(path, str) and path.startswith(FILE_URL) and not path.startswith(f"{FILE_URL}/"):
        raise ConfigError(f"{path} names another machine; a directory of this one has three slashes: file:///runs.")
    expanded = os.path.expanduser(os.fspath(path).removeprefix(FILE_URL))
    if expanded.startswith("~"):
        raise ConfigError(f"{path} begins with the home of a user who is not known here; ./{path} is a name.")
    return Path(expanded).absolute()


def mark_file(path: str | os.PathLike[str], part: range = WHOLE) -> FileDigest:
    """Read a regular file, or a part of it, once, on a few threads, and return size and checksum."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        end = min(part.stop, os.fstat(file.fileno()).st_size)
        pieces = [range(at, min(at + _PIECE_BYTES, end)) for at in range(part.start, end, _PIECE_BYTES)]
        if len(pieces) < 2:
            return joined(_mark_piece(file.fileno(), piece) for piece in pieces)
        mark = partial(_mark_piece, file.fileno())
        with ThreadPoolExecutor(min(_THREADS, len(pieces))) as threads:
            try:
                marks = threads.map(mark, pieces)
            except RuntimeError:  # while a process ends, Python 3.12 starts no thread any more
                marks = map(mark, pieces)
            return joined(marks)


def _mark_piece(descriptor: int, piece: range) -> FileDigest:
    block = memoryview(bytearray(min(_BLOCK_BYTES, len(piece))))
    at, crc = piece.start, 0
    while at < piece.stop and (count := os.preadv(descriptor, [block[: piece.stop - at]], at)):
        at, crc = at + count, crc32(block[:count], crc)
    return FileDigest(at - piece.start, crc)


def exchange(beside: Path, path: Path) -> Path:
    """Give ``beside`` the name ``path``; return the path of what had that name, a link itself. Deletes nothing.

    In one step, or in two if the file system has none: killed between them, it is at :func:`aside`.
    """
    if not os.path.lexists(path):
        os.rename(beside, path)
        return beside
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(beside), os.fsencode(path)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return beside
    old = Path(aside(path))
    os.rename(path, old)
    try:
        os.rename(beside, path)
    except OSError:
        os.rename(old, path)
        raise
    return old


def aside(path: Path) -> str:
    """Return a name ``.NAME.TOKEN.old`` in the folder of ``path`` that cannot be foreseen; makes nothing."""
    return f"{temporary(path).removesuffix('tmp')}old"


def aside_of(name: str) -> str | None:
    """Return of what a name is the one of :func:`aside`, without its folder; ``None`` if it is not ours."""
    return temporary_of(f"{name.removesuffix('old')}tmp") if name.endswith(".old") else None
