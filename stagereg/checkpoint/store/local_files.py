"""Access to files and directories in the file systems of this machine."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from stagereg.base.machine import is_on_network
from stagereg.base.small_files import open_regular
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import WHOLE, joined
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.store.backend import Sink, T
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.errors import ConfigError

FILE_URL = "file://"
PAGE = 4096  # bytes; a multiple of the logical block of nearly every disk
_O_DIRECT = os.O_DIRECT
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_THREADS = min(4, os.cpu_count() or 1)
_PIECE_BYTES = 1 << 23
_BLOCK_BYTES = 1 << 20


def local_path(path: str | os.PathLike[str]) -> Path:
    """Make a path or ``file://`` URL absolute. Raises ``ConfigError`` for another machine or an unknown ``~user``."""
    if isinstance(path, str) and path.startswith(FILE_URL) and not path.startswith(f"{FILE_URL}/"):
        raise ConfigError(f"{path} names another machine. Write a directory of this machine as file:///runs.")
    expanded = os.path.expanduser(os.fspath(path).removeprefix(FILE_URL))
    if expanded.startswith("~"):
        raise ConfigError(f"{path} begins with the home of an unknown user. For a file of that name, write ./{path}.")
    return Path(expanded).absolute()


def mark_file(path: str | os.PathLike[str], part: range = WHOLE) -> FileDigest:
    """Read a regular file, or a byte range of it, with up to four threads; return the digest."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        end = min(part.stop, os.fstat(file.fileno()).st_size)
        pieces = [range(at, min(at + _PIECE_BYTES, end)) for at in range(part.start, end, _PIECE_BYTES)]
        if len(pieces) < 2:
            return joined(_mark_piece(file.fileno(), piece) for piece in pieces)
        mark = partial(_mark_piece, file.fileno())
        with ThreadPoolExecutor(min(_THREADS, len(pieces))) as threads:
            try:
                marks = threads.map(mark, pieces)
            except RuntimeError:  # Python 3.12 cannot start threads during interpreter shutdown
                marks = map(mark, pieces)
            return joined(marks)


def _mark_piece(descriptor: int, piece: range) -> FileDigest:
    block = memoryview(bytearray(min(_BLOCK_BYTES, len(piece))))
    at, crc = piece.start, 0
    while at < piece.stop and (count := os.preadv(descriptor, [block[: piece.stop - at]], at)):
        at, crc = at + count, crc32(block[:count], crc)
    return FileDigest(at - piece.start, crc)


class DiskFile:
    """A :class:`.Sink` that writes a file at ``path``, by direct I/O if ``direct`` is set and supported.

    An existing regular file is overwritten; any other object at ``path`` is an error. ``mode`` is subject to the umask.
    """

    def __init__(self, path: str, direct: bool, mode: int = 0o666) -> None:
        self._path, self._at, self.refused = path, 0, False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = open_regular(path, flags | (_O_DIRECT if direct else 0), mode=mode)
        except OSError:
            self.refused = direct
            self._descriptor = open_regular(path, flags, mode=mode)

    def write(self, data: memoryview) -> None:
        while data:
            if len(data) < PAGE or self._at % PAGE:
                self._use_cache()  # direct I/O writes only whole pages
            try:
                written = os.pwrite(self._descriptor, data[: len(data) // PAGE * PAGE or None], self._at)
            except OSError as error:
                if error.errno not in _REFUSALS or not self._use_cache():
                    error.filename = self._path
                    raise
                self.refused = True
                continue
            if written == 0:
                raise OSError(errno.EIO, "Writing to the file returned 0 bytes", self._path)
            failpoint("writing")
            data = data[written:]
            self._at += written

    def end(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            error.filename = self._path
            raise

    def close(self, whole: bool) -> None:
        os.close(self._descriptor)

    def _use_cache(self) -> bool:
        """Switch from direct I/O to the page cache; return whether direct I/O was in use before."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
        return bool(flags & _O_DIRECT)


class LocalFiles:
    """Opens and creates files in file systems of this machine; see :class:`.Files`."""

    remote = False
    root: str

    @property
    def shared(self) -> bool:
        return is_on_network(Path(self.root))

    def attempt(self, doing: str, path: str, act: Callable[[], T]) -> T:
        return act()

    def in_time(self, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
        return act()

    def fetch(self, path: str, part: range) -> bytes:
        with self.open(path) as file:
            return os.pread(file.fileno(), len(part), part.start)

    def open(self, path: str) -> io.RawIOBase:
        return io.FileIO(path, opener=lambda path, _: open_regular(path))

    def make(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def create(self, path: str, direct: bool = False, mode: int = 0o666) -> Sink:
        return DiskFile(path, direct, mode)
