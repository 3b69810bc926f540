"""Quarantine: counts the crashes of runs after a restore, and skips checkpoints after which runs keep crashing."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

import stagereg.base.shutdown as shutdown
import stagereg.extensions.recovery.crashes as records
import stagereg.extensions.recovery.rank_failure as rank_failure
from stagereg.base.crash_report import place_of
from stagereg.base.deadline import within
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, Rejection, RestoreRequest, Saves, Setup
from stagereg.checkpoint.format.manifest import RESTORED, step_name
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.errors import CheckpointError, is_consequence
from stagereg.extensions.recovery.crashes import STORE, Crashes, RestoreRecord, is_in_order, key_of, step_of
from stagereg.extensions.recovery.restarts import is_automatic
from stagereg.launch.run_store import NEXT_START

_BEST_EFFORT_S = 10.0
_MOST_FAILURES = 20  # maximum number of failures in a record

_LAST_TRY = (
    "stagereg: %s in %s: %s. After one more crash before a later checkpoint, %s skips this checkpoint. If the "
    "crashes have another cause, disable this with %s."
)

_log = logging.getLogger(__name__)


class Quarantine(CheckpointExtension):
    """Counts the crashes of one run, and skips quarantined checkpoints if ``resume`` is ``"auto"``.

    ``max_crashes``: number of crashes at which a checkpoint is quarantined; ``None``: never. ``locks_early``: whether
    the run holds the lock of its directory from the start. ``leads`` returns whether this rank is the lowest rank of
    its machine; used if each machine has a record. ``crashed``: whether this run counts as crashed, even if the process
    continues.
    """

    name = "quarantine"

    def __init__(self, max_crashes: int | None, locks_early: bool, leads: Callable[[], bool]) -> None:
        self.crashed = False
        self._max_crashes, self._leads = max_crashes, leads
        self._holds = locks_early
        self._unwritten: str | None = None  # checkpoint to record once the run has the lock
        self._record: RestoreRecord | None = None  # record of earlier runs; None until the record is read
        self._restored = ""  # key of the checkpoint that this run restored, until it saves a later one
        self._saved: set[str] = set()  # keys of the checkpoints that this run saved
        self._lock = threading.Lock()  # saves to several targets end on several threads
        self._process, self._writes = os.getpid(), False  # forks count no crashes; whether this rank writes the record

    def start(self, setup: Setup, saves: Saves) -> None:
        self._store, self._shared, self._token = setup.store, setup.stores, setup.token
        self._saves = saves
        self._writes = setup.ranks.rank == 0 if setup.stores else self._leads()
        shutdown.wait_for(self)
        shutdown.on_failure(self._fail)

    def locked(self) -> None:
        self._holds = True
        if self._unwritten is not None and self._counts():
            self._write(self._unwritten)

    # -- restoring

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        def answer(read: list[RestoreRecord | None]) -> list[tuple[list[Candidate], RestoreRecord | None]]:
            self._take(read)
            return [(self._without_quarantined(request, listed), self._record)] * request.ranks.size

        found, record = request.ranks.round_trip(request.failing, self._read, answer, request.ranks.limit)
        self._take([record])
        return found

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        assert candidate.checkpoint is not None
        if self._counts() and self._is_ours(self._store_of(request, candidate.path)):
            self._restored = key_of(candidate.checkpoint.name, candidate.source)
            self._store.retention.distrusted.discard(candidate.path)
            if self._max_crashes is not None:
                self._write(self._restored)

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if candidate is None:
            self._forget()

    def refused(self, error: CheckpointError) -> None:
        if is_in_order(error):  # the failed restore is not a crash
            self._leave()

    def _without_quarantined(self, request: RestoreRequest, listed: Sequence[Candidate]) -> list[Candidate]:
        """Reject quarantined checkpoints if ``resume`` is ``"auto"``; otherwise warn about each of them."""
        is_auto, retried = request.resume == "auto", retry()
        crashes = self._crashes_of(request, listed) if listed else {}
        found = []
        for each in listed:
            known = crashes.get(each.path, Crashes())
            if known.quarantined and is_auto:
                path = option("checkpoint.resume", "PATH")
                why = Rejection(
                    *("quarantined", "restored", known.why),
                    f"If the crashes had another cause, resume from it with {path} or {retried}.",
                    "The cause of the crashes may be in the program, its data or a machine: check the errors of those "
                    f"runs. After the fix, resume from the newest checkpoint with {retried}, or from another one with "
                    f"{path}.\n",
                )
                each = Candidate(each.found, each.source, (why, *each.rejections))
            elif known.quarantined:
                _log.warning("%s is restored because the option names it, although it is %s.", each.path, known)
            found.append(each)
        return found

    def _crashes_of(self, request: RestoreRequest, listed: Sequence[Candidate]) -> dict[str, Crashes]:
        """Return the crash counts of candidates, by path, and record which ones are quarantined. Rank 0 only.

        If the newest step is later than all restored steps, the last run made progress, and the counts are reset.
        """
        store = self._store_of(request, request.resume)
        if not self._is_ours(store):
            return {path: each._replace(most=self._max_crashes) for path, each in records.crashes_in(store).items()}
        record = self._record or RestoreRecord()
        keys = {each.path: key_of(each.name) for each in (store.checkpoints()[0] if record.times else ())}
        for each in listed:
            if each.source != STORE and each.found.checkpoint is not None:
                keys[each.path] = key_of(each.found.checkpoint.name, each.source)
        if request.resume == "auto":
            newest = next((each.manifest.step for each in listed if each.manifest and not each.found.damages), -1)
            if record.in_a_row and newest > max(record.reached, record.newest):
                record = self._settle(record)
            if newest >= 0:
                self._record = record = record._replace(newest=newest)
        found = {path: record.of(key) for path, key in keys.items()}
        self._store.retention.distrusted |= {path for path, each in found.items() if each.quarantined}
        return found

    def _store_of(self, request: RestoreRequest, path: str) -> CheckpointStore:
        """Return the checkpoint directory whose record counts the crashes of the checkpoint ``path``."""
        ours = not request.is_path or any(target.names(path) for target in self._saves.targets)
        return request.store if ours else open_parent_store(path)

    def _is_ours(self, store: CheckpointStore) -> bool:
        return os.path.realpath(store.root) == os.path.realpath(self._store.root)

    # -- saving and ending

    def committed(self, step: int, where: str, checkpoint: object) -> None:
        if not self._counts():
            return
        with self._lock:
            key, record = key_of(step_name(step), where), self._record
            self._saved.add(key)
            if record is None:  # the run did not restore from this directory
                self._forget()
            elif step > max(record.reached, step_of(self._restored)) and (
                self._restored or record.in_a_row or key in record.times
            ):
                self._restored = ""
                self._settle(record)
                self._write()

    def ending(self, error: BaseException | None) -> None:
        self.crashed = True  # until :meth:`ended`, which is called if all ranks reach the end
        if error is not None:
            self._fail(error)

    def ended(self) -> None:
        self.crashed = False

    def outlook(self) -> str:
        """Return a sentence if the next start skips the checkpoint because this run crashes, otherwise ``""``."""
        known = (self._record or RestoreRecord()).of(self._restored).one_more
        if not (self.crashed and self._restored and self._holds and known.quarantined):
            return ""
        with within(_BEST_EFFORT_S):
            left = RestoreRecord.read(self._store)  # another rank may have removed the entry
        return _skips(self._restored, known) if left.restored and left.run == self._token else ""

    def close(self, in_time: bool) -> None:
        if in_time:  # otherwise a thread hangs, and may still write
            self._leave()

    def finish(self) -> bool:
        """Remove the entry of the restored checkpoint at the end of the job or process, unless an error ended it."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._fail(error)
        self._leave()
        return True

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not at_the_end():  # the program has released its checkpointer
            self._leave()

    def _leave(self) -> None:
        """Remove the entry of the restored checkpoint, since the run has not crashed. Idempotent."""
        if self._restored and not self.crashed and self._counts():
            self._restored = ""
            self._record = (self._record or RestoreRecord())._replace(times=self._times())
            if self._max_crashes is not None:
                self._write()

    def _fail(self, error: BaseException) -> None:
        """Handle the error that ends this rank: remove the entry unless the error counts as a crash. On any rank."""
        if self._process != os.getpid():
            return
        self.crashed = not is_in_order(error)
        if is_consequence(error) or (self.crashed and records.is_out_of_memory(error)):
            return
        with within(_BEST_EFFORT_S):
            record = self._record if self._writes else RestoreRecord.read(self._store)
        ours = self._restored if self._writes else record is not None and record.run == self._token and record.restored
        if record is None or not ours:  # the run restored nothing, or has made a later checkpoint
            return
        if self.crashed and is_automatic():
            failure = f"{type(error).__qualname__} at {place_of(error)}"
            if failure in record.failures:
                return
            record = record._replace(failures=(*record.failures, failure)[-_MOST_FAILURES:])
        self.crashed, self._record = False, record
        if self._writes:
            self._leave()
        elif self._max_crashes is not None:
            self._holds = True  # rank 0 wrote the record, so the run holds the lock
            self._write()

    # -- the record

    def _counts(self) -> bool:
        return self._writes and self._process == os.getpid()

    def _read(self) -> RestoreRecord | None:
        """Return the record of earlier runs; ``None`` on a rank that does not write the record."""
        if not self._counts():
            return None
        return records.record_in(self._store, self._holds) if self._record is None else self._record

    def _take(self, read: Sequence[RestoreRecord | None]) -> None:
        """Use the newest of the records that the ranks have read."""
        newest = max(filter(None, read), key=lambda each: each.number, default=RestoreRecord())
        self._record = newest._replace(most=self._max_crashes)

    def _forget(self) -> None:
        """Reset all counts, because the run did not restore from this directory."""
        known, self._restored = self._read(), ""
        if known is not None:
            self._record = RestoreRecord(number=known.number)
            if known.times or known.failures:
                self._write()

    def _settle(self, record: RestoreRecord) -> RestoreRecord:
        """Reset the counts, except for quarantined checkpoints that this run has not saved again."""
        most = self._max_crashes
        quarantined = {key: each for key, each in self._times().items() if most is not None and each >= most}
        self._record = RestoreRecord(times=quarantined, most=most, number=record.number)
        return self._record

    def _times(self) -> dict[str, int]:
        """Return the counts of the steps that this run has not saved again."""
        times = {} if self._record is None else self._record.times
        return {key: each for key, each in times.items() if key not in self._saved}

    def _write(self, restored: str = "") -> None:
        if not self._holds:
            self._unwritten = restored
            return
        record = self._record or RestoreRecord()
        number = record.number + (not self._shared)
        self._record = record._replace(most=self._max_crashes, number=number, run=self._token)
        try:
            with within(_BEST_EFFORT_S):
                self._store.backend.replace(RESTORED, self._record._replace(restored=restored).dumps())
        except Exception as error:
            _log.warning("stagereg: cannot write the record of crashes in %s: %s", self._store.root, error)
        known = self._record.of(restored)
        is_last_try = bool(restored) and known.one_more.quarantined
        if is_last_try and known.times and not known.quarantined:
            _log.warning(_LAST_TRY, restored, self._store.root, known, option("checkpoint.resume", "auto"), retry())
        rank_failure.publish(NEXT_START, _skips(restored, known.one_more) if is_last_try else "")


def _skips(key: str, known: Crashes) -> str:
    return (
        f"The next start with {option('checkpoint.resume', 'auto')} skips {key}, which is {known}. If the crashes have "
        f"another cause, resume from it with {retry()}."
    )


def retry() -> str:
    """Return the option that disables the quarantine."""
    return option("checkpoint.restore.max_crashes", None)
