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
    """The future of a :class:`.PendingCopy`: done when the copy is confirmed. :meth:`copied` returns the copy before.

    Attributes:
        seen: whether somebody has asked for its outcome.
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
        """The copy. Its tensors are made for the first caller who reads this, and not while training continues.

        ``asyncio`` of Python 3.14 reads this and does not call :meth:`result`.
        """
        with self._lock:
            if isinstance(self._outcome, PendingCopy):
                self._outcome = self._outcome.unflatten()
            return self._outcome

    @_result.setter
    def _result(self, outcome: Any) -> None:
        self._outcome = self._outcome if outcome is None else outcome

    def set_copied(self, pending: PendingCopy) -> None:
        """Let :meth:`copied` return the copy. On the background thread."""
        self._outcome = pending
        self._complete.set_result(None)

    def set_confirmed(self) -> None:
        """Let :meth:`result` return the copy. On the background thread."""
        self._copy = None
        self.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Let all methods raise ``error``. On the background thread."""
        self._copy = self._outcome = None
        if not self._complete.done():
            self._complete.set_exception(error)
        self.set_exception(error)

    def copied(self) -> Any:
        """Return the copy when its bytes are complete, before it is confirmed. Thread-safe.

        The caller must not rely on it before :meth:`result` has returned as well, which raises if the source was
        written meanwhile.
        """
        self.seen = True
        self._complete.result()
        found = self._result
        return super().result() if found is None else found  # which raises: it has failed meanwhile

    def when_copied(self, call: Any) -> None:
        """Call ``call()`` when the bytes are complete, or the copy has failed; on any thread.

        The caller takes over the report of a failure: the stager does not raise it in its next call.
        """
        self.seen = True
        self._complete.add_done_callback(lambda _: call())

    def result(self, timeout: float | None = None) -> Any:
        return self._result if self.exception(timeout) is None else super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        copy = self._copy
        if copy is not None and threading.get_ident() == self._caller:  # which so runs no operation now
            wait([self._complete], timeout)
            copy.fence()
        found = super().exception(timeout)
        self.seen = True
        return found


class RunningCopies:
    """The copies that are not confirmed yet, and the futures of those that failed.

    Confirmed copies are not held. The guards and the background thread refer to this and not to the stager, so that a
    stager that is dropped without being closed is freed.
    """

    def __init__(self) -> None:
        self._running: dict[DeferredCopy, CopyFuture] = {}
        self._failed: deque[CopyFuture] = deque()
        self._touched: deque[tuple[list[tuple[Place, int]], bool]] = deque()
        self._caller = 0

    def add(self, copy: DeferredCopy) -> CopyFuture:
        """Return the future of a copy that is about to be run."""
        self._caller = threading.get_ident()
        future = self._running[copy] = CopyFuture(copy)
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        return future

    def drop(self, copy: DeferredCopy) -> None:
        """Wait no longer for a copy, whose future nobody has."""
        self._running.pop(copy, None)

    def run(self, copy: DeferredCopy, pending: PendingCopy, state: StateDict) -> None:
        """Copy the rest and complete the future; on the background thread."""
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
            error.__traceback__ = None  # its frames hold the memory
            self._failed.append(future)
            future.fail(error)
        finally:
            pending.storages.clear()  # whoever has the future must not keep the source's memory
        self.drop(copy)

    def _note_touched(self, copy: DeferredCopy, pending: PendingCopy, failed: bool) -> None:
        rows = [pending.layout.signature[i] for i in copy.touched]
        places = [((device, at), shape.numel() * dtype.itemsize) for at, dtype, shape, _, _, _, device in rows]
        if places or failed:
            self._touched.append((places, failed))

    def take_touched(self) -> tuple[list[tuple[Place, int]], bool]:
        """Return which memory was written while a copy was not confirmed, and whether a copy failed for it; once."""
        taken = [self._touched.popleft() for _ in range(len(self._touched))]
        return [place for places, _ in taken for place in places], any(failed for _, failed in taken)

    def give_up(self) -> None:
        """Fail the futures of a parent's copies in a forked child, where no thread completes them."""
        for copy, future in self._running.items():
            CopyFuture.__init__(future, copy)  # a thread of the parent may have had its locks
            future.fail(StagingError([], "the copy was not complete when this process was forked"))
        self._running, self._failed = {}, deque()

    def finish_before_write(self) -> None:
        """Return when no copy needs the sources any more, and confirm those copies."""
        for copy in list(self._running):
            copy.finish_before_write()

    def finish_before_free(self, x: torch.UntypedStorage | torch.Tensor) -> None:
        """Return when no copy reads from a storage any more, or from the storage of a tensor."""
        for copy in list(self._running):
            if copy.reads(x):
                copy.finish_before_write()

    def fence(self) -> None:
        """Confirm the copies that are complete, if this is the thread that has begun them."""
        if self._running and threading.get_ident() == self._caller:
            for copy in list(self._running):
                copy.fence()

    def wait(self) -> None:
        """Return when every copy is confirmed or has failed."""
        self.finish_before_write()
        wait(list(self._running.values()))

    def raise_unseen(self) -> None:
        """Raise the failure of a copy whose future was not asked; once."""
        while self._failed:
            future = self._failed.popleft()
            if not future.seen:
                future.result()


def _named(state: StateDict, error: Exception) -> Exception:
    """Return an error about the tensor of some index with the path that leads to it in ``state``."""
    if type(error) is StagingError and len(error.path) == 1 and isinstance(error.path[0], int):
        return WrittenWhileStagedError(_path(state, error.path[0]), error.reason)
    return error


def _written(state: StateDict, index: int) -> WrittenWhileStagedError:
    return WrittenWhileStagedError(
        _path(state, index),
        "it was written, freed or resized while it was copied, by something that is neither a torch optimizer nor "
        "load_state_dict. Call stage() again, which copies everything before it returns",
    )


def _path(state: StateDict, index: int) -> tuple[object, ...]:
    with contextlib.suppress(Exception):  # the state dict may be another one by now
        return path_to(state, index)
    return ()
