"""The storage ``dcp``: torch's own format, written with ``O_DIRECT`` if possible.

The file of a rank has the same archives as with torch's writer (:mod:`.envelope`); only their order, and the zeros
between them, differ. Large tensors in host memory are written directly, other tensors through a buffer. Tensors with
gaps, or on an accelerator, are copied first. Kinds of tensors without an envelope are written by ``torch.save``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.base.pages import view_of
from stagereg.checkpoint.format.index import ArchiveResult, TensorResult
from stagereg.checkpoint.format.wrappers import wraps
from stagereg.checkpoint.storage.aligned import AlignedFile
from stagereg.checkpoint.storage.envelope import envelope
from stagereg.checkpoint.storage.files import FileStorage, StrPath, standalone, write_archive
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import at_least, one_of
from stagereg.registry import register


@register("storage", "dcp")
class DcpStorage(FileStorage):
    """Writes files that ``torch.distributed.checkpoint.load`` can read, with ``O_DIRECT`` if the file system has it.

    Takes hardly any CPU time from training, and evicts nothing from the page cache. Large tensors are written directly
    from their memory; small tensors and tensors with gaps go through two small buffers. If a file system does not
    support ``O_DIRECT``, like some network and memory file systems, files go through the page cache, which is logged.

    Args:
        path: the directory or URL; torch and the checkpointer set a new one for each checkpoint.
        direct: ``"auto"``, or ``"never"`` to write through the page cache everywhere.
        buffer_mb: size of each of the two buffers in MiB, at least 1.
    """

    def __init__(self, path: StrPath | None = None, direct: str = "auto", buffer_mb: int = 4) -> None:
        auto = one_of("storage.direct", direct, ("auto", "never")) == "auto"
        super().__init__(path, auto, at_least(1, "storage.buffer_mb", buffer_mb) << 20)

    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        name = f"__{rank}_0{DEFAULT_SUFFIX}"
        with self.create(name) as file:
            return [_write_item(file, name, item, planner.resolve_data(item)) for item in items]


@register("storage", "torch_dcp")
class TorchDcpStorage(FileSystemWriter, Storage):
    """Writes with torch's ``FileSystemWriter``, through the page cache; for comparison with ``dcp``.

    Args:
        path: the directory, by default the current one; torch and the checkpointer set a new one for each checkpoint.
    """

    remote = False

    def __init__(self, path: StrPath | None = None) -> None:
        super().__init__(path or "")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write with torch's writer, and report each result as a ``torch.save`` archive."""
        written = super().write_data(plan, planner)
        return written.then(lambda done: [ArchiveResult(x.index, x.size_in_bytes, x.storage_data) for x in done.wait()])

    def reader(self, path: StrPath) -> StorageReader:
        return FileSystemReader(path)


def _write_item(file: AlignedFile, name: str, item: WriteItem, data: Any) -> WriteResult:
    if not isinstance(data, torch.Tensor):
        return write_archive(file, name, item, data)
    if wraps(data):
        return write_archive(file, name, item, standalone(data))
    x = data.detach().resolve_conj().resolve_neg()
    around = envelope(x)
    if around is None:
        return write_archive(file, name, item, standalone(x))
    stride = None if x.is_contiguous() else around.stride
    if not x.is_cpu or x.stride() != around.stride:
        x = torch.empty_strided(x.shape, around.stride, dtype=x.dtype, device="cpu").copy_(x)
    file.align(x.data_ptr() - len(around.head), x.nbytes)
    begin = file.tell()
    file.write(around.head)
    file.write_memory(view_of(x))
    file.write(around.tail)
    info = _StorageInfo(name, begin, file.tell() - begin)
    return TensorResult(item.index, info.length, info, begin + len(around.head), stride)
