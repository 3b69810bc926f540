"""Host memory that is lent out, and comes back when its last reader is gone.

A :class:`Block` is one block: page-locked where an accelerator is there to profit, otherwise ordinary pages that were
touched ahead of use. A :class:`Pool` lends blocks. What it lends is a ``memoryview``; every tensor made over that view
(``torch.frombuffer``) keeps it alive through its storage, so the lease ends when the last storage is freed, whoever
held it, on whatever thread. No reference count is kept by hand.

A block may be of another making (:class:`Pool`'s ``make``), such as one that other processes read as well; then
:attr:`Block.idle` says when all of them are done.

A pool lends at most ``max_in_flight`` blocks at once. Who asks for more waits for a writer to let go, and only as long
as one can be seen (``writers``): if no other thread holds a copy, or ``wait_s`` is over, fresh memory is taken and a
warning says so once. So waiting never deadlocks, and memory that is lent is never handed out again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.waiting import OVERDRAWN, wait_while
from stagereg.kernel.writers import COPY_THREADS, writer_at_work

__all__ = ["Block", "Lease", "Padding", "Pool", "padding_around", "register_padding"]

log = logging.getLogger("stagereg")

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_HUGE_PAGE = 2**21
_PAGE = 4096
_WORTH_TOUCHING = 2**22


class Block:
    """One block of host memory, whole pages.

    Args:
        nbytes: at least so many bytes.
        pin: page-lock it, if that can be.
        threads: threads that touch the new pages.

    Attributes:
        nbytes: bytes there are, a multiple of 4096.
        address: of the first byte, a multiple of 4096.
        pinned: whether it is page-locked.
    """

    def __init__(self, nbytes: int, pin: bool, threads: int = 1) -> None:
        self.nbytes = -(-max(nbytes, 1) // _PAGE) * _PAGE
        self.pinned = False
        self._owner: object = None
        if pin:
            self._pin()
        if not self.pinned:
            self._map(threads)

    @property
    def idle(self) -> bool:
        """Whether it may be lent again, once it has come back in this process."""
        return True

    def view(self) -> memoryview:
        """A new view of the whole block. The block lives while any view does."""
        block = (ctypes.c_char * self.nbytes).from_address(self.address)
        block._owner = self._owner  # type: ignore[attr-defined]
        return memoryview(block).cast("B")

    def _pin(self) -> None:
        try:
            block = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.warning("stagereg: %d bytes could not be page-locked (%s); using pageable memory", self.nbytes, error)
            return
        self._owner, self.address, self.pinned = block, block.data_ptr(), True

    def _map(self, threads: int) -> None:
        # Private pages: the shared ones that mmap makes by default are slower to get and cannot be huge.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
        try:
            block = mmap.mmap(-1, self.nbytes, **private)
        except (OSError, MemoryError, ValueError) as error:
            raise StagingError([], f"no {self.nbytes / 2**30:.2f} GiB of host memory to be had ({error})") from error
        self._owner, self.address = block, ctypes.addressof(ctypes.c_char.from_buffer(block))
        if self.nbytes >= _WORTH_TOUCHING and sys.platform.startswith("linux"):
            self._touch(threads)

    def _touch(self, threads: int) -> None:
        """Have the kernel back the pages now, on several threads, instead of one fault at a time during the copy.

        A kernel that does not know how answers with an error, and pages are then touched on first use.
        """
        # Not mmap.madvise, which would keep all of Python waiting: it holds the GIL.
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(self.address, self.nbytes, _MADV_HUGEPAGE)
        share = -(-self.nbytes // threads // _HUGE_PAGE) * _HUGE_PAGE
        starts = range(0, self.nbytes, share)
        calls = [(self.address + at, min(share, self.nbytes - at), _MADV_POPULATE_WRITE) for at in starts]
        workers = [threading.Thread(target=advise, args=call) for call in calls[1:]]
        for worker in workers:
            worker.start()
        advise(*calls[0])
        for worker in workers:
            worker.join()


class Lease:
    """A block for one copy.

    Attributes:
        view: what tensors are made over; the lease ends when it is gone.
        address: of the first byte.
        nbytes: of the whole block.
        pinned: whether the memory is page-locked.
    """

    __slots__ = ("address", "nbytes", "pinned", "view")

    def __init__(self, block: Block, view: memoryview) -> None:
        self.view = view
        self.address = block.address
        self.nbytes = block.nbytes
        self.pinned = block.pinned


class Pool:
    """Lends blocks, a bounded number at once.

    Args:
        max_in_flight: loans at once before one has to wait.
        wait_s: seconds that one waits at most while a writer is at work.
        keep: reuse a block that came back; otherwise free it.
        pin: page-lock; None means where an accelerator is available. Where that cannot be, pageable memory is used and
            one log line says so.
        threads: threads that touch new pages.
        reserve: bytes of a first block that is made at once, in the background; 0 for none.
        make: what makes a block of so many bytes, page-locked or not, with so many threads.
    """

    def __init__(
        self,
        max_in_flight: int | None = 2,
        wait_s: float = 60.0,
        keep: bool = True,
        pin: bool | None = None,
        threads: int = 2,
        reserve: int = 0,
        make: Callable[[int, bool, int], Block] = Block,
    ) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise StagingError([], f"max_in_flight must be at least 1, not {max_in_flight}")
        self._max = max_in_flight
        self._wait_s = wait_s
        self._keep = keep
        self._threads = threads
        self._make = make
        self._pin = self._can_pin(pin)
        self._free: list[Block] = []
        self._lent: dict[int, tuple[int, int]] = {}  # serial number of a lease -> address and bytes of its block
        self._returned: queue.SimpleQueue[tuple[int, Block | None]] = queue.SimpleQueue()  # put() is safe in finalizers
        self._serial = 0
        self._overdrawn = False
        self._closed = False
        self._lock = threading.Lock()
        self._reserving: threading.Thread | None = None
        if reserve:
            self._reserving = threading.Thread(target=self._reserve, args=(reserve,), name=f"{COPY_THREADS}-reserve")
            self._reserving.start()

    def _reserve(self, nbytes: int) -> None:
        try:
            self._free.append(self._make(nbytes, self._pin, self._threads))
        except StagingError as error:
            log.warning("stagereg: nothing was reserved, memory is taken when it is needed: %s", error)

    def _can_pin(self, pin: bool | None) -> bool:
        there = torch.accelerator.is_available()
        first = os.environ.get("LOCAL_RANK", "0") == "0"  # of the ranks on this machine, which would all say the same
        if not there and pin is not False and self._keep and first:
            log.warning(
                "stagereg: no accelerator here, so copies are staged in pre-faulted pageable memory, not page-locked"
            )
        return there and pin is not False

    @property
    def in_flight(self) -> int:
        """Loans that are still out."""
        self._collect()
        return self._out()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory kept for the next lease."""
        self._collect()
        return sum(block.nbytes for block in self._free)

    def borrow(self, nbytes: int) -> Lease:
        """Lend ``nbytes`` bytes, waiting if ``max_in_flight`` loans are out.

        Raises:
            StagerClosedError: after :meth:`close`.
            StagingError: there is no memory left.
        """
        with self._lock:
            if self._closed:
                raise StagerClosedError
            self._await_reserve()
            self._collect()
            if self._max is not None and self._out() >= self._max:
                self._await_return()
            block = self._take(nbytes)
            view = block.view()
            self._serial += 1
            self._lent[self._serial] = (block.address, block.nbytes)
            finalizer = weakref.finalize(view, _give_back, weakref.ref(self), self._serial, block)
            finalizer.atexit = False
            return Lease(block, view)

    def close(self) -> None:
        """Free what is kept. Memory still lent lives until its readers let go. Closing twice is harmless."""
        self._closed = True
        self._await_reserve()
        self._collect()  # what has come back and was not looked at yet
        self._free.clear()

    # -- the books

    def _out(self) -> int:
        """Arenas that nobody may write to."""
        return len(self._lent) + sum(not block.idle for block in self._free)

    def _await_reserve(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _take(self, nbytes: int) -> Block:
        idle = [block for block in self._free if block.idle]
        fitting = [block for block in idle if nbytes <= block.nbytes]
        if fitting:
            best = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(best)
            return best
        # Too small for this state, which has grown; or read by another process, which keeps what it has open.
        self._free.clear()
        return self._make(nbytes, self._pin, self._threads)

    def _collect(self) -> None:
        while True:
            try:
                self._take_back(*self._returned.get_nowait())
            except queue.Empty:
                return

    def _take_back(self, serial: int, block: Block | None) -> None:
        self._lent.pop(serial, None)
        if block is None or not self._keep or self._closed:
            return
        if self._max is None or len(self._free) < self._max:
            self._free.append(block)

    # -- waiting

    def _await_return(self) -> None:
        gc.collect()  # a copy in a dead reference cycle is nobody's copy
        if wait_while(self._at_work, self._returned_enough, self._wait_s, patient=not self._overdrawn):
            return
        if not self._overdrawn:
            self._overdrawn = True
            log.warning(OVERDRAWN, self._out())

    def _at_work(self) -> bool:
        read_elsewhere = any(not block.idle for block in self._free)
        return read_elsewhere or writer_at_work(list(self._lent.values()))

    def _returned_enough(self, timeout_s: float) -> bool:
        if timeout_s:
            with contextlib.suppress(queue.Empty):
                self._take_back(*self._returned.get(timeout=timeout_s))
        self._collect()
        if self._closed:
            raise StagerClosedError
        return self._max is None or self._out() < self._max


def _give_back(pool: weakref.ref[Pool], serial: int, block: Block) -> None:
    """End a lease. Runs wherever the last reference died, in a finalizer: takes no lock."""
    owner = pool()
    if owner is not None:
        owner._returned.put((serial, block if owner._keep and not owner._closed else None))


# -- padding


@dataclass(frozen=True, slots=True)
class Padding:
    """The free bytes around a staged tensor, for a storage that writes a file's image in place.

    Attributes:
        address, nbytes: of the whole block that the copy lies in; multiples of 4096 bytes, and all of it may be read.
        before, after: bytes next to the tensor's first and last byte that nothing else uses. They belong to whoever
            holds the tensor.
    """

    address: int
    nbytes: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _PaddedBlock:
    address: int
    nbytes: int
    margins: tuple[int, int]
    spans: dict[int, int]


_padded: dict[int, _PaddedBlock] = {}  # global, since a storage has nothing but the tensor to find its padding by


def register_padding(view: memoryview, margins: tuple[int, int], spans: dict[int, int]) -> None:
    """Record padding for :func:`padding_around`, as long as ``view`` lives.

    Args:
        view: of a whole block.
        margins: bytes that are free before and after each tensor.
        spans: offset in the block and bytes of each tensor that has such margins to itself.
    """
    address = torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr()
    _padded[id(view)] = _PaddedBlock(address, view.nbytes, margins, spans)
    weakref.finalize(view, _padded.pop, id(view), None).atexit = False


def padding_around(x: torch.Tensor) -> Padding | None:
    """Return the padding of a contiguous staged tensor; None where it has none, or shares its memory."""
    if x.device.type != "cpu" or x.layout is not torch.strided or not x.is_contiguous():
        return None
    address = x.data_ptr()
    for block in tuple(_padded.values()):
        if block.address <= address < block.address + block.nbytes:
            if block.spans.get(address - block.address) != x.nbytes:
                return None
            return Padding(block.address, block.nbytes, *block.margins)
    return None
