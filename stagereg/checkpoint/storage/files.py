"""The base class of storages that write files. It computes digests while writing, and makes each finished file durable.

After a network error, the whole write is repeated.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.base.providers import needs, providers
from stagereg.checkpoint.format.index import ArchiveResult
from stagereg.checkpoint.format.manifest import METADATA, FileDigest
from stagereg.checkpoint.format.wrappers import owning, wraps
from stagereg.checkpoint.storage.aligned import AlignedFile, make_buffers
from stagereg.checkpoint.storage.protocol import Storage, expect_fit
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.open_store import backend_of
from stagereg.errors import CheckpointError
from stagereg.kernel.copier import no_collection

StrPath: TypeAlias = str | os.PathLike[str]

_log = logging.getLogger(__name__)


class FileStorage(Storage):
    """Base class of storages that write files. A subclass writes the files of a rank; this class writes ``.metadata``.

    Files go to a directory, or to a URL that fsspec supports. Not thread-safe: an object writes one checkpoint at a
    time.

    Args:
        path: the directory or URL; torch and the checkpointer set a new one for each checkpoint.
        direct: whether files bypass the page cache if possible.
        buffer_bytes: size of each of the two buffers for small writes, a multiple of a page.

    Attributes:
        path: the directory or URL; empty before it is set.
        blocks: for each file that has a digest, the CRC-32 of each block of :data:`.aligned.BLOCK_BYTES`.
        mode: the mode of new files in a directory, before the umask is applied.
    """

    mode = 0o666

    def __init__(self, path: StrPath | None = None, direct: bool = False, buffer_bytes: int = 1 << 20) -> None:
        self._direct = direct
        self._buffer_bytes = buffer_bytes
        self._buffers: list[memoryview] = []  # reused, because the first access to new memory holds the GIL
        self._marks: dict[str, FileDigest] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self._metadata = b""
        self.path = ""
        self.reset(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_buffers": []}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True, because :meth:`reset` checks the path."""
        return True

    @property
    def finished(self) -> bytes | None:
        # If a subclass overrides one of these methods, each save must call it.
        own, kind = FileStorage, type(self)
        is_own = kind.finish is own.finish and kind.prepare_global_plan is own.prepare_global_plan
        return self._metadata if is_own else None

    @property
    def marks(self) -> Mapping[str, FileDigest]:
        return dict(self._marks)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a checkpoint in ``checkpoint_id``, by default :attr:`path`. Raises like :func:`.expect_fit`."""
        path = os.fspath(checkpoint_id or self.path)
        expect_fit(self, path)
        self.path = path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise ``CheckpointError`` for torch's ``use_collectives=False``, which is not supported."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("use_collectives=False needs torch's own FileSystemWriter.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory. Raises: ``CheckpointError`` if the path is not set; ``OSError`` for other reasons."""
        if not self.path:
            cls = type(self).__name__
            raise CheckpointError(f"{cls} has no directory. Construct it with path=..., or save with checkpoint_id=...")
        backend_of(self.path).make(self.path)
        failpoint("made")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Store in each plan the number of its rank. Called on the coordinator."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Raises: ``OSError`` with the error of the operating system or the object store."""
        self._marks.clear()
        self.blocks.clear()
        write = partial(self.write_files, plan.storage_data, plan.items, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(backend_of(self.path).attempt("writing", self.path, write))
        return done

    @abstractmethod
    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write the files of ``rank``, each with :meth:`create`. Called again after a network error."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's metadata. Called on the coordinator."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for share in results for result in share}
        with no_collection():
            self._metadata = pickle.dumps(metadata)
        backend_of(self.path).attempt("writing", self.path, self._write_metadata)

    def _write_metadata(self) -> None:
        with self.create(METADATA) as file:
            file.write(self._metadata)

    def reader(self, path: StrPath) -> StorageReader:
        """Return a reader for files with one ``torch.save`` archive per entry. The reader runs no code from files."""
        return torch_reader(path)

    @contextmanager
    def create(self, name: str) -> Generator[AlignedFile, None, None]:
        """Create a file in :attr:`path`. After the ``with`` block, it is durable, and :attr:`marks` has its digest."""
        path = f"{self.path.rstrip('/')}/{name}"
        target = backend_of(path).create(path, self._direct, self.mode)
        self._buffers = self._buffers or make_buffers(self._buffer_bytes)
        with AlignedFile(target, self._buffers) as file:
            try:
                yield file
            except RuntimeError:
                file.raise_error()  # raised instead of the later error of torch's archive writer
                raise
            self._marks[name] = file.finish()
            self.blocks[name] = tuple(file.blocks)
        if target.refused:
            self._direct = False
            if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a machine would log the same
                _log.warning("The file system of %s does not support O_DIRECT: using the page cache.", self.path)


def torch_reader(path: StrPath, unpack: Callable[[bytes], bytes] | None = None) -> StorageReader:
    """Return a reader for torch's format from an installed extension. The reader runs no code from a file.

    ``unpack`` converts the bytes of an entry to a ``torch.save`` archive. Raises: ``CheckpointError`` if no
    extension has such a reader.
    """
    for each in providers("readers"):
        return each.FilesReader(path, unpack)
    raise CheckpointError(f"torch's reader of {os.fspath(path)} {needs('interop')}")


def standalone(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor for ``torch.save``, copied if necessary: in host memory, in a storage without other elements."""
    if wraps(x):
        return owning(x)
    x = x.detach().resolve_conj().resolve_neg()
    own = x.layout is torch.strided and x.untyped_storage().nbytes() == x.nbytes
    return x.cpu() if own else x.cpu().clone()


def write_archive(file: AlignedFile, name: str, item: WriteItem, data: torch.Tensor | io.BytesIO) -> ArchiveResult:
    """Write a tensor with ``torch.save``, or an object that torch's planner has pickled, to the file ``name``."""
    begin = file.tell()
    if isinstance(data, torch.Tensor):
        torch.save(data, file)  # type: ignore[arg-type]  # as torch's writer does
    else:
        file.write(data.getbuffer())
    length = file.tell() - begin
    return ArchiveResult(item.index, length, _StorageInfo(name, begin, length))
