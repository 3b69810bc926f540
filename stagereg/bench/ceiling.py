"""What the machine can do at best with as many bytes: copy them in memory, bring them off the device, put them on disk.

The rows are measured against these in the same rounds. Both sides of a copy are touched beforehand, the buffer of a
write is page-aligned, and nothing looks at what the bytes are.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from stagereg.bench.measure import Case, Stopwatch

__all__ = ["DeviceCopy", "Memmove", "RawWrite", "flush"]

_THREADS = 2
_PAGE_BYTES = 4096
_CHUNK_BYTES = 64 * 2**20  # one write; any length from a few MiB on is as fast


class Memmove(Case):
    """Two threads, each with one ``memmove`` of half the bytes, without the GIL.

    glibc copies around the caches where a single copy is long enough. Both blocks have huge pages where there are any.
    """

    def __init__(self, row: str, nbytes: int) -> None:
        super().__init__(row)
        self._from = torch.frombuffer(_memory(nbytes), dtype=torch.uint8)
        self._to = torch.frombuffer(_memory(nbytes), dtype=torch.uint8)
        self._crew = ThreadPoolExecutor(_THREADS - 1)

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Copy all bytes once."""
        to, source, nbytes = self._to.data_ptr(), self._from.data_ptr(), self._to.nbytes
        half = nbytes // _THREADS
        watch.start()
        other = self._crew.submit(ctypes.memmove, to + half, source + half, nbytes - half)
        ctypes.memmove(to, source, half)
        other.result()
        return {self.rows[0]: watch.lap()}

    def close(self) -> None:
        """End the thread and free both blocks."""
        self._crew.shutdown()
        self._from = self._to = torch.empty(0, dtype=torch.uint8)


class DeviceCopy(Case):
    """One copy from the device into page-locked host memory."""

    def __init__(self, row: str, nbytes: int, device: str) -> None:
        super().__init__(row)
        self._from = torch.ones(nbytes, dtype=torch.uint8, device=device)
        self._to = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Copy all bytes once."""
        watch.start()
        self._to.copy_(self._from, non_blocking=True)
        return {self.rows[0]: watch.lap()}

    def close(self) -> None:
        """Free both sides."""
        self._from = self._to = torch.empty(0, dtype=torch.uint8)


class RawWrite(Case):
    """One file, written from an aligned buffer past the page cache, and flushed; padded to whole pages.

    Args:
        fresh: gives a new empty directory, and takes the ones before away.
        note: called once with a text if the file system refuses O_DIRECT, and the ceiling is a buffered write.
    """

    def __init__(self, row: str, nbytes: int, fresh: Callable[[], Path], note: Callable[[str], None]) -> None:
        super().__init__(row)
        self._buffer = _memory(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)
        self._fresh = fresh
        self._note = note
        self._flags = getattr(os, "O_DIRECT", 0)

    def sample(self, watch: Stopwatch) -> Mapping[str, float]:
        """Write all bytes once."""
        folder = self._fresh()
        if self._flags:
            try:
                return {self.rows[0]: self._write(folder, watch)}
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._flags = 0
                folder = self._fresh()
        self._note("O_DIRECT is refused by this file system: the ceiling is a buffered write with fsync.")
        return {self.rows[0]: self._write(folder, watch)}

    def close(self) -> None:
        """Free the buffer."""
        self._buffer.close()

    def _write(self, folder: Path, watch: Stopwatch) -> float:
        watch.start()
        file = os.open(folder / "bytes", os.O_WRONLY | os.O_CREAT | self._flags)
        try:
            with memoryview(self._buffer) as view:
                at = 0
                while at < len(view):
                    with view[at : at + _CHUNK_BYTES] as chunk:
                        at += os.pwrite(file, chunk, at)
        finally:
            os.close(file)
        flush(folder)
        return watch.lap()


def _memory(nbytes: int) -> mmap.mmap:
    """Memory that is touched already, in huge pages if the system gives them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    return memory


def flush(folder: Path) -> None:
    """Have every file below ``folder``, and each directory, on the disk when this returns."""
    for place, _, files in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in files), place):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
