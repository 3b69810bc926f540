"""``overlapped``: returns at once and copies while training goes on, until somebody is about to write."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.optim.optimizer import Optimizer

from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier, PendingCopy
from stagereg.kernel.layout import Layout, Region
from stagereg.kernel.memory import Pool
from stagereg.kernel.state_dict import path_to
from stagereg.kernel.transfer import COPY_THREADS, CopyEngine
from stagereg.registry import register
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.stagers.deferred_copy import LateCopy, Parting
from stagereg.stagers.guard import WriteGuard
from stagereg.stagers.write_detector import Watch

__all__ = ["OverlappedStager"]


@register("stager", "overlapped")
class OverlappedStager(AsyncStager):
    """Copies parameters and optimizer state in the background, during the next forward and backward passes.

    ``stage`` returns a future right away. What only a torch optimizer writes (its parameters that require gradients,
    and its state) is copied by a background thread; just before an optimizer steps, or a module loads a state dict,
    the thread that is about to write copies what is still missing and then goes on. Everything else, such as buffers
    that a forward pass writes, averages of the weights, scalars and the state of unknown optimizers, is copied before
    ``stage`` returns. An optimizer is known once it has stepped since this stager was made, or has been given to
    :meth:`watch`; so the first ``stage`` of a run that has not trained yet copies all of it at once.

    A source that was written in between all the same is found, and its copy is never handed out: the future, or else
    the next call, raises a ``StagingError`` that names the entry. Found are all in-place operations that move torch's
    version counter, and of the others (``tensor.data``, numpy, gloo collectives) those that write a whole tensor, or
    the part at its ends. What is not found by default is a write to a small part of a big tensor by such a side door
    within the milliseconds of the copy; ``verify=True`` finds that too.

    Tensors on accelerators are copied on a side stream; the stream of the optimizer waits for it, the host does not.

    Args:
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds that ``stage`` waits at most for a reader that releases its copies (``Checkpointer``), and one
            second at most for any other; then it takes memory beyond the bound, which is logged once.
        threads: threads that copy what is copied at once, the caller's among them.
        pin: page-lock the memory; None means where an accelerator is available.
        reserve_gb: GiB of memory to get ready at once, in the background.
        verify: compare a checksum of every byte in host memory, taken in ``stage``, with that of the copy. ``stage``
            then reads the whole state: a mode to find out whether somebody writes.
        type_check: refuse leaves that are no tensor, number, string, bytes, ``BytesIO`` or None; otherwise such a leaf
            is deep-copied.
    """

    _synchronize_after_execute: bool = False
    # Bytes; smaller regions are copied at once, which costs less than keeping books on them.
    _worth_waiting: int = 2**14

    def __init__(
        self,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
        reserve_gb: float = 0.0,
        verify: bool = False,
        type_check: bool = False,
    ) -> None:
        pool = Pool(max_in_flight, wait_s, pin=pin, threads=threads, reserve=int(reserve_gb * 2**30))
        self._copier = HostCopier(pool, threads, type_check)
        self._verify = verify
        self._under_way = _UnderWay()
        self._guard = WriteGuard(_weakly(self._under_way))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{COPY_THREADS}-late")
        self._late_engine = CopyEngine(1)
        self._parting: Parting | None = None
        self._parted: tuple[Layout, object] | None = None
        weakref.finalize(self, self._guard.close).atexit = False

    def watch(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer before its first step, so that its state need not be copied at once."""
        self._guard.watch(optimizer)

    def reserve_padding(self, before: int, after: int) -> None:
        """Leave so many bytes free around each tensor in the copies to come, for a storage that writes them in place.

        See :func:`stagereg.kernel.memory.padding_around`.
        """
        self._copier.reserve_padding(before, after)

    def expect_release(self) -> None:
        """See :meth:`.ReleasesCopies.expect_release`."""
        self._copier.pool.expect_release()

    def release(self, staged: StateDict) -> None:
        """See :meth:`.ReleasesCopies.release`."""
        self._copier.pool.release(staged)

    def stage(self, state_dict: StateDict) -> Future[StateDict]:
        """Return the future of a complete copy of ``state_dict`` in host memory. Called on the training thread.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), there is no memory for it, or an earlier
                copy failed and nobody was told.
            StagerClosedError: after ``close()``.
        """
        self._copier.check_open()
        self._raise_untold()
        pending = self._copier.prepare(state_dict)
        with torch.no_grad():
            copy = self._begin(pending)
        promise = _Promise()
        self._under_way.add(copy, promise)
        self._thread.submit(_finish, self._under_way, copy, pending, state_dict)
        return promise

    def synchronize_staging(self) -> None:
        """Wait until every copy so far is complete. Raises: ``StagingError`` if one is not and nobody was told yet."""
        self._under_way.wait()
        self._raise_untold()

    def close(self) -> None:
        """Complete the copies, end the thread and free the memory that is kept. Copies still held stay valid.

        Twice is harmless.

        Raises:
            StagingError: a copy failed and nobody was told yet; everything is closed nevertheless.
        """
        self._under_way.wait()
        self._thread.shutdown(wait=True)
        self._late_engine.close()
        self._guard.close()
        self._copier.close()
        self._raise_untold()

    def _begin(self, pending: PendingCopy) -> LateCopy:
        """Copy what cannot wait, and return the rest as work to be done."""
        parting = self._part(pending)
        engine = self._copier.engine
        at_once: dict[torch.device, torch.Event] = {}
        for device, pairs in pending.pairs(parting.now, pending.layout.packed).items():
            event = engine.fetch(device, pairs)
            if event is not None:  # whatever writes them next is queued on this stream
                torch.accelerator.current_stream(device).wait_event(event)
                at_once[device] = event
        engine.memmove(pending.address, parting.batch)
        watch = Watch(pending.sources, parting.places, pending.address, self._verify)
        return LateCopy(pending, parting, self._late_engine, watch, at_once)

    def _part(self, pending: PendingCopy) -> Parting:
        owned = self._guard.owned()
        inference = {i for i, x in enumerate(pending.sources) if x.is_inference()}  # these have no version counter
        known = (owned, inference)
        if self._parting is None or self._parted != (pending.layout, known):
            self._parting = Parting(pending.layout, lambda region: self._may_wait(region, pending, owned, inference))
            self._parted = (pending.layout, known)
        return self._parting

    def _may_wait(
        self, region: Region, pending: PendingCopy, owned: dict[tuple[int, int], int], inference: set[int]
    ) -> bool:
        if region.nbytes < self._worth_waiting:
            return False
        for i in region.members:
            x = pending.sources[i]
            if i in inference or owned.get((x.get_device(), x.data_ptr()), 0) < x.nbytes:
                return False
        return True

    def _raise_untold(self) -> None:
        failure = self._under_way.untold()
        if failure is not None:
            raise failure


class _Promise(Future[StateDict]):
    """A future that knows whether somebody has heard its outcome."""

    heard = False

    def result(self, timeout: float | None = None) -> StateDict:
        try:
            return super().result(timeout)
        finally:
            self.heard = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.heard = self.done()

    def peek(self) -> BaseException | None:
        """Wait, and return the failure without counting as somebody who heard it."""
        return super().exception()


class _UnderWay:
    """The copies that are not complete yet, and those that failed.

    A promise that was kept is not held here: it has the copy. The guard knows this and not the stager, so that a stager
    that nobody closed can go.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[LateCopy, _Promise]] = {}
        self._failed: deque[_Promise] = deque()

    def add(self, copy: LateCopy, promise: _Promise) -> None:
        self._copies[id(copy)] = (copy, promise)

    def end(self, copy: LateCopy, failure: BaseException | None, staged: StateDict) -> None:
        """Keep the promise, one way or the other."""
        promise = self._copies[id(copy)][1]
        if failure is None:
            promise.set_result(staged)
        else:
            failure.__traceback__ = None  # its frames hold the memory
            self._failed.append(promise)
            promise.set_exception(failure)
        del self._copies[id(copy)]

    def let_write(self) -> None:
        """Return when no copy needs the sources any more."""
        for copy, _ in list(self._copies.values()):
            copy.let_write()

    def wait(self) -> None:
        """Return when every copy is complete or has failed."""
        self.let_write()
        for _, promise in list(self._copies.values()):
            promise.peek()

    def untold(self) -> BaseException | None:
        """Return a failure that nobody has heard of; it counts as heard then."""
        while self._failed:
            promise = self._failed.popleft()
            if not promise.heard:
                return promise.exception()
        return None


def _weakly(under_way: _UnderWay) -> Callable[[], None]:
    known = weakref.ref(under_way)

    def before_write() -> None:
        copies = known()
        if copies is not None:
            copies.let_write()

    return before_write


def _finish(under_way: _UnderWay, copy: LateCopy, pending: PendingCopy, state_dict: StateDict) -> None:
    """Copy the rest and keep the promise; on the background thread."""
    staged: StateDict = {}
    failure: BaseException | None = None
    try:
        changed = copy.run()
        if changed:
            failure = _changed(state_dict, changed[0])
        else:
            staged = pending.unflatten()
    except Exception as error:
        failure = error
    under_way.end(copy, failure, staged)


def _changed(state_dict: StateDict, index: int) -> StagingError:
    try:
        path = path_to(state_dict, index)
    except Exception:  # the state dict is another one by now
        path = ()
    return StagingError(
        path,
        "it was written while it was being copied, by something that is no torch optimizer and no load_state_dict; "
        "write it after the future of stage() is done, or use a stager that copies at once, such as pinned_cached",
    )
