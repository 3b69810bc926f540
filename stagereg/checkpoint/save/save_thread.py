"""A thread that works off saves of a checkpointer, one after the other.

There is one for the store, and one for a tier, so that saves to the tier go on while a slow store takes one.

At most two saves are under way: one being written and one waiting, which matches a stager that hands out two copies.

Failures (:mod:`.failures`) are kept without tracebacks, which would keep the staged memory alive. A save that takes
longer than the time-out counts as failed from then on, and as hanging until it ends: a thread that waits for the
storage cannot be ended. So it is a daemon thread, and every wait here ends with the time-out.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
from stagereg.checkpoint.save.committing import WAITING_FOR_OTHERS, write_and_commit
from stagereg.checkpoint.save.failures import Failures
from stagereg.checkpoint.save.pending_save import PendingSave, Target
from stagereg.checkpoint.save.retake import Retake
from stagereg.checkpoint.save.scheduling import give_way
from stagereg.checkpoint.store.advice import advice, causes
from stagereg.errors import CheckpointError, SaveTimeoutError, WrittenWhileSavedError, kind_of, reason

_log = logging.getLogger(__name__)

_MOST_UNDER_WAY = 2
_POLL_INTERVAL_S = 0.05  # how often one looks whether a save takes too long
_IDLE_S = 1.0  # how often the thread looks for what this rank has passed over


@dataclass
class CheckpointStats:
    """What this process's checkpoints have cost so far.

    Attributes:
        saves: checkpoints committed.
        tier_saves: steps written to the tier, by all ranks.
        bytes_staged: bytes of tensor data copied on this rank, over all committed saves.
        stall_seconds: how long each call of ``save`` held the training loop, in order of the calls.
        write_seconds: how long the background took to write and commit each checkpoint, in order of the commits.
        on_commit_calls: calls of ``on_commit`` components, of all together; on rank 0.
        on_commit_failures: what went wrong with these: raised, took too long, was left out, lost the checkpoint.
    """

    saves: int = 0
    tier_saves: int = 0
    bytes_staged: int = 0
    stall_seconds: list[float] = field(default_factory=list)
    write_seconds: list[float] = field(default_factory=list)
    on_commit_calls: int = 0
    on_commit_failures: int = 0


class SaveThread:
    """The thread, and what has become of its saves.

    All methods are for the training thread, and for the end of the process, which may come while that still runs. In a
    forked child nothing is under way: it has no such thread.

    Args:
        target: where the saves go; its schedule is given how old each state was when its checkpoint was complete.
        timeout: of one save, from when the one before it has ended.
        warns: whether failures are logged, and never raised.
        ahead: that of the tier, which is waited for, asked and closed with this one.
    """

    def __init__(
        self, target: Target, timeout: datetime.timedelta, warns: bool = False, ahead: SaveThread | None = None
    ) -> None:
        self.ahead = ahead
        self.newest: int | None = None  # the step of the newest checkpoint there that this run knows to be good
        describe = weakref.WeakMethod(self.describe_newest)  # a cycle would keep the thread of one that was dropped
        self.failures = Failures(warns, target.ranks.rank == 0, lambda: (describe() or str)())
        self.stats = CheckpointStats()
        # Called on the thread with the step of each complete checkpoint, before its save has ended.
        self.listeners: list[Callable[[int], object]] = []
        self.target = target
        self.timeout_s = timeout.total_seconds()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._look: Callable[[], Callable[[], None] | None] = lambda: None
        self._process = os.getpid()
        self._clearing = False  # whether it deletes what is no longer kept
        self.retake = Retake(self.timeout_s)
        self._lock = threading.Lock()
        self._under_way: deque[PendingSave] = deque()
        weakref.finalize(self, self._queue.put, None)  # or the thread of one that was never closed would stay
        shutdown.wait_for(self)

    @property
    def hanging(self) -> bool:
        """Whether the save being written has passed the time-out, which was reported, and has not ended."""
        first = self._first()
        return (first is not None and first.late) or (self.ahead is not None and self.ahead.hanging)

    def admit(self, save: PendingSave) -> None:
        """Wait until ``save`` may be staged. Raises ``CheckpointError`` if an earlier save has failed, or hangs."""
        self._wait(_MOST_UNDER_WAY)
        self.raise_failure()
        if self.hanging:
            self.failures.set_status(save.step)
            raise CheckpointError(f"Step {save.step} was not saved: an earlier save hangs. {self.describe_newest()}")

    def submit(self, save: PendingSave) -> None:
        """Have ``save`` written after those before it; its failure is kept for :meth:`raise_failure`."""
        self._start()
        self._under_way.append(save)
        self._queue.put(partial(self._write, save))

    def call_when_idle(self, look: Callable[[], None]) -> None:
        """Call ``look`` on the thread about once a second while nothing is written. A bound method, held weakly."""
        self._look = weakref.WeakMethod(look)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            arguments = (self._queue, self._look)
            thread = threading.Thread(target=_work, args=arguments, name="stagereg-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CheckpointError(f"No thread to write checkpoints could be started: {error}") from error
            self._thread = thread

    def wait(self) -> bool:
        """Wait until all saves have ended, well or not; False if one of them takes too long."""
        ended = self.ahead is None or self.ahead.wait()
        return self._wait(1) and ended

    def _wait(self, most: int) -> bool:
        """Wait until fewer than ``most`` saves of this thread have not ended; False if one of them takes too long."""
        self.retake.confirm()
        while (first := self._first()) is not None and not first.late and len(self._under_way) >= most:
            first.over.wait(_POLL_INTERVAL_S)
        return first is None or not first.late

    def finish(self) -> bool:
        """As :meth:`wait`, and until what follows a save is done, which may take as long: what is old is deleted."""
        ended, until = self.wait(), time.monotonic() + self.timeout_s
        while ended and self._clearing and os.getpid() == self._process and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        return ended

    def ends_by(self, until: float) -> bool:
        """Wait until all saves of this thread have ended, well or not; False if they have not at ``until``."""
        while self._first() is not None and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        return self._first() is None

    @property
    def failing(self) -> bool:
        """Whether :meth:`raise_failure` would raise."""
        self._first()
        return bool(self.failures) or (self.ahead is not None and self.ahead.failing)

    def raise_failure(self) -> None:
        """Raise the first failure that no call has raised yet, and log later ones."""
        if self.ahead is not None:
            self.ahead.raise_failure()
        self._first()
        self.failures.raise_first()

    def describe_newest(self) -> str:
        here, ahead = self.newest, self.ahead
        if ahead is not None and ahead.newest is not None and (here is None or ahead.newest > here):
            more = "" if here is None else f" Step {here} is in {self.target.where}."
            return f"{ahead.describe_newest()}{more}"
        if here is None:
            return f"This run has no complete checkpoint in {self.target.where} yet."
        return f"The newest good checkpoint is step {here}, in {self.target.where}."

    def finish_before_restore(self) -> None:
        """Wait for every save, on the training thread, which then meets the other ranks in an exchange."""
        self.finish()
        if self.hanging:  # in an exchange with the other ranks, which another one must not meet
            self.raise_failure()
            raise CheckpointError("Nothing was restored: a save has not ended yet, since the storage hangs.")

    def close(self) -> None:
        """End the thread after its last save; one that hangs commits nothing, should it ever go on."""
        if self.ahead is not None:
            self.ahead.close()
        for save in self._under_way:
            save.abandoned = True
        self._queue.put(None)

    def _first(self) -> PendingSave | None:
        """Return the first save that has not ended, if there is one; report it once it takes too long."""
        if os.getpid() != self._process:
            return None
        with self._lock:
            while self._under_way and self._under_way[0].over.is_set():
                self._under_way.popleft()
            if not self._under_way:
                return None
            first = self._under_way[0]
            first.until = min(first.until, time.monotonic() + self.timeout_s)  # its turn may come late
            if not first.late and time.monotonic() >= first.until:
                first.late = True
                self.failures.keep_failure(first.step, self._lateness(first), everywhere=first.at == WAITING_FOR_OTHERS)
            return first

    def _lateness(self, save: PendingSave) -> CheckpointError:
        ranks, seconds = self.target.ranks, self.timeout_s
        who = "it" if ranks.group is None else f"rank {ranks.rank}"
        limit = f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"
        return SaveTimeoutError(
            f"Step {save.step} was not saved: it has taken longer than {limit} ({who} is at: {save.at}). Does the "
            f"storage hang? Until this ends, no other save begins. {self.describe_newest()}"
        )

    # -- on the thread

    def _write(self, save: PendingSave) -> None:
        save.until = time.monotonic() + self.timeout_s
        failure: CheckpointError | None = None
        try:
            done = write_and_commit(save)
        except BaseException as error:
            failure = self._fail(save, error)
            if isinstance(failure, WrittenWhileSavedError) and save.to.required:
                failure = self.retake.save_again(save, reason(error), failure)
            _log.debug("A save failed.", exc_info=error)
            for connected in causes(error):
                connected.__traceback__ = None
        else:
            self.failures.set_status(None)
            if done is not None:
                ended = record.now()
                self.newest, self.failures.last = save.step, None
                save.to.schedule.ended(ended - save.called)
                self._completed(save, done[0], ended, done[1])
        with self._lock:
            self._clearing = True
            if save.late:
                state = "is saved after all" if save.step == self.newest else "was not saved"
                _log.warning("stagereg: storage is responding again; step %d %s", save.step, state)
            elif failure is not None and save.agreed is None:  # else the save to the store says it
                self.failures.keep_failure(save.step, failure)
            save.over.set()
        try:
            save.to.clear()
        except Exception:
            _log.debug("Deleting old checkpoints failed.", exc_info=True)
        self._clearing = False

    def _completed(self, save: PendingSave, began: float, ended: float, nbytes: int) -> None:
        """Take notice of a save that is complete; the moments are of ``record.now``."""
        step, seconds = save.step, ended - began
        if save.to.required:
            self.stats.saves += 1
            self.stats.write_seconds.append(seconds)
        else:
            self.stats.tier_saves += 1
        if save.agreed is None:  # else the save to the store counts them
            self.stats.bytes_staged += save.copy.nbytes or 0
        kind = "write" if save.to.required else "tier"
        record.emit(kind, step=step, start=began, seconds=seconds, bytes=nbytes, dir=self.target.where)
        for listener in self.listeners:
            try:
                listener(step)
            except Exception:  # the checkpoint is complete, so the save must not fail
                _log.exception("stagereg: step %d is saved; what was to be done then has failed", step)

    def _fail(self, save: PendingSave, error: BaseException) -> CheckpointError | None:
        """Note that a save has failed; return what is to be raised, ``None`` if its training loop has raised it."""
        save.copy.record(save.step)
        of_tier = {} if save.to.required else {"dir": save.to.where}
        record.emit("lost", step=save.step, error=reason(error), **of_tier)
        save.to.schedule.ended(None)
        if isinstance(error, CheckpointError) and save.copy.failure is not None:
            self.failures.last = error
            self.failures.set_status(save.step)
            return None
        known = isinstance(error, CheckpointError)
        text = reason(error) if known else f"Step {save.step} was not saved: {reason(error)}"
        parts = (f"{text.rstrip('.')}.", advice(error, self.target.where), self.describe_newest())
        failure = kind_of([error])(" ".join(part for part in parts if part))
        failure.__cause__ = error.__cause__ if known else error
        return failure


def _work(saves: queue.SimpleQueue[Callable[[], None] | None], look: Callable[[], Callable[[], None] | None]) -> None:
    give_way()
    while True:
        try:
            write = saves.get(timeout=_IDLE_S)
        except queue.Empty:
            write = look()
            try:
                if write is not None:
                    write()
            except Exception:  # the store, or the group, is gone; saves that still come must find the thread
                _log.debug("Looking for what this rank has passed over failed.", exc_info=True)
        else:
            if write is None:
                return
            write()
        del write  # while it waits for the next save, the thread keeps nothing alive
