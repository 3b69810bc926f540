"""A file written in large pieces, to a disk past its page cache, or to an object store.

With ``O_DIRECT`` the disk reads memory itself, without a copy, processor time, or a page evicted. Address, offset and
length of such writes must be multiples of a block, so small data goes through two aligned buffers, and whole pages of
memory are written directly if they are page-aligned in the file too; the end goes through the page cache. A thread
writes while the caller's thread takes the CRC-32 of the same bytes; both release the GIL.
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

BLOCK_BYTES = 4 << 20  # bytes of a file with one CRC-32; the last block may be shorter

_WORTH_LETTING_GO = 1 << 16  # bytes whose copy takes longer than another thread's turn
_STRAIGHT_BYTES = 1 << 20  # least size of memory that is written without a buffer
_CHUNK_BYTES = 1 << 24
_MOST_PENDING = 8  # pieces in the queue; more would hold the caller's memory too long


class AlignedFile:
    """A new file, ``target``, written in order by a thread, or by the caller if no thread can be started.

    Small writes go through ``buffers`` (:func:`make_buffers`), which another file may use afterwards. Call
    :meth:`finish` before the context manager ends. Methods raise the ``OSError`` of their write, or of an earlier one.

    Attributes:
        blocks: the CRC-32 of each written block of :data:`BLOCK_BYTES`.
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
        # The data to write, and the buffer that is free afterwards.
        self._writes: queue.Queue[tuple[memoryview, memoryview | None] | None] = queue.Queue(_MOST_PENDING)
        # Not an executor's thread: the end of the process would wait for it, although a disk may never answer.
        self._thread = threading.Thread(target=self._work, name="stagereg-write", daemon=True)
        try:
            self._thread.start()
            self._has_thread = True
        except RuntimeError:  # Python 3.12 starts no thread any more while a process ends
            self._has_thread = False

    def __enter__(self) -> AlignedFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._error = self._error or error
        if self._has_thread:
            self._writes.put(None)
            self._thread.join()
        self._target.close(self._whole)
        self._error = None  # otherwise the error and the caller's memory would keep each other alive

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._begin + self._filled

    def flush(self) -> None:
        """Do nothing yet: ``torch.save`` flushes after each tensor."""

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; return how many."""
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
        """Write zeros until ``nbytes`` at ``address`` can follow without a buffer, if there are enough of them."""
        if nbytes >= _STRAIGHT_BYTES:
            self.write(bytes((address - self.tell()) % PAGE))

    def write_memory(self, data: memoryview) -> None:
        """Write memory, which must not change until :meth:`finish`; the view is held only as long as needed.

        Large memory after :meth:`align` needs a buffer only for its ends.
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
        return joined(
            FileDigest(min(BLOCK_BYTES, self._begin - number * BLOCK_BYTES), crc)
            for number, crc in enumerate(self.blocks)
        )

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
    """Return two new buffers of ``nbytes``, a multiple of a page; huge pages save a disk a quarter of its time."""
    buffers = [private_memory(nbytes) for _ in range(2)]
    for each in buffers:
        with contextlib.suppress(OSError):
            each.madvise(MADV_HUGEPAGE)
    return [memoryview(each) for each in buffers]


def _copy(to: memoryview, data: memoryview) -> None:
    """Copy bytes; many of them without the interpreter lock, which an assignment would hold."""
    if len(data) < _WORTH_LETTING_GO or data.readonly:
        to[:] = data
    else:
        ctypes.memmove(address(to), address(data), len(data))


def address(memory: memoryview) -> int:
    """Return the address of memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
