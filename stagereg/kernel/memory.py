"""Host memory for copies: blocks of memory, and the pool that leases them.

A :class:`Block` consists of whole pages. They are pre-faulted, and page-locked if this speeds up copies from an
accelerator. A :class:`Lease` covers one copy: it ends when the last tensor of the copy is freed, or when the reader of
the copy calls :meth:`Pool.release`. A block returns to the pool when no tensor uses it.

If ``max_in_flight`` copies are leased, :meth:`Pool.lease` waits until a lease ends: at most ``wait_s`` seconds if the
reader declared that it will release its copies (``Pool.readers_release``), otherwise at most one second. Then it uses
new memory, logs this once, and from then on no longer waits for a reader that does not release copies.

A forked child, such as a worker of a ``DataLoader``, does not get the blocks, because each write of the parent to a
page shared with a child costs a page fault. Exception: the child may read copies whose reader does not release them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from stagereg.base.forks import PrivateMemory, RenewedInChild, private_memory
from stagereg.errors import StagerClosedError, StagingError

log = logging.getLogger("stagereg")

WAIT_WITHOUT_RELEASE_S = 1.0
"""Maximum seconds that the pool waits for a reader that does not release its copies."""

_POLL_S = 0.002
_COLLECT_EVERY_S = 1.0
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGE_PAGE = 2**21
_PAGE = 4096
_WORTH_TOUCHING = 2**22
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class Block:
    """One block of host memory, in whole pages, pre-faulted by ``threads``. A forked child does not get the block."""

    _private: PrivateMemory | None = None  # the memory, if it can be hidden from a forked child

    def __init__(self, nbytes: int, pin: bool, threads: int = 1) -> None:
        self.nbytes = _whole_pages(nbytes)
        self._memory = self._map()
        if self.nbytes >= _WORTH_TOUCHING and (not pin or torch.cuda.is_available()):
            self._touch(threads)
        if pin:
            self._lock()

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

    def _lock(self) -> None:
        """Page-lock the memory until it is unmapped.

        With CUDA, this does not use torch's allocator, which would round the size up and cache freed memory.
        """
        try:
            if not torch.cuda.is_available():
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                self._private = None
                return
            if code := int(torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, _FOR_ALL_DEVICES)):
                with contextlib.suppress(RuntimeError):  # clears the CUDA error, which torch would raise later
                    torch.zeros(1, dtype=torch.uint8, device="cuda")
                raise RuntimeError(f"CUDA error {code}")
            owner = os.getpid(), torch.cuda.current_device()
            weakref.finalize(self._memory, _unlock, *owner, self.address).atexit = False
        except RuntimeError as error:
            log.warning("stagereg: cannot page-lock %d bytes (%s). Using pageable memory.", self.nbytes, error)

    def _map(self) -> torch.Tensor:
        # Uses private pages. Shared pages, the default of mmap, are slower to allocate and cannot be huge pages.
        try:
            self._private = private_memory(self.nbytes)
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            raise StagingError([], f"cannot allocate {self.nbytes / 2**30:.2f} GiB of host memory ({error})") from error
        return torch.frombuffer(self._private, dtype=torch.uint8)

    def _touch(self, threads: int) -> None:
        """Populate the pages now, on several threads, so that the copy causes no page faults.

        If the kernel lacks this feature, nothing is populated, and the first use of each page causes a page fault.
        """
        # mmap.madvise would block all Python threads, because it holds the GIL.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(self.address, self.nbytes, _MADV_HUGEPAGE)
        share = -(-self.nbytes // threads // _HUGE_PAGE) * _HUGE_PAGE
        starts = range(0, self.nbytes, share)
        first, *others = [(self.address + at, min(share, self.nbytes - at), _MADV_POPULATE_WRITE) for at in starts]
        with ThreadPoolExecutor(threads) as workers:
            for call in others:
                workers.submit(advise, *call)
            advise(*first)  # on this thread, after all threads have started: populating blocks their start


def _unlock(process: int, device: int, address: int) -> None:
    if process != os.getpid():  # CUDA cannot be used in a forked child
        return
    with torch.cuda.device(device):  # so that CUDA does not initialize another device
        torch.cuda.cudart().cudaHostUnregister(address)


def view_of(memory: torch.Tensor) -> memoryview:
    """Return a new memoryview of a uint8 tensor. The memoryview keeps the tensor alive."""
    block = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())
    block._owner = memory  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


class Lease:
    """The right of one copy to use a block. See :meth:`Pool.lease`."""

    def __init__(self, block: Block, copies: weakref.WeakValueDictionary[int, Lease]) -> None:
        self.block = block
        self._copies = copies

    def view(self) -> memoryview:
        """Return a new memoryview of the block. While it exists, the lease lasts and the block is not reused."""
        view = self.block.view()
        owner: Any = view.obj
        owner.held = self
        return view

    def hand_out(self, copy: Any) -> Any:
        """Return ``copy``, after registering it so that ``Pool.release(copy)`` ends this lease."""
        self._copies[id(copy)] = self
        return copy


class Pool:
    """Leases blocks of memory to a limited number of copies at the same time.

    One copy::

        lease = pool.lease(nbytes)
        view = lease.view()  # create tensors over it with torch.frombuffer
        return lease.hand_out(state_dict_of_those_tensors)

    The pool retains unused blocks, the largest first, up to ``max_in_flight`` times the size of one copy. Only one
    thread at a time may call :meth:`lease`. :meth:`release` and :meth:`close` are thread-safe.

    Args:
        max_in_flight: number of leases from which on :meth:`lease` waits; None: unlimited.
        wait_s: maximum seconds that :meth:`lease` waits.
        keep: True: reuse returned blocks. False: free them.
        pin: whether to page-lock the memory; None: if an accelerator is available. If this fails, the pool uses
            pageable memory and logs the failure.
        threads: number of threads that pre-fault new pages.

    Attributes:
        readers_release: whether the reader declared that it will :meth:`release` its copies; initially False.
    """

    def __init__(
        self,
        max_in_flight: int | None = 2,
        wait_s: float = 60.0,
        keep: bool = True,
        pin: bool | None = None,
        threads: int = 2,
    ) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise StagingError([], f"stager.max_in_flight must be at least 1, got {max_in_flight}")
        self.max_in_flight = math.inf if max_in_flight is None else max_in_flight
        self.wait_s = wait_s
        self.readers_release = False
        self._expected = 0  # bytes of one copy
        there = torch.accelerator.is_available()
        # Only the first rank of each machine logs this.
        if keep and pin is not False and not there and os.environ.get("LOCAL_RANK", "0") == "0":
            log.info(
                "stagereg: no accelerator is available, so copies are staged in pre-faulted memory that is not "
                "page-locked."
            )
        self._make = lambda nbytes: Block(nbytes, pin is not False and there, threads)
        self._keep = keep
        # Finalizers, on any thread, change each of these two attributes in one atomic operation.
        self._out: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._free: list[Block] = []
        self._copies: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        self._overdrawn = False
        self._closed = False
        self._in_use: weakref.WeakSet[Lease] = weakref.WeakSet()  # leased or released, with a block in use
        _pools.add(self)

    @property
    def in_flight(self) -> int:
        """Number of leased copies."""
        return len(self._out)

    def lease(self, nbytes: int) -> Lease:
        """Return a lease for a copy of ``nbytes`` bytes. Waits if ``max_in_flight`` copies are leased already."""
        self.check_open()
        if self.in_flight >= self.max_in_flight:
            self._wait()
        block = self._block(nbytes)
        lease = Lease(block, self._copies)
        self._out.add(lease)
        self._in_use.add(lease)
        # This finalizer runs before the WeakSets drop the lease, so the block is back when the lease ends.
        weakref.finalize(lease, _give_back, weakref.ref(self), block, os.getpid()).atexit = False
        return lease

    def _block(self, nbytes: int) -> Block:
        if nbytes > self._expected:
            self._expected = nbytes
            self._free = [block for block in self._free if block.nbytes >= nbytes]
        self._trim()
        fitting = [block for block in self._free if nbytes <= block.nbytes]
        if not fitting:
            return self._make(nbytes)
        block = min(fitting, key=lambda block: block.nbytes)
        self._free.remove(block)
        return block

    def release(self, copy: object) -> None:
        """End the lease of a copy, and clear the copy if it is a dict. Thread-safe.

        Memory is reused only after all tensors over it are freed.
        """
        lease = self._copies.pop(id(copy), None)
        if isinstance(copy, dict):
            copy.clear()  # first, so that a waiting ``lease`` finds the block in the pool
        if lease is not None:
            self._out.discard(lease)

    def check_open(self) -> None:
        """Raise ``StagerClosedError`` after :meth:`close`."""
        if self._closed:
            raise StagerClosedError

    def close(self) -> None:
        """Free unused blocks. A block in use is freed when its readers release it. Idempotent."""
        self._closed = True
        self._free.clear()

    def inherit_copies(self, inherited: bool) -> None:
        """Set whether a forked child gets copies, unless their reader declared that it will release them."""
        if not self.readers_release:
            for lease in list(self._in_use):
                lease.block.inherit(inherited)

    def renew(self) -> None:
        """In a forked child, drop all blocks and copies, because they belong to the parent process."""
        self._out, self._copies, self._in_use = weakref.WeakSet(), weakref.WeakValueDictionary(), weakref.WeakSet()
        self._free = []

    def _wait(self) -> None:
        limit = self.wait_s if self.readers_release else min(self.wait_s, WAIT_WITHOUT_RELEASE_S)
        if self._overdrawn and not self.readers_release:
            limit = 0.0
        # A failed save can leave its copy in an unreachable reference cycle, which garbage collection frees. Collection
        # is slow, so first wait up to a second for a reader that releases its copies.
        collect_at = min(_COLLECT_EVERY_S, limit / 2) if self.readers_release else 0.0
        began = time.monotonic()
        while self.in_flight >= self.max_in_flight:
            waited = time.monotonic() - began
            if waited >= collect_at:
                gc.collect()
                collect_at = waited + _COLLECT_EVERY_S
            elif waited >= limit:
                break
            else:
                time.sleep(_POLL_S)
                self.check_open()
        if self.in_flight >= self.max_in_flight and not self._overdrawn:
            self._overdrawn = True
            text = "stagereg: %d staged copies are still held after %.1f s, so new memory is allocated. "
            text += "Drop copies that are no longer needed, or raise max_in_flight."
            log.warning(text, self.in_flight, limit)

    def _trim(self) -> None:
        most = self.max_in_flight * _whole_pages(self._expected)
        while sum(block.nbytes for block in self._free) > most:
            self._free.remove(min(self._free, key=lambda block: block.nbytes))


def _whole_pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _PAGE) * _PAGE


def _give_back(pool: weakref.ref[Pool], block: Block, process: int) -> None:
    """Return a block to its pool. Called by a finalizer, on any thread, so it takes no lock."""
    owner = pool()
    if owner is not None and owner._keep and not owner._closed and process == os.getpid():
        owner._free.append(block)


def _inherit_copies(inherited: bool) -> None:
    for pool in _pools:
        pool.inherit_copies(inherited)


_pools = RenewedInChild(Pool.renew)
os.register_at_fork(before=lambda: _inherit_copies(True), after_in_parent=lambda: _inherit_copies(False))
