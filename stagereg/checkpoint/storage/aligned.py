"""A file written in whole pages, past the page cache where the file system allows it.

With ``O_DIRECT`` the disk reads memory itself: no copy into the page cache, hardly any processor time, nothing evicted
that training needs. In return address, offset and length of every write must be multiples of a block. So what is small
goes through two aligned buffers, one being filled while the other is written, and whole pages of memory go as they are
where they are to lie on a page of the file too. Writes run on a thread of their own while the CRC-32 of the same bytes
is taken on the caller's: both let go of the GIL.

Where the file system refuses ``O_DIRECT`` (at the opening or at the first write), the same writes go through the page
cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.manifest import FileMark
from stagereg.kernel.memory import Block

__all__ = ["PAGE", "STRAIGHT_BYTES", "AlignedFile", "Bounce"]

PAGE = 4096
"""Bytes: a multiple of the logical block of nearly every disk."""

STRAIGHT_BYTES = 1 << 20
"""Bytes: what a tensor must have at least to be worth a write of its own."""

_CHUNK_BYTES = 1 << 24
_MOST_PENDING = 8  # or else memory would be held long after it was handed over
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_DONE: Future[None] = Future()
_DONE.set_result(None)


class Bounce:
    """A page-aligned buffer of ``nbytes`` bytes, a multiple of a page; page-locked where an accelerator is there."""

    def __init__(self, nbytes: int) -> None:
        block = Block(nbytes + PAGE, pin=torch.accelerator.is_available())
        self.address = -(-block.address // PAGE) * PAGE
        begin = self.address - block.address
        self.view = block.view()[begin : begin + nbytes]
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)


class AlignedFile:
    """A new file at ``path``, written from its beginning to its end by one thread.

    As a context manager it ends its thread and closes the file; :meth:`finish` comes before that, when all is written.

    Args:
        path: an older file there is emptied.
        buffers: two or more of one size, for the use of this file alone until it is closed.

    Attributes:
        direct: whether the page cache is passed by; False as soon as the file system has refused.
        refused: whether it has.

    Raises:
        OSError: from any method, with the path: the operating system's error for this write or an earlier one.
    """

    def __init__(self, path: Path, buffers: list[Bounce]) -> None:
        self._path = path
        self._buffers = deque((buffer, _DONE) for buffer in buffers)
        self._filled = 0  # bytes in the first buffer
        self._begin = 0  # where they go in the file
        self._crc32 = 0
        self.refused = False
        self._descriptor = self._open()
        self.direct = not self.refused
        self._pending: deque[Future[None]] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stagereg-write")

    def __enter__(self) -> AlignedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._begin + self._filled

    def flush(self) -> None:
        """Nothing yet: ``torch.save`` asks for it after each tensor."""

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; return how many."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            free = self._free(len(rest))
            self._buffers[0][0].view[self._filled : self._filled + free] = rest[:free]
            self._filled += free
            rest = rest[free:]
        return size

    def write_tensor(self, data: torch.Tensor) -> None:
        """Write a contiguous one-dimensional tensor of ``uint8`` on any device.

        It comes over in pieces of a buffer. Large ones in host memory need no buffer but at their ends, if their
        address is as far from a page boundary as their offset in the file (:meth:`meet`); they must stay as they are
        until :meth:`finish`.
        """
        before = -data.data_ptr() % PAGE
        pages = (data.numel() - before) // PAGE * PAGE
        if data.device.type == "cpu" and pages >= STRAIGHT_BYTES and (self.tell() + before) % PAGE == 0:
            self._copy(data[:before])
            self.place(data.data_ptr() + before, pages, pages, data)
            data = data[before + pages :]
        self._copy(data)

    def meet(self, address: int) -> None:
        """Write zeros until the next byte is as far from a page boundary as ``address``."""
        self.write(bytes((address - self.tell()) % PAGE))

    def place(self, address: int, nbytes: int, used: int, owner: object = None) -> int:
        """Write memory as it is, at the next page boundary; return where that is in the file.

        Args:
            address: a multiple of ``PAGE``; the memory must stay as it is until :meth:`finish`.
            nbytes: a multiple of ``PAGE``.
            used: bytes from ``address`` on that belong to the file; after fewer than ``nbytes``, only ``finish`` may
                follow.
            owner: what keeps the memory, held for as long as that is needed.
        """
        self.meet(0)
        self._submit_buffer()
        begin = self._begin
        block = (ctypes.c_char * nbytes).from_address(address)
        block.owner = owner  # type: ignore[attr-defined]
        memory = memoryview(block).cast("B")
        for at in range(0, nbytes, _CHUNK_BYTES):
            self._submit(memory[at : at + _CHUNK_BYTES], begin + at)
            self._crc32 = crc32(memory[at : min(at + _CHUNK_BYTES, used)], self._crc32)
        self._begin += used
        return begin

    def finish(self) -> FileMark:
        """Wait until all is written, flush it to the disk and return the mark of the file."""
        end = self.tell()
        self._submit_buffer()
        while self._pending:
            self._pending.popleft().result()
        try:
            os.ftruncate(self._descriptor, end)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._named(error) from None
        failpoint("flushed")
        return FileMark(end, self._crc32)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            if _O_DIRECT:
                return os.open(self._path, flags | _O_DIRECT, 0o666)
        self.refused = True
        return os.open(self._path, flags, 0o666)

    def _free(self, wanted: int) -> int:
        """Return how much of ``wanted`` bytes goes into the first buffer now."""
        if self._filled == len(self._buffers[0][0].view):
            self._submit_buffer()
        if self._filled == 0:
            self._buffers[0][1].result()
        return min(wanted, len(self._buffers[0][0].view) - self._filled)

    def _copy(self, data: torch.Tensor) -> None:
        at, size = 0, data.numel()
        while at < size:
            free = self._free(size - at)
            buffer, _ = self._buffers[0]
            if data.device.type == "cpu":  # not Tensor.copy_, which has threads of its own and is slower
                ctypes.memmove(buffer.address + self._filled, data.data_ptr() + at, free)
            else:
                buffer.tensor[self._filled : self._filled + free].copy_(data[at : at + free])
            self._filled += free
            at += free

    def _submit_buffer(self) -> None:
        if self._filled == 0:
            return
        buffer, _ = self._buffers.popleft()
        padded = -(-self._filled // PAGE) * PAGE
        buffer.view[self._filled : padded] = bytes(padded - self._filled)
        written = self._submit(buffer.view[:padded], self._begin)
        self._crc32 = crc32(buffer.view[: self._filled], self._crc32)
        self._buffers.append((buffer, written))
        self._begin += self._filled
        self._filled = 0

    def _submit(self, data: memoryview, at: int) -> Future[None]:
        self._check()
        while len(self._pending) >= _MOST_PENDING:
            self._pending.popleft().result()
        future = self._writer.submit(self._write, data, at)
        self._pending.append(future)
        return future

    def _check(self) -> None:
        """Raise what has gone wrong so far."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            try:
                written = os.pwrite(self._descriptor, data, at)
            except OSError as error:
                if not (self.direct and error.errno in _REFUSALS):
                    raise self._named(error) from None
                self.refused = True
                self._use_cache()
                continue
            if written == 0:
                raise OSError(errno.EIO, "The file takes no more bytes", str(self._path))
            failpoint("writing")
            data, at = data[written:], at + written
            if self.direct and written % PAGE:
                self._use_cache()  # what is left of this write starts inside a block

    def _use_cache(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
        self.direct = False

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))
