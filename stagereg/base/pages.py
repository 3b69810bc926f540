"""Blocks of host memory in whole pages: pre-faulted, page-locked for copies from an accelerator, hidden from children.

Page-locking takes about 0.1 s per GB, and the driver of the accelerator may lock out other threads during a call. A
system may refuse to page-lock more than a limit, and NVIDIA drivers refuse a single call of 512 GiB. So a block is
page-locked in pieces of ``LOCKED_BYTES`` bytes, from its start. After a refusal, the rest of the block is pageable.

CUDA refuses a copy between a device and memory of which only a part is page-locked, and may refuse a copy that covers
parts of two pieces. So code that copies between a block and a device splits the copy at multiples of ``LOCKED_BYTES``
from the start of the block.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from stagereg.base.capture import relaxed_capture
from stagereg.base.forks import PrivateMemory, private_memory
from stagereg.errors import StagingError

LOCKED_BYTES = 2**30
"""Bytes of a piece of a block, which one call page-locks. Pieces start at multiples of this from the block's start."""

_BETWEEN_PIECES_S = 0.001  # seconds between two calls, in which other threads can enter the driver
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGE_PAGE = 2**21
_PAGE = 4096
_WORTH_TOUCHING = 2**22
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable
_NO_DEVICE = 127  # more than the index of any device


class Block:
    """One block of host memory, in whole pages, pre-faulted by ``threads``. A forked child does not get the block.

    ``nbytes`` is rounded up to whole pages. ``pin``: whether to page-lock the memory. If this fails, the block is
    usable nevertheless. ``check`` is called before each piece. If it raises an error, the constructor frees the memory
    and raises the error. ``locked``: the number of bytes, from the start of the block, that are page-locked.
    ``refusal``: why the rest is not page-locked although ``pin`` is true; otherwise empty. Raises: ``StagingError`` if
    the memory cannot be allocated.
    """

    _private: PrivateMemory | None = None  # the memory, if it can be hidden from a forked child

    def __init__(self, nbytes: int, pin: bool, threads: int = 1, check: Callable[[], object] = lambda: None) -> None:
        self.nbytes, self.locked, self.refusal = whole_pages(nbytes), 0, ""
        self._memory = self._map()
        if pin and not torch.cuda.is_available():
            self._allocate_locked()
            return
        addresses: list[int] = []  # addresses of the page-locked pieces
        if pin:
            owner = os.getpid(), torch.cuda.current_device()
            weakref.finalize(self._memory, _unlock, *owner, addresses).atexit = False
        for at in range(0, self.nbytes, LOCKED_BYTES):
            check()
            size = min(LOCKED_BYTES, self.nbytes - at)
            if self.nbytes >= _WORTH_TOUCHING:
                self._touch(at, size, threads)
            if pin and not self.refusal:
                self._lock(at, size, addresses)

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of 4096."""
        return self._memory.data_ptr()

    def view(self) -> memoryview:
        """Return a new view of the whole block. The block lives as long as any view."""
        return view_of(self._memory)

    def inherit(self, inherited: bool) -> None:
        """Set whether children that are forked from now on get the block."""
        if self._private is not None:
            self._private.inherit(inherited)

    def _map(self) -> torch.Tensor:
        # Uses private pages. Shared pages, the default of mmap, are slower to allocate and cannot be huge pages.
        try:
            self._private = private_memory(self.nbytes)
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            raise StagingError([], f"cannot allocate {self.nbytes / 2**30:.2f} GiB of host memory ({error})") from error
        return torch.frombuffer(self._private, dtype=torch.uint8)

    def _allocate_locked(self) -> None:
        """Replace the memory by memory of the accelerator's own allocator, in one piece."""
        try:
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._private, self.locked = None, self.nbytes
        except RuntimeError as error:
            self.refusal = str(error)

    def _lock(self, at: int, size: int, addresses: list[int]) -> None:
        """Page-lock one piece until the memory is unmapped.

        Does not use torch's allocator, which would round the size up and cache freed memory.
        """
        try:
            if at:
                time.sleep(_BETWEEN_PIECES_S)
            with relaxed_capture():
                code = int(torch.cuda.cudart().cudaHostRegister(self.address + at, size, _FOR_ALL_DEVICES))
                if code:
                    _clear_error()
                    raise RuntimeError(f"CUDA error {code}")
        except RuntimeError as error:
            self.refusal = str(error)
        else:
            addresses.append(self.address + at)
            self.locked = at + size

    def _touch(self, at: int, size: int, threads: int) -> None:
        """Populate the pages of one piece now, on several threads, so that the copy causes no page faults.

        If the kernel lacks this feature, nothing is populated, and the first use of each page causes a page fault.
        """
        # mmap.madvise would block all Python threads, because it holds the GIL.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start = self.address + at
        advise(start, size, _MADV_HUGEPAGE)
        share = -(-size // threads // _HUGE_PAGE) * _HUGE_PAGE
        first, *others = [(start + k, min(share, size - k), _MADV_POPULATE_WRITE) for k in range(0, size, share)]
        with ThreadPoolExecutor(threads) as workers:
            for call in others:
                workers.submit(advise, *call)
            advise(*first)  # on this thread, after all threads have started: populating blocks their start


def _unlock(process: int, device: int, addresses: list[int]) -> None:
    """Unlock the pieces at ``addresses``. Called by a finalizer, on any thread, while the memory is still mapped."""
    if not addresses or process != os.getpid():  # CUDA cannot be used in a forked child
        return
    with relaxed_capture(), torch.cuda.device(device):  # so that CUDA does not initialize another device
        for address in addresses:
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                _clear_error()


def _clear_error() -> None:
    """Clear the CUDA error of this thread, which torch would raise later: torch clears it when it raises another."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.set_device(_NO_DEVICE)


def view_of(memory: torch.Tensor) -> memoryview:
    """Return a new memoryview of a uint8 tensor. The memoryview keeps the tensor alive."""
    block = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    block._owner = memory  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages, at least one."""
    return -(-max(nbytes, 1) // _PAGE) * _PAGE
