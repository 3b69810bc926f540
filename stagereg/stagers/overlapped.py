"""``overlapped``: returns at once and copies while training goes on, until the next write is about to happen."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from stagereg.errors import StagingError
from stagereg.forks import RenewedInChild
from stagereg.kernel.copier import HostCopier, PendingCopy
from stagereg.kernel.layout import Layout, Region
from stagereg.kernel.memory import Pool
from stagereg.kernel.state_dict import path_to
from stagereg.kernel.transfer import COPY_THREADS
from stagereg.registry import register
from stagereg.stagers.async_stager import StateDict
from stagereg.stagers.deferred_copy import CopySplit, DeferredCopy
from stagereg.stagers.guard import WriteGuard
from stagereg.stagers.host import HostStager


@register("stager", "overlapped")
class OverlappedStager(HostStager):
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
    within the milliseconds of the copy; ``verify=True`` finds that too. Until the future is done, the storage of a
    source must not be freed or resized in place (``resize_(0)``).

    Tensors on accelerators are copied on a side stream; the stream of the optimizer waits for it, the host does not.
    What an optimizer writes that was captured in a CUDA graph is copied at once, since nothing announces a replay. A
    graph may have been captured before the stager was made, so this goes for every optimizer with ``capturable=True``,
    which torch wants for that, unless it was given to :meth:`watch`. SGD and other optimizers that have no such option
    are captured without it: make the stager before that, or do not step them outside the graph.

    Args:
        threads: threads that copy what is copied at once, the caller's among them.
        verify: compare a checksum of every byte in host memory, taken in ``stage``, with that of the copy. ``stage``
            then reads the whole state: a mode to find unforeseen writes.
    """

    # Bytes; smaller regions in host memory are copied at once, which costs less than a deferred copy of them.
    _worth_deferring: int = 2**14

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
        super().__init__(HostCopier(pool, threads, type_check))
        self._verify = verify
        self._copies = _Copies()
        self._guard = WriteGuard(self._copies.finish_before_write)
        self._renew()
        _stagers.add(self)
        self._split: CopySplit | None = None
        self._split_of: tuple[Layout, dict[tuple[int, int], int], set[int]] | None = None

    def watch(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer before its first step, so that its state need not be copied at once.

        One with ``capturable=True`` is not known without this. Not for one whose step was captured in a CUDA graph
        before this stager was made.
        """
        self._guard.watch(optimizer)

    def stage(self, state_dict: StateDict) -> Future[StateDict]:  # type: ignore[override]
        """Return the future of a complete copy of ``state_dict`` in host memory. Called on the training thread.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), there is no memory for it, or an earlier
                copy failed and was not reported yet.
            StagerClosedError: after ``close()``.
        """
        self._copier.pool.check_open()
        self._copies.raise_unseen()
        pending = self._copier.prepare(state_dict)
        with torch.no_grad():
            copy = self._begin(pending)
        try:
            future = self._copies.add(copy)
            self._thread.submit(self._copies.run, copy, pending, state_dict)
        except BaseException:  # such as a Ctrl-C
            self._copies.drop(copy)
            raise
        return future

    def synchronize_staging(self) -> None:
        """Wait until every copy so far is complete. Raises: ``StagingError`` if one failed and was not reported yet."""
        self._copies.wait()
        self._copies.raise_unseen()

    def close(self) -> None:
        """Complete the copies, end the thread and free the memory that is kept. Copies still held stay valid.

        Twice is harmless.

        Raises:
            StagingError: a copy failed and was not reported yet; everything is closed nevertheless.
        """
        self._copies.wait()
        self._thread.shutdown(wait=True)
        self._guard.close()
        super().close()
        self._copies.raise_unseen()

    def _renew(self) -> None:
        """Give up the copies that are not complete, and the thread, which a forked child does not have."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{COPY_THREADS}-deferred")
        self._copies.give_up()

    def _begin(self, pending: PendingCopy) -> DeferredCopy:
        """Copy what cannot wait, and return the rest as work to be done."""
        split, engine = self._split_for(pending), self._copier.engine
        events = engine.fetch(pending.pairs(split.immediate_remote, pending.layout.packed))
        for device, event in events:  # whatever writes them next is queued on this stream
            torch.accelerator.current_stream(device).wait_event(event)
        engine.run(pending.address, split.immediate.pieces(engine.threads), pending).finish()
        return DeferredCopy(pending, split, events, self._verify)

    def _split_for(self, pending: PendingCopy) -> CopySplit:
        owned = self._guard.owned()
        flags = list(map(torch.Tensor.is_inference, pending.sources))  # these have no version counter
        inference = {i for i, flag in enumerate(flags) if flag} if True in flags else set[int]()

        def may_defer(region: Region) -> bool:
            tensors = [pending.sources[i] for i in region.members]
            known = all(_lies_in(x, owned, starts) for x in tensors)
            return known and inference.isdisjoint(region.members)

        if self._split is None or self._split_of != (pending.layout, owned, inference):
            starts = sorted(owned)
            self._split = CopySplit(pending.layout, may_defer, self._worth_deferring)
            self._split_of = (pending.layout, owned, inference)
        return self._split


_stagers = RenewedInChild(OverlappedStager._renew)


def _lies_in(x: torch.Tensor, owned: Mapping[tuple[int, int], int], starts: Sequence[tuple[int, int]]) -> bool:
    """Whether a tensor, which may be rows of another one, lies in memory that only an optimizer writes."""
    device, address = x.get_device(), x.data_ptr()
    at = bisect.bisect_right(starts, (device, address)) - 1
    if at < 0 or starts[at][0] != device:
        return False
    return address + x.nbytes <= starts[at][1] + owned[starts[at]]


class _CopyFuture(Future[Any]):
    """The future of a :class:`.PendingCopy`, which knows whether its outcome was asked for: ``seen``."""

    seen = False
    _outcome: Any = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        super().__init__()

    @property
    def _result(self) -> Any:
        """The copy. Its tensors are made for the first one who reads this, and not while training goes on.

        ``asyncio`` of Python 3.14 reads this and does not call :meth:`result`.
        """
        with self._lock:
            if isinstance(self._outcome, PendingCopy):
                self._outcome = self._outcome.unflatten()
            return self._outcome

    @_result.setter
    def _result(self, outcome: Any) -> None:
        self._outcome = outcome

    def result(self, timeout: float | None = None) -> Any:
        return self._result if self.exception(timeout) is None else super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.seen = True
        return found


class _Copies:
    """The copies that are not complete yet, and the futures of those that failed.

    Complete copies are not held. The guard and the background thread refer to this and not to the stager, so that a
    stager that is dropped without being closed is freed.
    """

    def __init__(self) -> None:
        self._running: dict[DeferredCopy, _CopyFuture] = {}
        self._failed: deque[_CopyFuture] = deque()

    def add(self, copy: DeferredCopy) -> _CopyFuture:
        """Return the future of a copy that is about to be run."""
        future = self._running[copy] = _CopyFuture()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        return future

    def drop(self, copy: DeferredCopy) -> None:
        """Wait no longer for a copy, whose future nobody has."""
        self._running.pop(copy, None)

    def run(self, copy: DeferredCopy, pending: PendingCopy, state: StateDict) -> None:
        """Copy the rest and complete the future; on the background thread."""
        future = self._running[copy]
        try:
            written = copy.run()
            if written:
                raise _written(state, written[0])
            assert pending.spec is not None
            pending.spec.release_sources()
            future.set_result(pending)
        except BaseException as raised:
            interrupted = StagingError([], f"the copy was interrupted ({raised!r})")
            error = raised if isinstance(raised, Exception) else interrupted
            error.__traceback__ = None  # its frames hold the memory
            self._failed.append(future)
            future.set_exception(error)
        self.drop(copy)

    def give_up(self) -> None:
        """Fail the futures of a parent's copies in a forked child, where no thread completes them."""
        for future in self._running.values():
            _CopyFuture.__init__(future)  # a thread of the parent may have had its locks
            future.set_exception(StagingError([], "the copy was not complete when this process was forked"))
        self._running, self._failed = {}, deque()

    def finish_before_write(self) -> None:
        """Return when no copy needs the sources any more."""
        for copy in list(self._running):
            copy.finish_before_write()

    def wait(self) -> None:
        """Return when every copy is complete or has failed."""
        self.finish_before_write()
        wait(list(self._running.values()))

    def raise_unseen(self) -> None:
        """Raise the failure of a copy whose future was not asked; once."""
        while self._failed:
            future = self._failed.popleft()
            if not future.seen:
                future.result()


def _written(state: StateDict, index: int) -> StagingError:
    path: tuple[object, ...] = ()
    with contextlib.suppress(Exception):  # the state dict may be another one by now
        path = path_to(state, index)
    return StagingError(
        path,
        "it was written while it was being copied, by something that is no torch optimizer and no load_state_dict; "
        "write it after the future of stage() is done, or use a stager that copies at once, such as pinned_cached",
    )
