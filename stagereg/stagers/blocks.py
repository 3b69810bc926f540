"""Host memory that several copies share: it comes back when the last copy that lies in it is gone.

A ``memory.Pool`` lends a block to one copy. Here a copy may lie in many :class:`BlockRef`\\ s and a block may serve
many copies, so the two are counted apart: a :class:`Lease` is one copy, and is what ``max_in_flight`` bounds; a block
is free when no copy and no plan holds it. Both are known by Python's own references: every view of a block that a
tensor is made over holds the block and the lease.

Waiting for a lease follows the pool's rule (``waiting``): where it is in vain, memory beyond the bound is taken, and a
warning says so once.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import weakref
from typing import Any

import torch

from stagereg.errors import StagerClosedError, StagingError
from stagereg.kernel.memory import Block
from stagereg.kernel.waiting import OVERDRAWN, wait_while
from stagereg.kernel.writers import Span, writer_at_work

__all__ = ["BlockRef", "Blocks", "Lease"]

log = logging.getLogger("stagereg")

_SLACK = 1.25  # a block may be so many times as large as what is asked for, and is used again rather than a new one


class Lease:
    """One copy that is out.

    Attributes:
        spans: address and bytes of the blocks that it lies in.
    """

    __slots__ = ("__weakref__", "spans")

    def __init__(self) -> None:
        self.spans: list[Span] = []


class BlockRef:
    """A block that any number of copies lie in.

    Attributes:
        address: of the first byte.
        nbytes: bytes there are.
    """

    __slots__ = ("__weakref__", "_arena", "address", "nbytes")

    def __init__(self, block: Block) -> None:
        self._arena = block
        self.address = block.address
        self.nbytes = block.nbytes

    def view(self, lease: Lease) -> memoryview:
        """A new view for the copy of that lease; while it lives, neither the block nor the lease comes back."""
        view = self._arena.view()
        owner: Any = view.obj
        owner.held = (self, lease)
        lease.spans.append((self.address, self.nbytes))
        return view


class Blocks:
    """Gives out leases, a bounded number at once, and blocks, which are used again.

    Args:
        max_in_flight: leases at once before one has to wait.
        wait_s: seconds that one waits at most while a writer is at work.
        pin: page-lock; None means where an accelerator is available.
        threads: threads that touch new pages.

    One thread at a time may call it, but for :meth:`close`.
    """

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0, pin: bool | None = None, threads: int = 2) -> None:
        if max_in_flight < 1:
            raise StagingError([], f"max_in_flight must be at least 1, not {max_in_flight}")
        self._max = max_in_flight
        self._wait_s = wait_s
        self._pin = pin is not False and torch.accelerator.is_available()
        self._threads = threads
        self._free: list[Block] = []
        self._keep = 0
        self._out: dict[int, list[Span]] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # put() is safe in finalizers
        self._returned: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._serial = 0
        self._overdrawn = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Copies that are still out."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._out.pop(self._ended.get_nowait(), None)
        return len(self._out)

    def check_open(self) -> None:
        """Raise ``StagerClosedError`` after :meth:`close`."""
        if self._closed:
            raise StagerClosedError

    def expect(self, nbytes: int) -> None:
        """Say how many bytes one copy needs; unused memory is kept for ``max_in_flight`` of them."""
        self._keep = self._max * nbytes
        self._collect()
        self._free.clear()

    def lease(self) -> Lease:
        """Return a lease for one more copy, waiting if ``max_in_flight`` are out.

        Raises:
            StagerClosedError: after :meth:`close`, also when that is called meanwhile.
        """
        self.check_open()
        if self.in_flight >= self._max:
            self._await_end()
        lease = Lease()
        self._serial += 1
        self._out[self._serial] = lease.spans
        weakref.finalize(lease, self._ended.put, self._serial).atexit = False
        return lease

    def take(self, nbytes: int) -> BlockRef:
        """Return a block of at least ``nbytes`` bytes that nobody else has; ``StagingError`` if there is no memory."""
        self._collect()
        fitting = [block for block in self._free if nbytes <= block.nbytes <= max(_SLACK * nbytes, 2**16)]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(block)
        else:
            block = Block(nbytes, self._pin, self._threads)
        ref = BlockRef(block)
        weakref.finalize(ref, _give_back, weakref.ref(self), block).atexit = False
        return ref

    def close(self) -> None:
        """Free what is unused. Blocks that copies lie in live until these are gone. Closing twice is harmless."""
        self._closed = True
        self._collect()
        self._free.clear()

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                block = self._returned.get_nowait()
                if not self._closed and sum(a.nbytes for a in self._free) + block.nbytes <= self._keep + 2**16:
                    self._free.append(block)

    def _await_end(self) -> None:
        gc.collect()  # a copy in a dead reference cycle is nobody's copy
        if wait_while(self._at_work, self._ended_enough, self._wait_s, patient=not self._overdrawn):
            return
        if not self._overdrawn:
            self._overdrawn = True
            log.warning(OVERDRAWN, self.in_flight)

    def _at_work(self) -> bool:
        return writer_at_work([span for spans in self._out.values() for span in spans])

    def _ended_enough(self, timeout_s: float) -> bool:
        if timeout_s:
            with contextlib.suppress(queue.Empty):
                self._out.pop(self._ended.get(timeout=timeout_s), None)
        self.check_open()
        return self.in_flight < self._max


def _give_back(owner: weakref.ref[Blocks], block: Block) -> None:
    """End the use of a block. Runs wherever the last reference died, in a finalizer: takes no lock."""
    blocks = owner()
    if blocks is not None and not blocks._closed:
        blocks._returned.put(block)
