"""Files in torch's format, marked on their way: what the storages have in common.

Torch's ``FileSystemWriter`` asks a file system object for its streams. :class:`MarkedFiles` is one whose streams take
the CRC-32 of what passes through and flush it to the disk, so that no file is read again for its mark.
Where the directory is a URL, :class:`.MarkedObjects` takes its place, and a write that the network has lost is made
again as a whole: what is to be written is still there.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.storage.lookup import expect_fit
from stagereg.checkpoint.storage.objects import MarkedObjects
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.storage.reader import CheckpointReader
from stagereg.checkpoint.store.open_store import is_url
from stagereg.checkpoint.store.retry import retrying, until, within
from stagereg.errors import CheckpointError

__all__ = ["FileStorage", "MarkedFiles", "StrPath", "raising_os_errors"]

StrPath: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")

_BUFFER_BYTES = 1 << 20


class MarkedFiles(FileSystem):
    """The local file system, with a mark of each file that was written through it.

    Attributes:
        marks: by the name of the file; what is not closed yet, or was not written to its end, has none.
        error: what a stream has failed with; torch loses the errors of its own threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, FileMark] = {}
        self.error: BaseException | None = None

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; one opened with ``"wb"`` is on the disk, and has its mark, once closed without an error."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        name = Path(path).name
        self.marks.pop(name, None)
        file = _Marking(path, lambda mark: self.marks.update({name: mark}))
        with io.BufferedWriter(file, _BUFFER_BYTES) as stream:
            try:
                yield stream
            except BaseException as error:
                file.whole = False
                self.error = error
                raise

    def rename(self, path: StrPath, new_path: StrPath) -> None:
        """Rename a file; its mark goes with it."""
        super().rename(path, new_path)
        moved = self.marks.pop(Path(path).name, None)
        if moved is not None:
            self.marks[Path(new_path).name] = moved


class _Marking(io.FileIO):
    """A file written from its beginning to its end, which reports its mark when it is on the disk."""

    def __init__(self, path: StrPath, report_mark: Callable[[FileMark], None]) -> None:
        super().__init__(path, "w")
        self._report_mark = report_mark
        self._bytes = self._crc32 = 0
        self.whole = True

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            self.whole = False
            raise
        self._bytes += written
        self._crc32 = crc32(memoryview(data)[:written], self._crc32)
        failpoint("writing")
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        raise io.UnsupportedOperation("a marked file is written from its beginning to its end")

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self.whole:
                os.fsync(self.fileno())
                self._report_mark(FileMark(self._bytes, self._crc32))
                failpoint("flushed")
        finally:
            super().close()


@contextmanager
def raising_os_errors() -> Generator[None, None, None]:
    """Raise the operating system's error where torch would raise another one on top of it.

    When the disk refuses a write, torch's archive writer fails once more while it unwinds and raises about positions in
    the archive. Other ranks get the error that is raised, not those behind it.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


class FileStorage(FileSystemWriter, Storage):
    """Base of the storages that write torch's own format; what they write, ``torch.distributed.checkpoint.load`` reads.

    Files go to a directory, or to a URL that fsspec knows (torch reads those through its ``FsspecReader``). One thread
    at a time may use it, for one checkpoint after the other.

    Args:
        path: the directory or URL; torch and the checkpointer name another for each checkpoint.
        thread_count: threads that write, one file each.

    Attributes:
        remote: whether it can write to URLs.
    """

    remote: ClassVar[bool] = True

    def __init__(self, path: StrPath | None = None, thread_count: int = 1) -> None:
        # Flushed by the streams when they are closed: this writer's own flush comes before its buffers are written out.
        super().__init__("", sync_files=False, thread_count=thread_count)
        self._named = bool(path)
        self._until = math.inf
        self.files: MarkedFiles | MarkedObjects = MarkedFiles()
        self._go_to(path or "")

    @property
    def marks(self) -> Mapping[str, FileMark]:
        """See :class:`.Storage`."""
        return dict(self.files.marks)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another checkpoint, in the directory ``checkpoint_id`` if one is given."""
        super().reset()
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self._named = self._named or bool(checkpoint_id)
        self._until = until()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory. Raises: ``CheckpointError`` if none was named; ``OSError``."""
        if not self._named:
            raise CheckpointError(
                f"{type(self).__name__} was given no directory: build it with path=..., or save with checkpoint_id=..."
            )
        prepared = super().prepare_local_plan(plan)
        failpoint("made")
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Raises: ``OSError``, with the error of the operating system or the store."""

        def write() -> Future[list[WriteResult]]:
            self.files.marks.clear()
            with self.failing_as_its_streams():
                return super(FileStorage, self).write_data(plan, planner)

        return self.persistently(write)

    @contextmanager
    def failing_as_its_streams(self) -> Generator[None, None, None]:
        """Raise what a stream has failed with meanwhile: torch loses the errors of its own threads."""
        self.files.error = None  # that is left of an earlier checkpoint
        try:
            with raising_os_errors():
                yield
            if self.files.error is not None:
                raise self.files.error
        finally:
            self.files.error = None  # which would hold on to what was to be written

    def persistently(self, write: Callable[[], T]) -> T:
        """Return what ``write`` returns; where files go to a URL, it is called again as long as that may help."""
        if not is_url(self.path):
            return write()
        with within(self._until - time.monotonic()):
            return retrying("writing", str(self.path), write)

    def reader(self, path: StrPath) -> StorageReader:
        """See :class:`.Storage`."""
        reader = CheckpointReader("" if is_url(path) else path)
        if is_url(path):
            reader.fs = MarkedObjects()  # type: ignore[assignment]
            reader.path = os.fspath(path)
        return reader

    def _go_to(self, path: StrPath) -> None:
        """Write to ``path``, through the file system that it is in."""
        expect_fit(self, os.fspath(path))
        remote = is_url(path)
        if remote is not isinstance(self.files, MarkedObjects):
            self.files = MarkedObjects() if remote else MarkedFiles()
        self.fs = self.files  # type: ignore[assignment]
        self.path = self.files.init_path(path)
