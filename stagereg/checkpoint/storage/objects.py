"""Files in an object store, marked on their way: what :class:`.MarkedFiles` is for a local directory.

Writers get uploads: in parts of the size that fsspec has for that store, so that no more than a part lies in memory,
and given up where the writing fails, since an upload that is merely closed would leave half a file under its name. A
store has no rename; what torch writes under a temporary name waits in memory until it has its last one.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.store.object_store import ObjectStore

__all__ = ["MarkedObjects", "Upload"]

StrPath = str | os.PathLike[str]

_TEMPORARY = ".tmp"
_PIECE_BYTES = 1 << 22


class MarkedObjects(FileSystemBase):
    """The file system of URLs, with a mark of each object that was written through it. Can be pickled.

    Attributes:
        marks: by the last part of the name; what is not closed yet, or was not written to its end, has none.
    """

    def __init__(self) -> None:
        self.marks: dict[str, FileMark] = {}
        self._objects: ObjectStore | None = None
        self._waiting: dict[str, bytes] = {}

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Generator[Any, None, None]:
        """Open an object; one that is not opened with ``"rb"`` is stored, and has its mark, after the block."""
        url = os.fspath(path)
        if mode == "rb":
            with self._store(url).open(url) as stream:
                yield stream
        elif url.endswith(_TEMPORARY):
            with io.BytesIO() as kept:
                yield kept
                self._waiting[url] = kept.getvalue()
        else:
            self.marks.pop(_name(url), None)
            with Upload(self._store(url), url) as upload:
                yield upload
                self.marks[_name(url)] = upload.finish()

    def concat_path(self, path: StrPath, suffix: str) -> str:
        """Return the URL of something below ``path``."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: StrPath) -> str:
        """Return a URL as it is."""
        return os.fspath(path)

    def mkdir(self, path: StrPath) -> None:
        """Make a directory, where the store has any."""
        self._store(os.fspath(path)).make_directory(os.fspath(path))

    def rename(self, path: StrPath, new_path: StrPath) -> None:
        """Store what was waiting for its name."""
        url = os.fspath(new_path)
        data = self._waiting.pop(os.fspath(path))
        self._store(url).put(url, data)
        self.marks[_name(url)] = FileMark(len(data), crc32(data))
        failpoint("flushed")

    def exists(self, path: StrPath) -> bool:
        """Whether there is an object of that name."""
        return self._store(os.fspath(path)).exists(os.fspath(path))

    def rm_file(self, path: StrPath) -> None:
        """Delete one object."""
        self._store(os.fspath(path)).delete(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether it is a URL."""
        return "://" in os.fspath(checkpoint_id)

    def _store(self, url: str) -> ObjectStore:
        if self._objects is None or self._objects.protocol != url.partition("://")[0]:
            self._objects = ObjectStore(url)
        return self._objects


class Upload:
    """A new object at ``url``, written from its beginning to its end.

    As a context manager it leaves nothing of what is not finished, if the store can be reached, and raises the error
    of the store where torch's archive writer has raised another one on top of it.
    """

    def __init__(self, objects: ObjectStore, url: str) -> None:
        self._file: Any = objects.fs.open(objects.path(url), "wb")
        self._bytes = self._crc32 = 0
        self._error: Exception | None = None

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # or else it would send itself when it is let go of
        if self._error is not None:
            raise self._error from error

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._bytes

    def flush(self) -> None:
        """Nothing yet: ``torch.save`` asks for it after each tensor, and a part has a least size."""

    def close(self) -> None:
        """Nothing yet: torch closes a stream before the block ends that opened it."""

    def align(self, address: int, nbytes: int) -> None:
        """Nothing: parts have no pages."""

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; return how many. Raises: what the store has failed with, now or before."""
        if self._error is not None:
            raise self._error
        rest = memoryview(data).cast("B")
        try:
            # A large tensor whole would be a part of its own size, and as much memory once more.
            for at in range(0, len(rest), _PIECE_BYTES):
                self._file.write(rest[at : at + _PIECE_BYTES])
        except Exception as error:
            self._error = error
            raise
        self._bytes += len(rest)
        self._crc32 = crc32(rest, self._crc32)
        failpoint("writing")
        return len(rest)

    write_memory = write

    def finish(self) -> FileMark:
        """Send what is left, and return the mark of the object, which is there, whole."""
        self._file.close()
        failpoint("flushed")
        return FileMark(self._bytes, self._crc32)


def _name(url: str) -> str:
    return url.rpartition("/")[2]
