"""``dcp``: torch's own format, past the page cache where that can be.

The file of a rank is what torch's writer would have made of the same entries, archive by archive (:mod:`.envelope`),
with zeros between some of them. A large tensor goes to the file from its memory as it lies, at an offset that is as far
from a page boundary as that memory; others go through a buffer, packed if they have holes, copied if an accelerator has
them. The few kinds that :func:`.envelope.envelope` names go through ``torch.save``.
"""

from __future__ import annotations

import io
import warnings

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.checkpoint.options import at_least_one, one_of
from stagereg.checkpoint.storage.envelope import envelope
from stagereg.checkpoint.storage.files import FileStorage, NewFile, StrPath, archived, write_object
from stagereg.checkpoint.storage.protocol import ArchiveResult, Storage, TensorResult
from stagereg.kernel.memory import view_of
from stagereg.registry import register

__all__ = ["DcpStorage", "TorchDcpStorage", "direct"]


@register("storage", "dcp")
class DcpStorage(FileStorage):
    """Writes what plain ``torch.distributed.checkpoint.load`` reads, with ``O_DIRECT`` where the file system takes it.

    It takes hardly any processor time from training, and none of its page cache. A file system that refuses
    ``O_DIRECT``, as some network and memory file systems do, is written through the page cache, which is logged once.

    Args:
        path: the directory or URL; torch and the checkpointer name another for each checkpoint.
        direct: ``"auto"``, or ``"never"`` to write through the page cache everywhere.
        buffer_mb: MiB of each of the two buffers, at least 1.
    """

    def __init__(self, path: StrPath | None = None, direct: str = "auto", buffer_mb: int = 4) -> None:
        auto = one_of("direct", direct, ("auto", "never")) == "auto"
        super().__init__(path, auto, at_least_one("buffer_mb", buffer_mb) << 20)

    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """See :class:`.FileStorage`."""
        if not items:
            return []
        name = f"__{rank}_0{DEFAULT_SUFFIX}"
        with self.create(name) as file:
            return [_write_item(file, name, item, planner.resolve_data(item)) for item in items]


@register("storage", "torch_dcp")
class TorchDcpStorage(FileSystemWriter, Storage):
    """Writes with torch's ``FileSystemWriter``, through the page cache: to compare ``dcp`` with.

    Args:
        path: the directory, the current one by default; torch and the checkpointer name another for each checkpoint.
    """

    remote = False

    def __init__(self, path: StrPath | None = None) -> None:
        super().__init__(path or "")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write as torch does."""
        results = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([ArchiveResult(each.index, each.size_in_bytes, each.storage_data) for each in results])
        return done

    def reader(self, path: StrPath) -> StorageReader:
        """See :class:`.Storage`."""
        return FileSystemReader(path)


@register("storage", "direct")
def direct(path: StrPath | None = None, buffer_mb: int = 4) -> DcpStorage:
    """The former name of ``dcp``.

    Args:
        path: see :class:`DcpStorage`.
        buffer_mb: see :class:`DcpStorage`.
    """
    text = "storage=direct is deprecated: storage=dcp writes the same, in the same way."
    warnings.warn(text, FutureWarning, stacklevel=2)
    return DcpStorage(path, buffer_mb=buffer_mb)


def _write_item(file: NewFile, name: str, item: WriteItem, data: torch.Tensor | io.BytesIO) -> WriteResult:
    if not isinstance(data, torch.Tensor):
        return write_object(file, name, item, data)
    x = data.detach().resolve_conj().resolve_neg()
    around = envelope(x)
    if around is None:
        begin = file.tell()
        torch.save(_own_storage(x.cpu()), file)  # type: ignore[arg-type]
        return archived(file, name, item, begin)
    if not x.is_cpu or x.stride() != around.stride:
        x = torch.empty_strided(x.shape, around.stride, dtype=x.dtype).copy_(x)
    file.align(x.data_ptr() - len(around.head), x.nbytes)
    begin = file.tell()
    file.write(around.head)
    file.write_memory(view_of(x))
    file.write(around.tail)
    length = file.tell() - begin
    return TensorResult(item.index, length, _StorageInfo(name, begin, length), begin + len(around.head), around.stride)


def _own_storage(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage has its bytes and no more, as torch's writer does before it saves."""
    return x if x.layout is torch.strided and x.untyped_storage().nbytes() == x.nbytes else x.clone()
