"""Writes a file in large pieces, to a disk with ``O_DIRECT`` or to an object store.

With ``O_DIRECT`` the disk reads the program's memory directly: no copy, little CPU time, and no page evicted from the
page cache. The address, offset and length of such a write must be multiples of a disk block. So small data goes through
two aligned buffers, whole pages are written directly if they are page-aligned in the file too, and the end of the file
goes through the page cache. A thread writes while the caller's thread computes the CRC-32; both release the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Sequence
from mmap import MADV_HUGEPAGE

from stagereg.base.forks import private_memory
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.damage import joined
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.store.backend import Sink
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.local_files import PAGE

BLOCK_BYTES = 4 << 20  # each block of a file has its own CRC-32; the last block may be shorter

_UNLOCKED_COPY_BYTES = 1 << 16  # size of the smallest copy that releases the GIL
_STRAIGHT_BYTES = 1 << 20  # size of the smallest memory that is written without a buffer
_CHUNK_BYTES = 1 << 24
_MOST_PENDING = 8  # maximum pieces in the queue; more would hold the caller's memory too long


class AlignedFile(contextlib.AbstractContextManager["AlignedFile"]):
    """A new file. A thread writes its data to ``target`` in order. If no thread can be started, the caller writes.

    Small writes go through ``buffers`` (:func:`make_buffers`), which another file may use afterwards. Call
    :meth:`finish` before the context manager exits. Methods raise the ``OSError`` of the current or an earlier write.
    ``blocks``: the CRC-32 of each written block of :data:`BLOCK_BYTES`.
    """

    def __init__(self, target: Sink, buffers: Sequence[memoryview]) -> None:
        self._target = target
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._buffer = self._free.get()
        self._filled = 0  # bytes in the buffer
        self._begin = 0  # offset of the buffer in the file, a multiple of PAGE
        self.blocks: list[int] = []
        self._error: BaseException | None = None  # the error that has stopped all writes
        self._whole = False
        # Pairs of the data to write, and the buffer (or ``None``) that becomes free afterwards.
        self._writes: queue.Queue[tuple[memoryview, memoryview | None] | None] = queue.Queue(_MOST_PENDING)
        # Not an executor: the exit of the process would wait for its thread, although a disk may never respond.
        self._thread = threading.Thread(target=self._work, name="stagereg-write", daemon=True)
        self._has_thread = True
        try:
            self._thread.start()
        except RuntimeError:  # Python 3.12 does not start threads while a process exits
            self._has_thread = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = self._error or error
        if self._has_thread:
            self._writes.put(None)
            self._thread.join()
        self._target.close(self._whole)
        self._error = None  # breaks a reference cycle between the error and the caller's memory

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._begin + self._filled

    def flush(self) -> None:
        """Do nothing: ``torch.save`` calls this after each tensor, but only :meth:`finish` must write all data."""

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes and return their number."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            if self._filled == len(self._buffer):
                self._submit_buffer()
            count = min(len(rest), len(self._buffer) - self._filled)
            _copy(self._buffer[self._filled : self._filled + count], rest[:count])
            self._filled += count
            rest = rest[count:]
        return size

    def align(self, address: int, nbytes: int) -> None:
        """Pad with zeros, so that large memory of ``nbytes`` at ``address`` can be written without a buffer."""
        if nbytes >= _STRAIGHT_BYTES:
            self.write(bytes((address - self.tell()) % PAGE))

    def write_memory(self, data: memoryview) -> None:
        """Write memory, which must not change until :meth:`finish`. Its view is released as soon as it is written.

        After :meth:`align`, only the two ends of large memory go through a buffer.
        """
        before = -address(data) % PAGE if len(data) >= _STRAIGHT_BYTES else 0
        end = len(data) - (len(data) - before) % PAGE
        if end - before >= _STRAIGHT_BYTES and (self.tell() + before) % PAGE == 0:
            self.write(data[:before])
            self._submit_buffer()
            for at in range(before, end, _CHUNK_BYTES):
                self._submit(data[at : min(at + _CHUNK_BYTES, end)])
            data = data[end:]
        self.write(data)

    def finish(self) -> FileDigest:
        """Wait until all data is written, make the file durable and return its digest."""
        self._submit_buffer()
        self._writes.join()
        self.raise_error()
        self._target.end()
        self._whole = True
        failpoint("flushed")
        sizes = (min(BLOCK_BYTES, self._begin - at) for at in range(0, self._begin, BLOCK_BYTES))
        return joined(map(FileDigest, sizes, self.blocks))

    def raise_error(self) -> None:
        """Raise the error of a failed write, if there is one."""
        if self._error is not None:
            raise self._error from None

    def _submit_buffer(self) -> None:
        if self._filled:
            self._submit(self._buffer[: self._filled], self._buffer)
            self._buffer, self._filled = self._free.get(), 0

    def _submit(self, data: memoryview, buffer: memoryview | None = None) -> None:
        self.raise_error()
        if self._has_thread:
            self._writes.put((data, buffer))
        else:
            self._write(data, buffer)
        while data:
            begun = self._begin % BLOCK_BYTES
            block, data = data[: BLOCK_BYTES - begun], data[BLOCK_BYTES - begun :]
            self.blocks.append(crc32(block, self.blocks.pop() if begun else 0))
            self._begin += len(block)

    def _work(self) -> None:
        while (given := self._writes.get()) is not None:
            self._write(*given)
            del given  # releases the memory as soon as possible
            self._writes.task_done()

    def _write(self, data: memoryview, buffer: memoryview | None) -> None:
        try:
            if self._error is None:
                self._target.write(data)
        except BaseException as error:
            self._error = error.with_traceback(None)
        if buffer is not None:
            self._free.put(buffer)


def make_buffers(nbytes: int) -> list[memoryview]:
    """Return two buffers of ``nbytes``, a multiple of a page. With huge pages, disk writes take a quarter less time."""
    buffers = [private_memory(nbytes) for _ in range(2)]
    for each in buffers:
        with contextlib.suppress(OSError):
            each.madvise(MADV_HUGEPAGE)
    return [memoryview(each) for each in buffers]


def _copy(to: memoryview, data: memoryview) -> None:
    """Copy bytes. Releases the GIL for large copies, unlike a slice assignment."""
    if len(data) < _UNLOCKED_COPY_BYTES or data.readonly:
        to[:] = data
    else:
        ctypes.memmove(address(to), address(data), len(data))


def address(memory: memoryview) -> int:
    """Return the address of the first byte of ``memory``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
