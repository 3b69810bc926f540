"""Host memory for copies: the pool that leases blocks of memory (:mod:`stagereg.base.pages`).

A :class:`Lease` covers one copy: it ends when the last tensor of the copy is freed, or when the reader of the copy
calls :meth:`Pool.release`. A block returns to the pool when no tensor uses it. Making a block takes long if it is
page-locked, so the pool makes the next block in the background if :meth:`Pool.prepare` announces a copy.

If ``max_in_flight`` copies are leased, :meth:`Pool.lease` waits until a lease ends: at most ``wait_s`` seconds if the
reader declared that it will release its copies (``Pool.readers_release``), otherwise at most one second. Then it uses
new memory, logs this once, and from then on no longer waits for a reader that does not release copies.

A forked child, such as a worker of a ``DataLoader``, does not get the blocks, because each write of the parent to a
page shared with a child costs a page fault. Exception: the child may read copies whose reader does not release them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stagereg.base.forks import RenewedInChild
from stagereg.base.pages import Block, whole_pages
from stagereg.errors import StagerClosedError, StagingError

log = logging.getLogger("stagereg")

WAIT_WITHOUT_RELEASE_S = 1.0
"""Maximum seconds that the pool waits for a reader that does not release its copies."""

_POLL_S = 0.002
_COLLECT_EVERY_S = 1.0
_CLOSE_S = 10.0  # maximum seconds that ``close`` waits for the thread that makes a block; one piece takes about 0.2 s


class _NotNeeded(Exception):
    """The block that is made in the background is too small, or its pool is closed."""


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
    thread at a time may call :meth:`lease` and :meth:`prepare`. :meth:`release` and :meth:`close` are thread-safe.
    ``readers_release``: whether the reader declared that it will :meth:`release` its copies; initially False.

    Args:
        max_in_flight: number of leases from which on :meth:`lease` waits; None: unlimited.
        wait_s: maximum seconds that :meth:`lease` waits.
        keep: True: reuse returned blocks. False: free them.
        pin: whether to page-lock the memory; None: if an accelerator is available. If this fails, the rest of the
            memory is pageable. The pool logs the first such failure.
        threads: number of threads that pre-fault new pages.
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
        self._logs = os.environ.get("LOCAL_RANK", "0") == "0"  # only the first rank of each machine logs information
        if keep and pin is not False and not there and self._logs:
            log.info(
                "stagereg: no accelerator is available, so copies are staged in pre-faulted memory that is not "
                "page-locked."
            )
        self._pin, self._threads, self._keep = pin is not False and there, threads, keep
        self._prepares = self._pin and keep and torch.cuda.is_available()
        self._spare: threading.Thread | None = None  # makes a block and adds it to ``_free``
        self._refused = False  # whether a failure to page-lock memory has been logged
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

    def prepare(self) -> None:
        """Make a block in the background, because :meth:`lease` will be called soon. Returns immediately.

        Does nothing unless the memory is page-locked for CUDA, all blocks are in use, and another block is permitted by
        ``max_in_flight``. If the block cannot be made, logs a warning, and the next :meth:`lease` makes the block.
        """
        if not self._prepares or self._closed or self._spare is not None or self._fitting(self._expected):
            return
        if 0 < len(self._in_use) < self.max_in_flight:
            args = self._expected, torch.cuda.current_device()
            make = threading.Thread(target=self._make_spare, args=args, name="stagereg-memory")
            with contextlib.suppress(RuntimeError):  # Python 3.12 starts no threads at interpreter exit
                make.start()
                self._spare = make
                if self._logs:
                    self._logs = False
                    text = "stagereg: A copy is still in use shortly before the next one, so memory for another copy "
                    text += "(%.2f GiB) is allocated in the background. max_in_flight=1 uses one copy only."
                    log.info(text, self._expected / 2**30)

    def _make_spare(self, nbytes: int, device: int) -> None:
        def check() -> None:
            if self._closed or nbytes < self._expected or not threading.main_thread().is_alive():
                raise _NotNeeded

        try:
            with torch.cuda.device(device):  # a new thread has device 0, which CUDA would initialize
                self._free.append(self._make(nbytes, 1, check))
        except _NotNeeded:
            pass
        except Exception as error:
            msg = "stagereg: cannot allocate memory for another copy in the background (%s). The next save tries again."
            log.warning(msg, error)
        if self._closed:
            self._free.clear()

    def _make(self, nbytes: int, threads: int, check: Callable[[], object] = lambda: None) -> Block:
        block = Block(nbytes, self._pin, threads, check)
        if block.refusal and not self._refused:
            self._refused = True
            text = "stagereg: page-locked only %d of %d bytes (%s). Copies to the other bytes are slower."
            log.warning(text, block.locked, block.nbytes, block.refusal)
        return block

    def _block(self, nbytes: int) -> Block:
        grown, self._expected = nbytes > self._expected, max(nbytes, self._expected)
        if self._spare is not None and (grown or not self._fitting(nbytes) or not self._spare.is_alive()):
            self._spare.join()  # ends soon if ``grown``, because a block of the earlier size is not needed
            self._spare = None
        if grown:
            self._free = self._fitting(nbytes)
        self._trim()
        if not (fitting := self._fitting(nbytes)):
            return self._make(nbytes, self._threads)
        block = min(fitting, key=lambda block: block.nbytes)
        self._free.remove(block)
        return block

    def _fitting(self, nbytes: int) -> list[Block]:
        return [block for block in self._free if nbytes <= block.nbytes]

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
        if (spare := self._spare) is not None:
            spare.join(_CLOSE_S)
        self._free.clear()

    def inherit_copies(self, inherited: bool) -> None:
        """Set whether a forked child gets copies, unless their reader declared that it will release them."""
        if not self.readers_release:
            for lease in list(self._in_use):
                lease.block.inherit(inherited)

    def renew(self) -> None:
        """In a forked child, drop all blocks and copies, because they belong to the parent process."""
        self._out, self._copies, self._in_use = weakref.WeakSet(), weakref.WeakValueDictionary(), weakref.WeakSet()
        self._free, self._spare = [], None

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
        most = self.max_in_flight * whole_pages(self._expected)
        while sum(block.nbytes for block in self._free) > most:
            self._free.remove(min(self._free, key=lambda block: block.nbytes))


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
