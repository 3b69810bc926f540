"""The copies of a stager that are not confirmed yet, and their futures."""

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
    """The future of a copy. Completes when the copy is confirmed (the source was not written during the copy).

    :meth:`copied` returns the copy earlier. ``seen``: whether a caller has read the result or the error.
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
        """The copy. Its tensors are created on the first access, not while training continues.

        In Python 3.14, ``asyncio`` reads this attribute instead of calling :meth:`result`.
        """
        with self._lock:
            if isinstance(self._outcome, PendingCopy):
                self._outcome = self._outcome.unflatten()
            return self._outcome

    @_result.setter
    def _result(self, outcome: Any) -> None:
        self._outcome = self._outcome if outcome is None else outcome

    def set_copied(self, pending: PendingCopy) -> None:
        """Make the copy available to :meth:`copied`. Called on the background thread."""
        self._outcome = pending
        self._complete.set_result(None)

    def set_confirmed(self) -> None:
        """Make the copy available to :meth:`result`. Called on the background thread."""
        self._copy = None
        self.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Make all methods raise ``error``. Called on the background thread."""
        self._copy = self._outcome = None
        if not self._complete.done():
            self._complete.set_exception(error)
        self.set_exception(error)

    def copied(self) -> Any:
        """Return the copy as soon as its bytes are complete, before it is confirmed. Thread-safe.

        The copy is valid only if :meth:`result` returns later. It raises if the source was written during the copy.
        """
        self.seen = True
        self._complete.result()
        found = self._result
        return super().result() if found is None else found  # without a copy, raises its error

    def when_copied(self, call: Any) -> None:
        """Call ``call()``, on any thread, when the bytes are complete or the copy has failed.

        The caller must then handle a failure: the next call of the stager does not raise it.
        """
        self.seen = True
        self._complete.add_done_callback(lambda _: call())

    def result(self, timeout: float | None = None) -> Any:
        return self._result if self.exception(timeout) is None else super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        copy = self._copy
        if copy is not None and threading.get_ident() == self._caller:  # this thread runs no operation of torch now
            wait([self._complete], timeout)
            copy.fence()
        found = super().exception(timeout)
        self.seen = True
        return found


class RunningCopies:
    """The copies that are not confirmed yet, and the futures of failed copies.

    The guards and the background thread refer to this object, not to the stager. So a stager that is not closed can be
    freed.
    """

    def __init__(self) -> None:
        self._running: dict[DeferredCopy, CopyFuture] = {}
        self._failed: deque[CopyFuture] = deque()
        self._touched: deque[tuple[list[tuple[Place, int]], bool]] = deque()
        self._caller = 0

    def add(self, copy: DeferredCopy) -> CopyFuture:
        """Return the future of a copy that is about to begin."""
        self._caller = threading.get_ident()
        future = self._running[copy] = CopyFuture(copy)
        future.set_running_or_notify_cancel()  # so that callers cannot cancel it
        return future

    def drop(self, copy: DeferredCopy) -> None:
        """Remove a copy whose future no caller holds."""
        self._running.pop(copy, None)

    def run(self, copy: DeferredCopy, pending: PendingCopy, state: StateDict) -> None:
        """Copy the remaining pieces and complete the future. Called on the background thread."""
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
            error.__traceback__ = None  # the frames of the traceback keep the memory alive
            self._failed.append(future)
            future.fail(error)
        finally:
            pending.storages.clear()  # so that the future does not keep the memory of the source alive
        self.drop(copy)

    def _note_touched(self, copy: DeferredCopy, pending: PendingCopy, failed: bool) -> None:
        rows = [pending.layout.signature[i] for i in copy.touched]
        places = [((device, at), shape.numel() * dtype.itemsize) for at, dtype, shape, _, _, _, device in rows]
        if places or failed:
            self._touched.append((places, failed))

    def take_touched(self) -> tuple[list[tuple[Place, int]], bool]:
        """Return and clear the ranges that were written during unconfirmed copies, and whether a copy failed."""
        taken = [self._touched.popleft() for _ in range(len(self._touched))]
        return [place for places, _ in taken for place in places], any(failed for _, failed in taken)

    def give_up(self) -> None:
        """In a forked child, fail the futures of the parent's copies, because no thread completes them."""
        for copy, future in self._running.items():
            CopyFuture.__init__(future, copy)  # new locks: a thread of the parent may have held the old ones
            future.fail(StagingError([], "the copy was not complete when this process was forked"))
        self._running, self._failed = {}, deque()

    def finish_before_write(self) -> None:
        """Block until no copy reads the sources, and confirm the copies. Called before a write."""
        for copy in list(self._running):
            copy.finish_before_write()

    def finish_before_free(self, x: torch.UntypedStorage | torch.Tensor) -> None:
        """Block until no copy reads from a storage, or from the storage of a tensor. Called before it is freed."""
        for copy in list(self._running):
            if copy.reads(x):
                copy.finish_before_write()

    def fence(self) -> None:
        """Confirm complete copies, if this thread started them."""
        if self._running and threading.get_ident() == self._caller:
            for copy in list(self._running):
                copy.fence()

    def wait(self) -> None:
        """Wait until every copy is confirmed or has failed."""
        self.finish_before_write()
        wait(list(self._running.values()))

    def raise_unseen(self) -> None:
        """Raise the error of a failed copy whose future was not read. Raises each error once."""
        while self._failed:
            future = self._failed.popleft()
            if not future.seen:
                future.result()


def _named(state: StateDict, error: Exception) -> Exception:
    """Return an error whose path is the path in ``state``, if the path of ``error`` is a tensor index."""
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
