"""A stager's unconfirmed copies, and their futures."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future, wait
from typing import Any

import torch

from stagereg.errors import StagingError, WrittenWhileStagedError
from stagereg.kernel.copier import PendingCopy
from stagereg.kernel.state_dict import path_to
from stagereg.stagers.async_stager import StateDict
from stagereg.stagers.deferred_copy import DeferredCopy
from stagereg.stagers.step_observer import Place


class CopyFuture(Future[Any]):
    """The future of a :class:`.PendingCopy`. Completes when the copy is confirmed; :meth:`copied` returns earlier.

    Attributes:
        seen: whether a caller has read its outcome.
    """

    seen = False
    _outcome: Any = None

    def __init__(self, copy: DeferredCopy) -> None:
        self._lock = threading.Lock()
        self._copy: DeferredCopy | None = copy
        self._caller, self._complete = threading.get_ident(), Future[None]()
        super().__init__()

    @property
    def _result(self) -> Any:
        """The copy. Its tensors are created on the first read, not while training continues.

        ``asyncio`` of Python 3.14 reads this attribute instead of calling :meth:`result`.
        """
        with self._lock:
            if isinstance(self._outcome, PendingCopy):
                self._outcome = self._outcome.unflatten()
            return self._outcome

    @_result.setter
    def _result(self, outcome: Any) -> None:
        self._outcome = self._outcome if outcome is None else outcome

    def set_copied(self, pending: PendingCopy) -> None:
        """Let :meth:`copied` return the copy. Called on the background thread."""
        self._outcome = pending
        self._complete.set_result(None)

    def set_confirmed(self) -> None:
        """Let :meth:`result` return the copy. Called on the background thread."""
        self._copy = None
        self.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Make all methods raise ``error``. Called on the background thread."""
        self._copy = self._outcome = None
        if not self._complete.done():
            self._complete.set_exception(error)
        self.set_exception(error)

    def copied(self) -> Any:
        """Return the copy when its bytes are complete, before it is confirmed. Thread-safe.

        The caller must not rely on the copy before :meth:`result` has returned, which raises if the source was written
        meanwhile.
        """
        self.seen = True
        self._complete.result()
        found = self._result
        return super().result() if found is None else found  # raises, because the copy has failed meanwhile

    def when_copied(self, call: Any) -> None:
        """Call ``call()`` when the bytes are complete, or the copy has failed; on any thread.

        The caller becomes responsible for a failure: the stager's next call does not raise it.
        """
        self.seen = True
        self._complete.add_done_callback(lambda _: call())

    def result(self, timeout: float | None = None) -> Any:
        return self._result if self.exception(timeout) is None else super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        copy = self._copy
        if copy is not None and threading.get_ident() == self._caller:  # this thread runs no operation now
            wait([self._complete], timeout)
            copy.fence()
        found = super().exception(timeout)
        self.seen = True
        return found


class RunningCopies:
    """The unconfirmed copies, and the futures of failed copies.

    Confirmed copies are not held. The guards and the background thread refer to this object instead of the stager, so
    that a stager that is dropped without being closed is freed.
    """

    def __init__(self) -> None:
        self._running: dict[DeferredCopy, CopyFuture] = {}
        self._failed: deque[CopyFuture] = deque()
        self._touched: deque[tuple[list[tuple[Place, int]], bool]] = deque()
        self._caller = 0

    def add(self, copy: DeferredCopy) -> CopyFuture:
        """Return the future of a copy that is about to run."""
        self._caller = threading.get_ident()
        future = self._running[copy] = CopyFuture(copy)
        future.set_running_or_notify_cancel()  # makes it impossible to cancel
        return future

    def drop(self, copy: DeferredCopy) -> None:
        """Remove a copy whose future no caller holds."""
        self._running.pop(copy, None)

    def run(self, copy: DeferredCopy, pending: PendingCopy, state: StateDict) -> None:
        """Copy the rest and complete the future. Called on the background thread."""
        future = self._running[copy]
        try:
            if not (written := copy.run()):
                pending.spec.release_sources()
                future.set_copied(pending)
                written = copy.await_fence()
            self._note_touched(copy, pending, bool(written))
            if written:
                raise _written(state, written[0])
            future.set_confirmed()
        except BaseException as raised:
            interrupted = StagingError([], f"the copy was interrupted ({raised!r})")
            error = _named(state, raised) if isinstance(raised, Exception) else interrupted
            error.__traceback__ = None  # the traceback's frames hold the memory
            self._failed.append(future)
            future.fail(error)
        finally:
            pending.storages.clear()  # a holder of the future must not keep the source's memory alive
        self.drop(copy)

    def _note_touched(self, copy: DeferredCopy, pending: PendingCopy, failed: bool) -> None:
        rows = [pending.layout.signature[i] for i in copy.touched]
        places = [((device, at), shape.numel() * dtype.itemsize) for at, dtype, shape, _, _, _, device in rows]
        if places or failed:
            self._touched.append((places, failed))

    def take_touched(self) -> tuple[list[tuple[Place, int]], bool]:
        """Return, once, the memory written during unconfirmed copies, and whether a copy failed because of a write."""
        taken = [self._touched.popleft() for _ in range(len(self._touched))]
        return [place for places, _ in taken for place in places], any(failed for _, failed in taken)

    def give_up(self) -> None:
        """Fail the futures of the parent's copies in a forked child, which has no thread to complete them."""
        for copy, future in self._running.items():
            CopyFuture.__init__(future, copy)  # a thread of the parent may have held its locks
            future.fail(StagingError([], "the copy was not complete when this process was forked"))
        self._running, self._failed = {}, deque()

    def finish_before_write(self) -> None:
        """Block until no copy needs the sources, and confirm those copies."""
        for copy in list(self._running):
            copy.finish_before_write()

    def finish_before_free(self, x: torch.UntypedStorage | torch.Tensor) -> None:
        """Block until no copy reads from a storage, or from the storage of a tensor."""
        for copy in list(self._running):
            if copy.reads(x):
                copy.finish_before_write()

    def fence(self) -> None:
        """Confirm complete copies, if this thread has started them."""
        if self._running and threading.get_ident() == self._caller:
            for copy in list(self._running):
                copy.fence()

    def wait(self) -> None:
        """Wait until every copy is confirmed or has failed."""
        self.finish_before_write()
        wait(list(self._running.values()))

    def raise_unseen(self) -> None:
        """Raise, once, the failure of a copy whose future was not read."""
        while self._failed:
            future = self._failed.popleft()
            if not future.seen:
                future.result()


def _named(state: StateDict, error: Exception) -> Exception:
    """Return the error with the path in ``state`` instead of a tensor index."""
    if type(error) is StagingError and len(error.path) == 1 and isinstance(error.path[0], int):
        return WrittenWhileStagedError(_path(state, error.path[0]), error.reason)
    return error


def _written(state: StateDict, index: int) -> WrittenWhileStagedError:
    return WrittenWhileStagedError(
        _path(state, index),
        "it was written, freed or resized while it was copied, by code that is neither a torch optimizer nor "
        "load_state_dict. Call stage() again, which copies everything before it returns",
    )


def _path(state: StateDict, index: int) -> tuple[object, ...]:
    with contextlib.suppress(Exception):  # the state dict may have changed by now
        return path_to(state, index)
    return ()
