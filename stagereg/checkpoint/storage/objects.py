"""Files in an object store, marked on their way: what :class:`.MarkedFiles` is for a local directory.

Torch's writer asks it for streams, and gets uploads: in parts of the size that fsspec has for that store, so that no
more than a part lies in memory, and given up where the writing fails, since an upload that is merely closed would leave
half a file under its name. A store has no rename; what torch writes under a temporary name waits in memory until it has
its last one.
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
from stagereg.errors import CheckpointError

__all__ = ["MarkedObjects"]

StrPath = str | os.PathLike[str]

_TEMPORARY = ".tmp"
_PIECE_BYTES = 1 << 22


class MarkedObjects(FileSystemBase):
    """The file system of URLs, with a mark of each object that was written through it. Can be pickled.

    Attributes:
        marks: by the last part of the name; what is not closed yet, or was not written to its end, has none.
        error: what an upload has failed with; torch loses the errors of its own threads.
    """

    def __init__(self) -> None:
        self.marks: dict[str, FileMark] = {}
        self.error: BaseException | None = None
        self._objects: ObjectStore | None = None
        self._waiting: dict[str, bytes] = {}

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Generator[io.IOBase, None, None]:
        """Open an object; one opened with ``"wb"`` is stored, and has its mark, once closed without an error."""
        url = os.fspath(path)
        if mode == "rb":
            with self._store(url).open(url) as stream:
                yield stream
        elif mode != "wb":
            raise CheckpointError(f"{url} can be opened with 'rb' and 'wb', not with {mode!r}")
        elif url.endswith(_TEMPORARY):
            with io.BytesIO() as kept:
                yield kept
                self._waiting[url] = kept.getvalue()
        else:
            with self._upload(url) as upload:
                yield upload

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

    def ls(self, path: StrPath) -> list[str]:
        """Return the URLs of all objects below ``path``."""
        url = os.fspath(path)
        return [self.concat_path(url, name) for name in self._store(url).sizes(url)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether it is a URL."""
        return isinstance(checkpoint_id, str) and "://" in checkpoint_id

    @contextmanager
    def _upload(self, url: str) -> Generator[_Upload, None, None]:
        self.marks.pop(_name(url), None)
        upload = _Upload(self._store(url), url)
        try:
            yield upload
            mark = upload.finish()
        except BaseException as error:
            self.error = upload.error or error  # torch's archive writer raises another one on top of it
            upload.give_up()
            raise self.error from error
        self.marks[_name(url)] = mark
        failpoint("flushed")

    def _store(self, url: str) -> ObjectStore:
        if self._objects is None or self._objects.protocol != url.partition("://")[0]:
            self._objects = ObjectStore(url)
        return self._objects


class _Upload(io.RawIOBase):
    """An object that is written from its beginning to its end."""

    def __init__(self, objects: ObjectStore, url: str) -> None:
        super().__init__()
        self._objects, self._url = objects, url
        self._file: Any = objects.fs.open(objects.path(url), "wb")
        self._bytes = self._crc32 = 0
        self.error: Exception | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """Nothing yet: ``torch.save`` asks for it after each tensor, and a part has a least size."""

    def write(self, data: Any, /) -> int:
        if self.error is not None:
            raise self.error
        try:
            return self._write(memoryview(data).cast("B"))
        except Exception as error:
            self.error = error
            raise

    def finish(self) -> FileMark:
        """Send what is left; the object is there, whole, when this returns."""
        if self.error is not None:
            raise self.error
        self._file.close()
        return FileMark(self._bytes, self._crc32)

    def give_up(self) -> None:
        """Leave nothing of the upload, if the store can be reached; what is left goes with the directory."""
        file, self._file = self._file, None
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(Exception):
            file.closed = True  # or else it would send itself when it is let go of

    def _write(self, rest: memoryview) -> int:
        # A large tensor whole would be a part of its own size, and as much memory once more.
        for at in range(0, len(rest), _PIECE_BYTES):
            piece = rest[at : at + _PIECE_BYTES]
            self._file.write(piece)
            self._bytes += len(piece)
            self._crc32 = crc32(piece, self._crc32)
        failpoint("writing")
        return len(rest)


def _name(url: str) -> str:
    return url.rpartition("/")[2]
