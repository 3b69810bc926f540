"""What the machine can do at best with as many bytes: copy them in memory, bring them off the device, put them on disk.

The rows are measured against these in the same rounds. Both sides of a copy are touched beforehand, the buffer of a
write is page-aligned, and nothing looks at what the bytes are. Each function returns what is to be timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROW = "ceiling"  # that all other rows of its table are a ratio to
_PAGE_BYTES = 4096
_CHUNK_BYTES = 64 * 2**20  # one write; any length from a few MiB on is as fast


def memmove(nbytes: int) -> Callable[[], torch.Tensor]:
    """Two threads, each with one ``memmove`` of half the bytes, without the GIL. Returns what was written.

    glibc copies around the caches where a single copy is long enough. Both blocks have huge pages where there are any.
    """
    source, target = (torch.frombuffer(_memory(nbytes), dtype=torch.uint8) for _ in range(2))
    crew, half = ThreadPoolExecutor(1), nbytes // 2

    def copy() -> torch.Tensor:
        to, of = target.data_ptr(), source.data_ptr()
        other = crew.submit(ctypes.memmove, to + half, of + half, nbytes - half)
        ctypes.memmove(to, of, half)
        other.result()
        return target

    return copy


def device_copy(nbytes: int, device: str) -> Callable[[], torch.Tensor]:
    """One copy from the device into page-locked host memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return lambda: target.copy_(source, non_blocking=True)


def raw_write(nbytes: int) -> Callable[[Path], None]:
    """One file in a directory, written from an aligned buffer past the page cache if that can be; not flushed."""
    buffer = _memory(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)

    def write(folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            file = os.open(folder / "bytes", flags | os.O_DIRECT)
        except OSError:  # of a file system that has no O_DIRECT
            file = os.open(folder / "bytes", flags)
        try:
            at = 0
            while at < len(buffer):
                at += os.pwrite(file, memoryview(buffer)[at : at + _CHUNK_BYTES], at)
        finally:
            os.close(file)

    return write


def flush(folder: Path) -> None:
    """Have every file below ``folder``, and each directory, on the disk when this returns."""
    for place, _, files in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in files), place):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    return memory
