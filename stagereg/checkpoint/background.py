"""One thread that works off saves in order, and failures that cannot get lost.

At most two saves are under way: one being written and one waiting, which matches a stager that hands out two copies. A
failure is kept until it is raised or logged: by the next call that asks, or else at the end of the job or process
(:mod:`stagereg.shutdown`). It is kept without tracebacks, which would keep the staged memory alive; they are logged at
level DEBUG.

A save that takes longer than the time-out counts as failed from then on, and as hanging until it ends: a thread that
waits for the storage cannot be ended. So it is a daemon thread, and every wait here ends with the time-out.
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

import stagereg.record as record
import stagereg.shutdown as shutdown
from stagereg.checkpoint.advice import advice, causes
from stagereg.checkpoint.pending_save import WAITING, PendingSave, SaveTarget, write_and_commit
from stagereg.checkpoint.rank_group import reason
from stagereg.checkpoint.schedule import Schedule
from stagereg.errors import CheckpointError

__all__ = ["Background"]

_MOST_UNDER_WAY = 2
_LOOK_S = 0.05  # how often one looks whether a save takes too long
_log = logging.getLogger(__name__)


class Background:
    """The thread, and what has become of its saves.

    All methods are for the training thread, and for the end of the process, which may come while that still runs. In a
    forked child nothing is under way: it has no such thread.
    """

    def __init__(self, target: SaveTarget, timeout: datetime.timedelta, schedule: Schedule, warns: bool) -> None:
        self.newest: int | None = None  # the step of the newest checkpoint that this run knows to be good
        self.write_seconds: list[float] = []  # of the saves that were committed, in their order
        self.bytes_staged = 0
        self._target = target
        self._timeout_s = timeout.total_seconds()  # of one save, from when the one before it has ended
        self._schedule = schedule
        self._warns = warns  # only, when a save fails; then the exit status is 1 if the last save has failed
        self._queue: queue.SimpleQueue[tuple[Background, PendingSave] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._under_way: deque[PendingSave] = deque()
        self._failures: deque[tuple[CheckpointError, bool]] = deque()  # each with whether all ranks report it
        self._refused: list[int] = []  # steps, since the save before them hangs, until that is logged
        weakref.finalize(self, self._queue.put, None)  # or the thread of one that was never closed would stay
        shutdown.wait_for(self)

    @property
    def hanging(self) -> bool:
        """Whether the save being written has passed the time-out, which was reported, and has not ended."""
        first = self._first()
        return first is not None and first.late

    def admit(self, save: PendingSave) -> None:
        """Wait until ``save`` may be staged. Raises ``CheckpointError`` if an earlier save has failed, or hangs."""
        while (first := self._first()) is not None and not first.late and len(self._under_way) >= _MOST_UNDER_WAY:
            first.over.wait(_LOOK_S)
        self.raise_failure()
        if self.hanging:
            self._refused.append(save.step)
            self._set_failed(save.step)
            raise CheckpointError(f"Step {save.step} was not saved: an earlier save hangs. {self._there()}")

    def submit(self, save: PendingSave) -> None:
        """Have ``save`` written after those before it; its failure is kept for :meth:`raise_failure`."""
        if self._thread is None:
            thread = threading.Thread(target=_work, args=(self._queue,), name="stagereg-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CheckpointError(f"No thread to write checkpoints could be started: {error}") from error
            self._thread = thread
        self._under_way.append(save)
        self._queue.put((self, save))

    def drain(self) -> bool:
        """Wait until every save has ended, well or not; False if one has taken too long."""
        while (first := self._first()) is not None and not first.late:
            first.over.wait(_LOOK_S)
        return first is None

    def finish(self) -> bool:
        """Drain; log the failures if they are warnings. See :class:`stagereg.shutdown.BackgroundWork`."""
        ended = self.drain()
        if self._warns:
            self.raise_failure()
        return ended

    def raise_failure(self) -> None:
        """Raise the first failure not reported yet, and log later ones; log all if failures are warnings."""
        if self._warns:
            for failure, everywhere in self._taken():
                self._warn(failure, everywhere)
        elif (first := self.take_failure()) is not None:
            raise first

    def take_failure(self) -> CheckpointError | None:
        """Return the first failure not reported yet, also if failures are warnings; log later ones."""
        failures = [failure for failure, _ in self._taken()]
        for later in failures[1:]:
            _log.error("%s", later)
        return failures[0] if failures else None

    def raise_or_warn(self, save: PendingSave, error: BaseException) -> None:
        """Raise what has kept this rank from staging; log it if failures are warnings."""
        if not self._warns or not isinstance(error, CheckpointError):
            raise error
        if save.step not in self._refused:  # which are logged together
            self._warn(error)

    def close(self) -> None:
        """End the thread after its last save; one that hangs commits nothing, should it ever go on."""
        for save in self._under_way:
            save.abandoned = True
        self._queue.put(None)

    def _warn(self, failure: CheckpointError, everywhere: bool = True) -> None:
        """Log a failed save while training goes on; what is reported ``everywhere`` is a warning on rank 0 only."""
        log = _log.info if everywhere and self._target.ranks.rank > 0 else _log.warning
        log("stagereg: %s Training goes on.", failure)

    def _first(self) -> PendingSave | None:
        """Return the first save that has not ended, if there is one; report it once it takes too long."""
        if os.getpid() != self._process:
            self._under_way.clear()
            return None
        with self._lock:
            while self._under_way and self._under_way[0].over.is_set():
                self._under_way.popleft()
            if not self._under_way:
                return None
            first = self._under_way[0]
            if not first.late and time.monotonic() >= first.until:
                first.late = True
                self._keep(self._lateness(first), everywhere=first.at == WAITING)
            return first

    def _lateness(self, save: PendingSave) -> CheckpointError:
        ranks, seconds = self._target.ranks, self._timeout_s
        who = "it" if ranks.group is None else f"rank {ranks.rank}"
        limit = f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"
        self._set_failed(save.step)
        return CheckpointError(
            f"Step {save.step} was not saved: it has taken longer than {limit} ({who} is at: {save.at}). Does the "
            f"storage hang? Until this ends, no other save begins. {self._there()}"
        )

    def _taken(self) -> list[tuple[CheckpointError, bool]]:
        self._first()
        taken = [self._failures.popleft() for _ in range(len(self._failures))]
        for failure, _ in taken:
            shutdown.withdraw_error(failure)
        return taken

    def _keep(self, failure: CheckpointError, everywhere: bool = True) -> None:
        if not self._warns:
            shutdown.report_error(failure)
        self._failures.append((failure, everywhere))

    def _set_failed(self, step: int) -> None:
        if self._warns:
            text = f"the last save has failed, of step {step}, so the exit status is 1. {self._there()}"
            shutdown.set_last_status(self._target.store.root, CheckpointError(text))

    def _there(self) -> str:
        """Return a sentence on the newest good checkpoint."""
        if self.newest is None:
            return f"This run has no complete checkpoint in {self._target.store.root} yet."
        return f"The newest good checkpoint is step {self.newest}, in {self._target.store.root}."

    # -- on the thread

    def _write(self, save: PendingSave) -> None:
        save.until = time.monotonic() + self._timeout_s
        failed: BaseException | None = None
        failure: CheckpointError | None = None
        try:
            self._look_at_directory(save.step)
            began, nbytes = write_and_commit(save)
            ended = record.now()
        except BaseException as error:
            failed, failure = error, self._fail(save, error)
            _log.debug("A save failed.", exc_info=error)
            for connected in causes(error):
                connected.__traceback__ = None
        else:
            self.newest = save.step
            self.write_seconds.append(ended - began)
            self.bytes_staged += save.nbytes or 0
            self._schedule.ended(ended - save.called)
            record.emit("write", step=save.step, start=began, seconds=ended - began, bytes=nbytes)
        with self._lock:
            if failed is None:
                shutdown.set_last_status(self._target.store.root, None)
            if save.late:
                self._log_return(save, failed)
            elif failure is not None:
                self._keep(failure)
            save.over.set()

    def _fail(self, save: PendingSave, error: BaseException) -> CheckpointError | None:
        """Note that a save has failed; return what is to be raised, ``None`` if its training loop has raised it."""
        save.record_copied()
        record.emit("lost", step=save.step, error=reason(error))
        self._schedule.ended(None)
        self._set_failed(save.step)
        known = isinstance(error, CheckpointError)
        if known and save.failure is not None:
            return None
        text = reason(error) if known else f"Step {save.step} was not saved: {reason(error)}"
        parts = (f"{text.rstrip('.')}.", advice(error, self._target.store.root), self._there())
        failure = CheckpointError(" ".join(part for part in parts if part))
        failure.__cause__ = error.__cause__ if known else error
        return failure

    def _log_return(self, save: PendingSave, failed: BaseException | None) -> None:
        """Log that the storage responds again, and what has become of the save that was late."""
        what = "is saved after all" if failed is None else f"was not saved ({reason(failed)})"
        steps = ", ".join(map(str, self._refused))
        also = f" In the meantime these steps were not saved: {steps}." if steps else ""
        self._refused.clear()
        log = _log.info if self._target.ranks.rank > 0 else _log.warning
        log(
            "stagereg: storage is responding again; checkpoints resume: step %d %s, after %.0f s.%s",
            *(save.step, what, record.now() - save.called, also),
        )

    def _look_at_directory(self, step: int) -> None:
        """Log it if all that was saved has been deleted; the save itself will report what else is wrong there."""
        store = self._target.store
        if self._target.ranks.rank > 0 or store.remote or os.path.isdir(store.root):
            return
        try:
            os.lstat(store.root)
        except FileNotFoundError:
            _log.warning(
                "stagereg: %s was deleted, with all checkpoints in it. It is made again for step %d.", store.root, step
            )
        except OSError:  # such as of a server that is away, and may have them still
            return
        self.newest = None


def _work(saves: queue.SimpleQueue[tuple[Background, PendingSave] | None]) -> None:
    while (given := saves.get()) is not None:
        background, save = given
        background._write(save)
        # While it waits for the next save, the thread keeps nothing alive.
        del given, background, save
