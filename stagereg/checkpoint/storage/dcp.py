"""``dcp``: torch's own format, past the page cache where that can be, and from the staged memory as it lies.

The file of a rank is what torch's writer would have made of the same entries, archive by archive (:mod:`.envelope`);
only the order, and what lies between them, differ. A tensor goes one of three ways:

* *In place.* A stager that reserved padding around it (:mod:`stagereg.kernel.memory`) has made its memory nearly the
  image of the file. Head and tail are written into the padding, the rest of which becomes zeros, and all of it goes
  to the file without a copy, with its neighbours. Fewer than 64 bytes between two of them are what the stager's memory
  held there: other tensors of the copy, or what that memory was used for before by this process.
* *From elsewhere in memory*, behind its head: a large tensor as it lies, at an offset in the file that is as far from
  a page boundary as its memory; others through a buffer, packed if they have holes, copied if an accelerator has them.
* *As torch does it.* The few kinds that :func:`.envelope.envelope` names go through ``torch.save``.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from stagereg.checkpoint.encoding import without_gc
from stagereg.checkpoint.options import at_least, one_of
from stagereg.checkpoint.storage.aligned import AlignedFile
from stagereg.checkpoint.storage.envelope import Envelope, envelope
from stagereg.checkpoint.storage.files import FileStorage, StrPath, write_archive
from stagereg.checkpoint.storage.protocol import ArchiveResult, Storage, TensorResult
from stagereg.kernel.memory import padding_around, view_of
from stagereg.registry import register

__all__ = ["DcpStorage", "TorchDcpStorage", "direct"]

_GAP_BYTES = 2048  # more than what the padding leaves free between two tensors


@register("storage", "dcp")
class DcpStorage(FileStorage):
    """Writes what plain ``torch.distributed.checkpoint.load`` reads, with ``O_DIRECT`` where the file system takes it.

    It takes hardly any processor time from training, and none of its page cache. With a stager that reserves padding
    (the checkpointer asks it to) the staged memory itself is written; with another one, or without any, small tensors
    and tensors with holes go through two small buffers. A file system that refuses ``O_DIRECT``, as some network and
    memory file systems do, is written through the page cache, which is logged once.

    Args:
        path: the directory or URL; torch and the checkpointer name another for each checkpoint.
        direct: ``"auto"``, or ``"never"`` to write through the page cache everywhere.
        buffer_mb: MiB of each of the two buffers, at least 1.

    Attributes:
        padding: see :class:`.Storage`.
    """

    padding = (768, 1024)

    def __init__(self, path: StrPath | None = None, direct: str = "auto", buffer_mb: int = 4) -> None:
        auto = one_of("storage.direct", direct, ("auto", "never")) == "auto"
        super().__init__(path, auto, at_least(1, "storage.buffer_mb", buffer_mb) << 20)

    def write_files(self, rank: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """See :class:`.FileStorage`."""
        if not items:
            return []
        name = f"__{rank}_0{DEFAULT_SUFFIX}"
        in_place, others = _prepare_in_place(items, planner)
        runs = _runs(in_place)
        with self.create(name) as file:
            results = [_write_item(file, name, item, planner.resolve_data(item)) for item in others]
            offsets = [_write_run(file, run) - run[0].begin for run in runs]
        with without_gc():
            for run, offset in zip(runs, offsets, strict=True):
                results += [_result(each.item, name, each.begin + offset, each.tensor, each.around) for each in run]
        return results


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
        written = super().write_data(plan, planner)
        return written.then(
            lambda done: [ArchiveResult(each.index, each.size_in_bytes, each.storage_data) for each in done.wait()]
        )

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


class _InPlace(NamedTuple):
    """A tensor that lies in memory, from ``begin`` to ``end``, as it will in the file."""

    begin: int
    end: int
    item: WriteItem
    tensor: torch.Tensor
    around: Envelope


@without_gc()
def _prepare_in_place(items: list[WriteItem], planner: SavePlanner) -> tuple[list[_InPlace], list[WriteItem]]:
    """Put head and tail around the tensors that have the padding for them; return these, and the other items."""
    written: dict[int, Envelope] = {}
    in_place: list[_InPlace] = []
    others: list[WriteItem] = []
    for item in items:
        x = _bare(planner.resolve_data(item)) if item.type is not WriteItemType.BYTE_IO else None
        around = None if x is None else envelope(x)
        if x is None or around is None or not _put_around(x, around, written):
            others.append(item)
        else:
            begin, end = x.data_ptr() - len(around.head), x.data_ptr() + x.nbytes + len(around.tail)
            in_place.append(_InPlace(begin, end, item, x, around))
    return in_place, others


def _write_item(file: AlignedFile, name: str, item: WriteItem, data: Any) -> WriteResult:
    """Write an item that does not lie in memory as it will in the file."""
    if not isinstance(data, torch.Tensor):
        return write_archive(file, name, item, data)
    x = _bare(data)
    around = envelope(x)
    if around is not None:
        return _result(item, name, _write_tensor(file, x, around), x, around)
    own = x.layout is torch.strided and x.untyped_storage().nbytes() == x.nbytes
    return write_archive(file, name, item, x.cpu() if own else x.cpu().clone())


def _bare(x: Any) -> torch.Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _result(item: WriteItem, name: str, begin: int, x: torch.Tensor, around: Envelope) -> TensorResult:
    length = len(around.head) + x.nbytes + len(around.tail)
    stride = None if x.is_contiguous() else around.stride
    return TensorResult(item.index, length, _StorageInfo(name, begin, length), begin + len(around.head), stride)


def _write_tensor(file: AlignedFile, x: torch.Tensor, around: Envelope) -> int:
    """Write head, content and tail; return where in the file they begin."""
    if not x.is_cpu or x.stride() != around.stride:
        x = torch.empty_strided(x.shape, around.stride, dtype=x.dtype).copy_(x)
    file.align(x.data_ptr() - len(around.head), x.nbytes)
    begin = file.tell()
    file.write(around.head)
    file.write_memory(view_of(x))
    file.write(around.tail)
    return begin


def _put_around(x: torch.Tensor, around: Envelope, written: dict[int, Envelope]) -> bool:
    """Write head and tail into the padding around a tensor; return False where there is none, or too little.

    ``written`` has what was written around each address: another view of the same tensor must leave that alone.
    """
    padding = padding_around(x)
    if padding is None or len(around.head) > padding.before or len(around.tail) > padding.after:
        return False
    address = x.data_ptr()
    if written.setdefault(address, around) != around:
        return False
    # All of the padding, so that nothing gets into the file that happened to be in the memory.
    ctypes.memmove(address - padding.before, around.head.rjust(padding.before, b"\0"), padding.before)
    ctypes.memmove(address + x.nbytes, around.tail.ljust(padding.after, b"\0"), padding.after)
    return True


def _runs(tensors: list[_InPlace]) -> list[list[_InPlace]]:
    """Group what follows one another in memory, in the order of addresses."""
    runs: list[list[_InPlace]] = []
    for each in sorted(tensors, key=lambda each: each.begin):
        if runs and each.begin - runs[-1][-1].end <= _GAP_BYTES:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def _write_run(file: AlignedFile, run: list[_InPlace]) -> int:
    """Write memory as it is; return where in the file it begins."""
    begin, nbytes = run[0].begin, run[-1].end - run[0].begin
    memory = (ctypes.c_char * nbytes).from_address(begin)
    memory.owner = [each.tensor for each in run]  # type: ignore[attr-defined]
    file.align(begin, nbytes)
    offset = file.tell()
    file.write_memory(memoryview(memory).cast("B"))
    return offset
