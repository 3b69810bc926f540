"""What the machine can do at best with as many bytes: copy them in memory, or bring them off the device.

The rows are measured against these in the same rounds. Both sides of a copy are touched beforehand, and nothing looks
at what the bytes are. ``memmove`` and ``device_copy`` return what is to be timed.
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


def memmove(nbytes: int) -> Callable[[], torch.Tensor]:
    """Two threads, each with one ``memmove`` of half the bytes, without the GIL. Returns what was written.

    glibc copies around the caches where a single copy is long enough. Both blocks have huge pages where there are any.
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
    """One copy from the device into page-locked host memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return lambda: target.copy_(source, non_blocking=True)


def flush(folder: Path) -> None:
    """Have every file below ``folder``, and each directory, on the disk when this returns."""
    for place, _, files in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in files), place):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def memory(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory that was written, with huge pages if the machine has any."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(made, dtype=torch.uint8).fill_(1)
    return made
