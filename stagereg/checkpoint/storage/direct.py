"""``direct``: torch's own format, past the page cache, and from the staged memory as it lies.

The file of a rank is what torch's writer would have made of the same entries, blob by blob; only the order, and what
lies between blobs, differ. A tensor goes one of four ways:

* *In place.* A stager that reserved padding around it (:mod:`stagereg.kernel.memory`) has made its memory nearly the
  image of the file. Head and tail are written into the padding, and the pages with all of it go to disk without a copy.
  Such runs of pages begin on page boundaries of the file. The rest of the padding becomes zeros; what remains, in
  the first and last page of a run and in fewer than 64 bytes between blobs, is what the stager's memory held there:
  other tensors of the copy, or what that memory was used for before by this process.
* *Straight.* A large tensor elsewhere in host memory has its pages written as they are as well, at an offset in the
  file that is as far from a page boundary as its memory; head, tail and ends go through a buffer.
* *Through a buffer.* Any other plain tensor is copied piece by piece behind its head, packed if it has holes.
* *As torch does it.* The few kinds that :func:`.blob.saved_stride` names go through ``torch.save``.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stagereg.checkpoint.storage.aligned import PAGE, STRAIGHT_BYTES, AlignedFile, Bounce
from stagereg.checkpoint.storage.blob import Envelope, envelope, saved_stride
from stagereg.checkpoint.storage.files import FileStorage, StrPath, raising_os_errors
from stagereg.errors import ConfigError
from stagereg.kernel.memory import padding_around
from stagereg.registry import register

__all__ = ["DirectStorage"]

_PIECE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


@register("storage", "direct")
class DirectStorage(FileStorage):
    """Writes with ``O_DIRECT`` what plain ``torch.distributed.checkpoint.load`` reads.

    It takes hardly any processor time from training, and none of its page cache. With a stager that reserves padding
    (the checkpointer asks it to) the staged memory itself is written; with another one, or without any, small tensors
    and tensors with holes go through two small buffers. A file system that refuses ``O_DIRECT``, as some network and
    memory file systems do, is written through the page cache, which is logged once.

    Tensors may be on any device; those on an accelerator come over in pieces of the buffers' size.

    Args:
        path: the directory; torch and the checkpointer name another for each checkpoint.
        buffer_mb: MiB of each of the two buffers, at least 1.

    Attributes:
        padding: see :class:`.UsesPadding`.
    """

    padding = (768, 1024)
    remote = False

    def __init__(self, path: StrPath | None = None, buffer_mb: int = 4) -> None:
        if isinstance(buffer_mb, bool) or not isinstance(buffer_mb, int) or buffer_mb < 1:
            raise ConfigError(f"buffer_mb must be a whole number of at least 1, not {buffer_mb!r}.")
        super().__init__(path)
        self._buffer_bytes = buffer_mb << 20
        self._buffers: list[Bounce] = []
        self._logged = False

    def __getstate__(self) -> dict[str, Any]:
        """For a writer in another process, which makes buffers of its own."""
        return {**vars(self), "_buffers": []}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, flushed to the disk. Raises: ``OSError``, with the operating system's error."""
        self.files.marks.clear()
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write_file(plan, planner) if plan.items else [])
        return done

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        path = Path(self.path) / name
        self._buffers = self._buffers or [Bounce(self._buffer_bytes) for _ in range(2)]
        with raising_os_errors(), AlignedFile(path, self._buffers) as file:
            results = list(_write_items(file, name, plan, planner))
            self.files.marks[name] = file.finish()
        if file.refused:
            self._log_refusal(path.parent)
        return results

    def _log_refusal(self, folder: Path) -> None:
        # Once on each machine: all its ranks would log the same.
        if not self._logged and os.environ.get("LOCAL_RANK", "0") == "0":
            _log.warning("%s is on a file system that refuses O_DIRECT: written through the page cache.", folder)
        self._logged = True


@dataclass(frozen=True, slots=True)
class _InPlace:
    """A blob that lies in memory as it will in the file; ``tensor`` keeps that memory."""

    index: MetadataIndex
    tensor: torch.Tensor
    address: int
    length: int


def _write_items(file: AlignedFile, name: str, plan: SavePlan, planner: SavePlanner) -> Iterator[WriteResult]:
    in_place: list[_InPlace] = []
    written: dict[int, Envelope] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        ready = _put_around(item, data.detach(), written) if isinstance(data, torch.Tensor) else None
        if ready is not None:
            in_place.append(ready)
            continue
        offset = _write_item(file, item, data)
        yield _result(item.index, name, offset, file.tell() - offset)
    runs = _runs(in_place)
    for run in runs:
        begin, end = _first_page(run[0]), _last_page(run[-1])
        used = run[-1].address + run[-1].length - begin if run is runs[-1] else end - begin
        offset = file.place(begin, end - begin, used)
        for blob in run:
            yield _result(blob.index, name, offset + blob.address - begin, blob.length)


def _result(index: MetadataIndex, name: str, offset: int, length: int) -> WriteResult:
    return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(name, offset, length))


# -- in place


def _put_around(item: WriteItem, x: torch.Tensor, written: dict[int, Envelope]) -> _InPlace | None:
    """Write head and tail into the padding around a tensor; None where there is none, or too little.

    ``written`` has what was written around each address: another view of the same tensor must leave that alone.
    """
    padding = padding_around(x) if type(x) is torch.Tensor else None
    around = _envelope(x) if padding is not None else None
    if padding is None or around is None or len(around.head) > padding.before or len(around.tail) > padding.after:
        return None
    address = x.data_ptr()
    if written.setdefault(address, around) != around:
        return None
    # All of the padding, so that nothing gets into the file that happened to be in the memory.
    ctypes.memmove(address - padding.before, around.head.rjust(padding.before, b"\0"), padding.before)
    ctypes.memmove(address + x.nbytes, around.tail.ljust(padding.after, b"\0"), padding.after)
    return _InPlace(item.index, x, address - len(around.head), len(around.head) + x.nbytes + len(around.tail))


def _envelope(x: torch.Tensor) -> Envelope | None:
    stride = saved_stride(x)
    return None if stride is None else envelope(x.dtype, x.shape, stride)


def _runs(blobs: list[_InPlace]) -> list[list[_InPlace]]:
    """Group blobs whose pages follow one another in memory, in the order of their addresses."""
    runs: list[list[_InPlace]] = []
    for blob in sorted(blobs, key=lambda blob: blob.address):
        if runs and _first_page(blob) <= _last_page(runs[-1][-1]):
            runs[-1].append(blob)
        else:
            runs.append([blob])
    return runs


def _first_page(blob: _InPlace) -> int:
    return blob.address // PAGE * PAGE


def _last_page(blob: _InPlace) -> int:
    """The address behind the last page."""
    return -(-(blob.address + blob.length) // PAGE) * PAGE


# -- not in place


def _write_item(file: AlignedFile, item: WriteItem, data: Any) -> int:
    """Write one entry and return where in the file it begins."""
    begin = file.tell()
    if item.type is WriteItemType.BYTE_IO:
        file.write(data.getbuffer())
        return begin
    x = data.detach()
    stride, around = saved_stride(x), _envelope(x)
    if stride is None or around is None:
        torch.save(_own_storage(x.cpu()), file)  # type: ignore[arg-type]
        return begin
    if stride == x.stride() and x.device.type == "cpu" and x.nbytes >= STRAIGHT_BYTES:
        file.meet(x.data_ptr() - len(around.head))
        begin = file.tell()
    file.write(around.head)
    for piece in _pieces(x, stride):
        file.write_tensor(_content(piece))
    file.write(around.tail)
    return begin


def _own_storage(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage has its bytes and no more, as torch's writer does before it saves."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _content(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without holes, in memory order."""
    flat = torch.empty(0, dtype=torch.uint8, device=x.device)
    return flat.set_(x.untyped_storage(), x.storage_offset() * x.element_size(), (x.nbytes,), (1,))


def _pieces(x: torch.Tensor, stride: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Yield what a tensor packed to ``stride`` consists of, in pieces without holes, each made when it is asked for."""
    if stride == x.stride():
        yield x
    else:
        order = sorted(range(x.ndim), key=lambda i: -stride[i])
        yield from _rows(x.permute(order))


def _rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order, in contiguous pieces of a few rows."""
    if x.nbytes <= _PIECE_BYTES:
        yield x.contiguous()
        return
    rows = _PIECE_BYTES // x[0].nbytes
    if rows:
        for at in range(0, len(x), rows):
            yield x[at : at + rows].contiguous()
    else:
        for row in x:
            yield from _rows(row)
