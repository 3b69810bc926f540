"""The base class of storages that convert each entry, for example compress or encrypt it."""

from __future__ import annotations

import io
from abc import abstractmethod

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from stagereg.checkpoint.storage.files import FileStorage, StrPath, standalone, torch_reader


class PackedStorage(FileStorage):
    """Writes one file of packed entries per rank. A subclass defines :meth:`pack` and :meth:`unpack`.

    Supports directories and URLs, and restores at any world size. While an entry is packed, it is in memory twice: as
    a ``torch.save`` archive, and packed.
    """

    @abstractmethod
    def pack(self, data: memoryview) -> bytes:
        """Return the bytes to write for one entry. Called on the thread that writes checkpoints."""

    @abstractmethod
    def unpack(self, data: bytes) -> bytes:
        """Undo :meth:`pack`. Thread-safe. Must also work in a storage that was built without arguments."""

    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        name = f"__{rank}_0.packed"
        results = []
        with self.create(name) as file:
            for item in items:
                content = planner.resolve_data(item)
                if isinstance(content, torch.Tensor):
                    torch.save(standalone(content), content := io.BytesIO())
                begin = file.tell()
                file.write(self.pack(content.getbuffer()))
                info = _StorageInfo(name, begin, file.tell() - begin)
                results.append(WriteResult(item.index, info.length, info))
        return results

    def reader(self, path: StrPath) -> StorageReader:
        return torch_reader(path, self.unpack)
