"""The ceiling: the fastest possible copy on this machine, in host memory or from the device to host memory.

The ceiling is measured in the same rounds as the rows that are compared with it. All memory is initialized before the
measurement, so that page faults do not count. ``memmove`` and ``device_copy`` return the function to time.
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

from stagereg.base.small_files import sync

ROW = "ceiling"  # name of the row by which the times of all other rows are divided


def memmove(nbytes: int) -> Callable[[], torch.Tensor]:
    """Return a function that copies ``nbytes`` in host memory: two threads each call ``memmove`` for half of them.

    Neither thread holds the GIL. Memory uses huge pages if available. For long copies, glibc bypasses the CPU caches.
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
    """Return a function that copies ``nbytes`` from the device to page-locked host memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return lambda: target.copy_(source, non_blocking=True)


def flush(folder: Path) -> None:
    """Flush every file and directory under ``folder`` to the disk (``fsync``)."""
    for place, _, files in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in files), place):
            sync(path)


def memory(nbytes: int) -> mmap.mmap:
    """Allocate and initialize page-aligned memory, with huge pages if available."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        made.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(made, dtype=torch.uint8).fill_(1)
    return made
