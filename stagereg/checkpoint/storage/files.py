"""Files that are marked while they are written: what the storages have in common.

Torch's ``FileSystemWriter`` asks a file system object for its streams. :class:`MarkedFiles` is one whose streams take
the CRC-32 of what passes through and flush it to the disk, so that no file is read again for its mark.
Where the directory is a URL, :class:`.MarkedObjects` takes its place, and a write that the network has lost is made
again as a whole: what is to be written is still there.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.storage.aligned import AlignedFile
from stagereg.checkpoint.storage.lookup import expect_fit
from stagereg.checkpoint.storage.objects import MarkedObjects
from stagereg.checkpoint.storage.protocol import ArchiveResult, Storage, TensorResult
from stagereg.checkpoint.store.open_store import is_url
from stagereg.checkpoint.store.retry import retrying, until, within
from stagereg.errors import CheckpointError

__all__ = ["FileStorage", "MarkedFiles", "StrPath"]

StrPath: TypeAlias = str | os.PathLike[str]

_log = logging.getLogger(__name__)


class MarkedFiles(FileSystem):
    """The local file system, with a mark of each file that was written through it.

    Args:
        direct: whether to bypass the page cache where that can be.
        buffer_bytes: of each of the two buffers that small writes go through, a multiple of a page.

    Attributes:
        marks: by the name of the file; what is not closed yet, or was not written to its end, has none.
    """

    def __init__(self, direct: bool = False, buffer_bytes: int = 1 << 20) -> None:
        super().__init__()
        self.marks: dict[str, FileMark] = {}
        self._direct = direct
        self._buffer_bytes = buffer_bytes
        self._buffers: list[mmap] = []

    def __getstate__(self) -> dict[str, Any]:
        """For a writer in another process, which makes buffers of its own."""
        return {**vars(self), "_buffers": []}

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Generator[Any, None, None]:
        """Open a file; one opened with ``"wb"`` is on the disk, and has its mark, after the block."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        path = Path(path)
        self.marks.pop(path.name, None)
        if not self._buffers:
            self._buffers = [mmap(-1, self._buffer_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS) for _ in range(2)]
        with AlignedFile(path, self._buffers, self._direct) as file:
            yield file
            self.marks[path.name] = file.finish()
        if file.refused:
            self._direct = False
            if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a machine would log the same
                text = "%s is on a file system that refuses O_DIRECT: written through the page cache."
                _log.warning(text, path.parent)

    def rename(self, path: StrPath, new_path: StrPath) -> None:
        """Rename a file; its mark goes with it."""
        super().rename(path, new_path)
        self.marks[Path(new_path).name] = self.marks.pop(Path(path).name)


class FileStorage(FileSystemWriter, Storage):
    """Base of the storages that write files; writes them as torch does, unless a subclass does it another way.

    Files go to a directory, or to a URL that fsspec knows. One thread at a time may use it, for one checkpoint after
    the other.

    Args:
        path: the directory or URL; torch and the checkpointer name another for each checkpoint.
        direct: whether files bypass the page cache where that can be.
        buffer_bytes: see :class:`MarkedFiles`.

    Attributes:
        remote: whether it can write to URLs.
        files: the file system that ``path`` is in.
    """

    remote: ClassVar[bool] = True

    def __init__(self, path: StrPath | None = None, direct: bool = False, buffer_bytes: int = 1 << 20) -> None:
        super().__init__("", sync_files=False)  # the streams are flushed when they end
        self._named = bool(path)
        self._until = math.inf
        self._local = MarkedFiles(direct, buffer_bytes)
        self.files: MarkedFiles | MarkedObjects = self._local
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

        def write() -> list[WriteResult]:
            self.files.marks.clear()
            results = self.write_files(plan, planner)
            return [each if isinstance(each, TensorResult) else _archived(each) for each in results]

        done: Future[list[WriteResult]] = Future()
        try:
            if is_url(self.path):
                with within(self._until - time.monotonic()):
                    done.set_result(retrying("writing", str(self.path), write))
            else:
                done.set_result(write())
        except RuntimeError as error:
            # When the disk refuses a write, torch's archive writer fails once more while it unwinds and raises about
            # positions in the archive. Other ranks get the error that is raised, not those behind it.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        return done

    def write_files(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's files through :attr:`files`; called again where the network has lost something."""
        return super().write_data(plan, planner).wait()

    def reader(self, path: StrPath) -> StorageReader:
        """See :class:`.Storage`."""
        reader = FileSystemReader("" if is_url(path) else path)
        if is_url(path):
            reader.fs = MarkedObjects()  # type: ignore[assignment]
            reader.path = os.fspath(path)
        return reader

    def _go_to(self, path: StrPath) -> None:
        """Write to ``path``, through the file system that it is in."""
        expect_fit(self, os.fspath(path))
        if is_url(path) is not isinstance(self.files, MarkedObjects):
            self.files = MarkedObjects() if is_url(path) else self._local
        self.fs = self.files  # type: ignore[assignment]
        self.path = self.files.init_path(path)


def _archived(result: WriteResult) -> ArchiveResult:
    return ArchiveResult(result.index, result.size_in_bytes, result.storage_data)
