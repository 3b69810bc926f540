"""The threads of the save targets. Each thread writes the saves to its target one after the other.

Each target has its own thread, so that saves to a local tier continue during a slow save to the checkpoint storage.

At most two saves are in progress: one is being written, and one waits. This fits a stager with two staged copies.

Failures (:mod:`.failures`) are stored without tracebacks, which would keep the staged memory alive. A save that takes
longer than the timeout has failed, but blocks its thread until it ends, because a thread that waits for the storage
cannot be terminated. So the thread is a daemon thread, and every wait for a save is limited by the timeout.
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
from stagereg.checkpoint.dispatch import weakly
from stagereg.checkpoint.extension import CheckpointStats, Saves
from stagereg.checkpoint.save.committing import WAITING_FOR_OTHERS, ExchangeCache, write_and_commit
from stagereg.checkpoint.save.failures import Failures
from stagereg.checkpoint.save.retake import Retake
from stagereg.checkpoint.save.scheduling import give_way
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy, Write
from stagereg.checkpoint.store.advice import advice, causes
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import CheckpointError, SaveTimeoutError, WrittenWhileSavedError, kind_of, reason

_log = logging.getLogger(__name__)

_MOST_UNDER_WAY = 2
_POLL_INTERVAL_S = 0.05  # seconds between checks whether a save has exceeded its timeout
_IDLE_S = 1.0  # seconds between checks for requests that this rank has missed


class SaveThread:
    """The thread of one target, and the results of its saves.

    The training thread calls the methods; so does the shutdown of the process, which may run at the same time. In a
    forked child, the thread does not exist, and no save is in progress.

    ``target`` receives the saves. Its schedule gets the age of each saved state when the checkpoint is complete.
    ``timeout``: the timeout of one save, from the end of the previous save. ``warns``: whether failures are logged
    instead of raised. ``retake`` repeats discarded saves; if it is ``None``, a discarded save is an error. ``nearer``:
    the threads of the targets before this one; messages also name their newest checkpoints.
    """

    def __init__(
        self,
        target: SaveTarget,
        timeout: datetime.timedelta,
        warns: bool = False,
        stats: CheckpointStats | None = None,
        retake: Retake | None = None,
        nearer: Sequence[SaveThread] = (),
    ) -> None:
        self.newest: int | None = None  # step of the newest checkpoint known to be valid; may be set on any thread
        describe = weakly(self.describe_newest, "")  # a reference cycle would keep the thread running
        self.failures = Failures(warns, target.ranks.rank == 0, describe, target.where)
        self.stats = stats or CheckpointStats()
        # Called on the thread with the step of each complete checkpoint, before the save ends.
        self.listeners: list[Callable[[int], object]] = []
        self.target = target
        self.timeout_s = timeout.total_seconds()
        self._retake, self._nearer = retake, nearer
        self._cache = ExchangeCache(target.repeats)  # used only by the thread
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._look: Callable[[], None] = lambda: None
        self._process = os.getpid()
        self._clearing = False  # whether the thread is deleting checkpoints that are no longer retained
        self._lock = threading.Lock()
        self._under_way: deque[Write] = deque()
        weakref.finalize(self, self._queue.put, None)  # ends the thread if the checkpointer was never closed
        shutdown.wait_for(self)

    @property
    def hanging(self) -> bool:
        """Whether the current save has exceeded its timeout and has not ended."""
        first = self._first()
        return first is not None and first.late

    def submit(self, write: Write) -> None:
        """Queue a copy, to be written after the earlier copies. If the write fails, :meth:`raise_failure` raises."""
        self._start()
        self._under_way.append(write)
        self._queue.put(partial(self._write, write))

    def call_when_idle(self, look: Callable[[], None]) -> None:
        """Call the bound method ``look`` on the thread once a second while no save runs. Stores a weak reference."""
        self._look = weakly(look, None)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            arguments = (self._queue, self._look)
            thread = threading.Thread(target=_work, args=arguments, name="stagereg-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CheckpointError(f"Cannot start a thread to write checkpoints: {error}") from error
            self._thread = thread

    def wait(self, most: int = 1) -> bool:
        """Wait until the number of saves in progress is below ``most``. Return False if a save exceeds its timeout."""
        if self._retake is not None:
            self._retake.confirm()
        while (first := self._first()) is not None and not first.late and len(self._under_way) >= most:
            first.over.wait(_POLL_INTERVAL_S)
        return first is None or not first.late

    def finish(self) -> bool:
        """Call :meth:`wait`, then wait until old checkpoints are deleted, for at most the timeout of one save."""
        ended, until = self.wait(), time.monotonic() + self.timeout_s
        while ended and self._clearing and os.getpid() == self._process and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        return ended

    def ends_by(self, until: float) -> bool:
        """Wait until all saves of this thread have ended or failed. Return False if a save still runs at ``until``."""
        while self._first() is not None and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        return self._first() is None

    @property
    def failing(self) -> bool:
        """Whether :meth:`raise_failure` would raise."""
        self._first()
        return bool(self.failures)

    def raise_failure(self) -> None:
        """Raise the first failure that no call has raised yet, and log the later ones."""
        self._first()
        self.failures.raise_first()

    def describe_newest(self) -> str:
        """Return a sentence about the newest valid checkpoint in this target and the targets before it."""
        known = [each for each in (self, *reversed(self._nearer)) if each.newest is not None]
        if not known:
            return f"This run has no complete checkpoint in {self.target.where} yet."
        best = max(known, key=lambda each: each.newest or 0)
        farther = (f" Step {each.newest} is in {each.target.where}." for each in known[: known.index(best)])
        return f"The newest valid checkpoint is step {best.newest}, in {best.target.where}.{''.join(farther)}"

    def abandon(self) -> None:
        """Prevent all saves that are in progress from committing."""
        for save in self._under_way:
            save.abandoned = True

    def close(self) -> None:
        """End the thread. Saves that have not ended, for example because the storage hangs, will not commit."""
        self.abandon()
        self._queue.put(None)

    def _first(self) -> Write | None:
        """Return the first save that has not ended, or ``None``. Store a failure if that save exceeds its timeout."""
        if os.getpid() != self._process:
            return None
        with self._lock:
            while self._under_way and self._under_way[0].over.is_set():
                self._under_way.popleft()
            if not self._under_way:
                return None
            first = self._under_way[0]
            first.until = min(first.until, time.monotonic() + self.timeout_s)  # infinite until the write begins
            if not first.late and time.monotonic() >= first.until:
                first.late = True
                everywhere = first.at == WAITING_FOR_OTHERS
                self.failures.keep_failure(first.request.step, self._lateness(first), everywhere)
            return first

    def _lateness(self, write: Write) -> CheckpointError:
        ranks, seconds = self.target.ranks, self.timeout_s
        who = "it" if ranks.group is None else ranks.name(ranks.rank)
        limit = f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"
        return SaveTimeoutError(
            f"Step {write.request.step} was not saved: it took longer than {limit} ({who} is at: {write.at}). Check "
            f"whether the storage hangs. No other save begins until this save ends. {self.describe_newest()}"
        )

    # -- on the thread

    def _write(self, write: Write) -> None:
        step, target = write.request.step, self.target
        with self._lock:
            write.until = time.monotonic() + self.timeout_s
        failure: CheckpointError | None = None
        try:
            done = write_and_commit(write, self._cache)
        except BaseException as error:
            failure = self._fail(write, error)
            if isinstance(failure, WrittenWhileSavedError) and target.required and self._retake is not None:
                failure = self._retake.save_again(write.request, target.ranks, reason(error), failure)
            _log.debug("A save failed.", exc_info=error)
            for connected in causes(error):
                connected.__traceback__ = None
        else:
            self.failures.set_status(None)
            if done is not None:
                ended = record.now()
                self.newest = step
                self.failures.last = None
                target.schedule.ended(ended - write.request.called)
                self._completed(write, done[0], ended, done[1])
        with self._lock:
            self._clearing = True
            if write.late:
                state = "was saved after all" if step == self.newest else "was not saved"
                _log.warning("stagereg: The storage responds again: step %d %s.", step, state)
            elif failure is not None and (write.is_last or write.agreed):  # otherwise the last target reports it
                self.failures.keep_failure(step, failure)
            write.over.set()
        try:
            target.clear()
        except Exception:
            _log.debug("Deleting old checkpoints failed.", exc_info=True)
        self._clearing = False

    def _completed(self, write: Write, began: float, ended: float, nbytes: int) -> None:
        """Count and report a complete save; ``began`` and ``ended`` are times of ``record.now``."""
        step, seconds, target = write.request.step, ended - began, self.target
        if target.required:
            self.stats.saves += 1
            self.stats.write_seconds.append(seconds)
        else:
            self.stats.tier_saves += 1
        if write.is_last:
            self.stats.bytes_staged += write.copy.nbytes or 0
        kind = "write" if target.required else "tier"
        record.emit(kind, step=step, start=began, seconds=seconds, bytes=nbytes, dir=target.where)
        for listener in self.listeners:
            try:
                listener(step)
            except Exception:  # the checkpoint is complete, so the save must not fail
                _log.exception("stagereg: Step %d is saved, but a listener of completed saves failed.", step)

    def _fail(self, write: Write, error: BaseException) -> CheckpointError | None:
        """Record the failure of a save. Return the error to raise, or ``None`` if the training loop has raised it."""
        step, target = write.request.step, self.target
        record.emit("lost", step=step, error=reason(error), **({} if target.required else {"dir": target.where}))
        target.schedule.ended(None)
        if isinstance(error, CheckpointError) and write.copy.failure is not None:
            self.failures.last = error
            self.failures.set_status(step)
            return None
        known = isinstance(error, CheckpointError)
        text = reason(error) if known else f"Step {step} was not saved: {reason(error)}"
        parts = (f"{text.rstrip('.')}.", advice(error, target.where), self.describe_newest())
        failure = kind_of([error])(" ".join(part for part in parts if part))
        failure.__cause__ = error.__cause__ if known else error
        return failure


class SaveThreads(Saves):
    """The threads of all targets. Each save to any target also goes to the first target, which prepares the copy.

    ``targets``: in order, a local tier before the checkpoint directory; the same on all ranks. The other arguments are
    those of :class:`SaveThread`. Called on the training thread.
    """

    def __init__(self, targets: Sequence[SaveTarget], timeout: datetime.timedelta, warns: bool = False) -> None:
        self.stats, self.retake = CheckpointStats(), Retake(timeout.total_seconds())
        self.all: list[SaveThread] = []
        for target in targets:
            self.all.append(SaveThread(target, timeout, warns, self.stats, self.retake, [*self.all]))
        self.targets, self.last = targets, self.all[-1]  # the last target retains checkpoints longest
        self.failures = self.last.failures  # includes the errors that kept this rank from staging

    @property
    def newest(self) -> int | None:
        return self.last.newest

    def note_newest(self, step: int | None) -> None:
        self.last.newest = step

    def ends_by(self, until: float) -> bool:
        return self.last.ends_by(until)

    @property
    def hanging(self) -> bool:
        """Whether the current save of some target has exceeded its timeout."""
        return any(each.hanging for each in self.all)

    def admit(self, request: Request) -> None:
        """Wait until a save may be staged. Raises ``CheckpointError`` if an earlier save has failed or hangs."""
        for number in request.targets:
            thread = self.all[number]
            thread.wait(_MOST_UNDER_WAY)
            for each in self.all[: number + 1]:
                each.raise_failure()
            if any(each.hanging for each in self.all[: number + 1]):
                thread.failures.set_status(request.step)
                newest = thread.describe_newest()
                raise CheckpointError(f"Step {request.step} was not saved: an earlier save hangs. {newest}")

    def submit(self, request: Request, copy: StagedCopy) -> None:
        """Queue a copy for each target of a request."""
        for number in request.targets:
            thread = self.all[number]
            thread.submit(Write(request, copy, thread.target, number))

    def held(self, request: Request, seconds: float) -> None:
        """Report to the schedules how long a save has blocked the training loop. Collective."""
        for number in request.targets:
            self.all[number].target.schedule.held(request.step, seconds)

    def wait(self) -> bool:
        """Wait until all saves have ended or failed. Return False if a save exceeds its timeout."""
        ended = [each.wait() for each in self.all]
        return all(ended)

    def finish(self) -> bool:
        ended = [*(each.wait() for each in self.all[:-1]), self.last.finish()]
        return all(ended)

    def finish_before_restore(self) -> None:
        """Wait for every save before a restore. Raises: ``CheckpointError`` if a save hangs."""
        self.finish()
        if self.hanging:  # the ranks still exchange messages about the save, and a restore would interfere
            self.raise_failure()
            raise CheckpointError("Nothing was restored: a save has not ended yet, because the storage hangs.")

    def restored(self, step: int, path: str) -> None:
        """Record that ``step`` was restored from ``path``. Called on all ranks."""
        for each in self.all:
            each.target.schedule.restored(step)
            if each.target.names(path):
                each.newest = step

    def raise_failure(self) -> None:
        for each in self.all:
            each.raise_failure()

    def describe_newest(self) -> str:
        return self.last.describe_newest()

    def close(self) -> None:
        """End the threads. Saves that have not ended, for example because the storage hangs, will not commit."""
        for each in self.all:
            each.close()


def _work(saves: queue.SimpleQueue[Callable[[], None] | None], look: Callable[[], None]) -> None:
    give_way()
    while True:
        try:
            write = saves.get(timeout=_IDLE_S)
        except queue.Empty:
            try:
                look()
            except Exception:  # the rendezvous store or the process group is gone; later saves still need the thread
                _log.debug("The check for requests that this rank has missed raised an error.", exc_info=True)
        else:
            if write is None:
                return
            write()
            del write  # frees the staged copy while the thread waits for the next save
