"""The machine's best speed for a number of bytes: a copy in host memory, or from the device to host memory.

Rows are measured against these copies in the same rounds. All memory is touched beforehand. ``memmove`` and
``device_copy`` return the function to time.
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

ROW = "ceiling"  # row that the ratios of all other rows refer to


def memmove(nbytes: int) -> Callable[[], torch.Tensor]:
    """Return a function that copies with two threads; each calls ``memmove`` for half the bytes, without the GIL.

    For long copies glibc bypasses the caches. Both blocks use huge pages if available.
    """
    source, target = (torch.frombuffer(memory(nbytes), dtype=torch.uint8) for _ in range(2))
    crew, half = ThreadPoolExecutor(1), nbytes // 2

    def copy() -> torch.Tensor:
        to, of = target.data_ptr(), source.data_ptr()
        other = crew.submit(ctypes.memmove, to + half, of + half, nbytes - half)
        ctypes.memmove(to, of, half)
        other.result()
        return target

    return copy


def device_copy(nbytes: int, device: str) -> Callable[[], torch.Tensor]:
    """Return a function that copies from the device to page-locked host memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return lambda: target.copy_(source, non_blocking=True)


def flush(folder: Path) -> None:
    """Write every file and directory under ``folder`` to the disk (``fsync``)."""
    for place, _, files in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in files), place):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def memory(nbytes: int) -> mmap.mmap:
    """Return page-aligned, initialized memory, with huge pages if available."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(made, dtype=torch.uint8).fill_(1)
    return made
