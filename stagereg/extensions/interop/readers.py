"""A version of torch's checkpoint reader that runs no code from the files; for :func:`.torch_reader`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from stagereg.checkpoint.format.manifest import METADATA
from stagereg.checkpoint.storage.files import StrPath
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.open_store import backend_of
from stagereg.extensions.interop.torch_metadata import loads


class _RemoteFiles(FileSystem):
    """Opens files of a checkpoint backend for torch's reader."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @contextmanager
    def create_stream(self, path: StrPath, mode: str) -> Generator[io.IOBase, None, None]:
        with self._backend.open(os.fspath(path)) as stream:
            yield stream

    def concat_path(self, path: StrPath, suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: StrPath) -> StrPath:
        return path


class FilesReader(FileSystemReader):
    """Reads the directory or URL ``path`` like torch's reader, but runs no code from ``.metadata``.

    ``unpack`` converts the stored bytes of an object to the bytes that ``torch.save`` would write.
    """

    def __init__(self, path: StrPath, unpack: Callable[[bytes], bytes] | None = None) -> None:
        super().__init__(path)
        self._unpack = unpack
        backend = backend_of(path)
        if backend.remote:
            self.fs = _RemoteFiles(backend)
            self.path = self.fs.init_path(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "rb") as file:
            metadata = loads(file.read())
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        part = super()._slice_file(file, sinfo)
        return part if self._unpack is None else io.BytesIO(self._unpack(part.read()))
