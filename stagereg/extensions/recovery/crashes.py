"""Count the runs that crashed after a checkpoint was restored, before they came further than earlier runs.

Only an end that restoring can have caused is a crash:

- A process was killed by a signal, or left by ``os._exit``: it writes nothing. So rank 0 notes the checkpoint in
  ``.restored.json`` before it loads any file, and a note that the next run finds is a crash. Without a directory, one
  rank of each machine writes the note next to the tier.
- A process ran out of memory.
- The same Python exception, by type and place, ended a run that a launcher or a scheduler had started again
  (:func:`.is_automatic`). The first of its kind is only noted: another failure each time is no sign of a corrupt state,
  while failures that take turns come again and are counted, so the restarts end.

Any other Python exception is an error of a program that a person starts and mends: the rank that raises it removes the
note, whichever rank that is, since rank 0 may be killed for it. A rank that fails since another one has failed leaves
the note as it is. An end in order (:func:`is_in_order`) removes the note. Only a run that has the lock of the directory
writes the note (:mod:`stagereg.checkpoint.hold`): a program that never saves leaves nothing. A note that cannot be read
or written counts nothing.

Crashes are counted by step: a step that is saved again has the count of its predecessor. Only a checkpoint beyond every
step that a crashed run was restored from ends the counting.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import stagereg.base.shutdown as shutdown
import stagereg.extensions.recovery.rank_failure as loss
from stagereg.base.crash_report import place_of
from stagereg.base.deadline import within
from stagereg.base.option_text import option
from stagereg.checkpoint.format.manifest import MOST, RESTORED, Checkpoint, plain_name, step_name, step_within
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import MALFORMED, RESUME_CODE, CheckpointError, Stopped, is_consequence
from stagereg.extensions.recovery.restarts import is_automatic
from stagereg.launch.run_store import NEXT_START

_BEST_EFFORT_S = 10.0
_MOST_TRIED = 5  # crashes in a row, in units of `max_crashes`, after which nothing is tried any more
_MOST_FAILURES = 20  # that a note has
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")  # as torch and systems say it

_LAST_TRY = (
    "stagereg: %s in %s: %s. After one more crash before a later checkpoint, %s skips it. If the "
    "crashes have another cause, prevent that with %s."
)

_log = logging.getLogger(__name__)


class Crashes(NamedTuple):
    """How often runs crashed after a checkpoint was restored, and how many crashes are enough to skip it."""

    times: int = 0  # crashes after this checkpoint
    most: int | None = None  # enough crashes; ``None`` counts none
    in_a_row: int = 0  # crashes after any checkpoint of the run, since the run came further
    reached: int = -1  # the furthest step that was restored before these crashes

    @property
    def quarantined(self) -> bool:
        """Whether the checkpoint is skipped."""
        return self.most is not None and (self.times >= self.most or self.in_a_row >= _MOST_TRIED * self.most)

    @property
    def one_more(self) -> Crashes:
        """These crashes and one more after the same checkpoint."""
        return self._replace(times=self.times + 1, in_a_row=self.in_a_row + 1)

    @property
    def why(self) -> str:
        """The reason why the checkpoint is skipped."""
        further = f" before a checkpoint beyond step {self.reached}"
        if self.most is not None and self.times < self.most:
            return f"not tried: runs have died {self.in_a_row} times in a row{further}"
        return f"{self.times} times, and each time the run died{further}"

    def __str__(self) -> str:
        text = f"{self.times} crash{'es' * (self.times != 1)}"
        if self.quarantined:
            in_all = f" ({self.in_a_row} in a row)" * (self.in_a_row > self.times)
            return f"quarantined after {text}{in_all}"
        return f"{text} after it was restored" if self.times else ""


class RestoreRecord(NamedTuple):
    """The content of ``.restored.json``."""

    restored: str = ""  # the checkpoint that the last run restored, unless that run ended in good order
    most: int | None = None  # ``max_crashes`` of that run
    times: Mapping[str, int] = {}  # crashes by checkpoint; never changed
    in_a_row: int = 0  # this and ``reached``: as in :class:`Crashes`
    reached: int = -1
    newest: int = -1  # the step of the newest checkpoint at that time, good or not
    number: int = 0  # counts the notes: the note of one machine may be older than the note of another
    run: str = ""  # the token of the last run
    failures: tuple[str, ...] = ()  # Python exceptions that ended runs since one came further

    @classmethod
    def read(cls, store: CheckpointStore) -> RestoreRecord:
        """Return the note in a store; an empty one if it cannot be read."""
        try:
            read: Any = json.loads(store.note(RESTORED) or b"{}")
            times = {key: _count(each) for key, each in read.get("crashes", {}).items()}
            most = read.get("max_crashes")
            usual = {"in_a_row": 0, "reached": -1, "newest": -1, "number": 0}
            numbers: dict[str, Any] = {name: _count(read.get(name, none)) for name, none in usual.items()}
            restored, run, failures = read.get("restored", ""), read.get("run", ""), read.get("failures", ())
            found = cls(str(restored), None if most is None else _count(most), times)
            return found._replace(run=str(run), failures=tuple(map(str, failures)), **numbers)
        except (OSError, *MALFORMED) as error:
            _log.warning("stagereg: crashes in %s are not known: %s", store.root, error)
            return cls()

    def counted(self) -> RestoreRecord:
        """Return the note after the end of the run that wrote it: a restored checkpoint in it was a crash."""
        if not self.restored:
            return self
        known = self.of(self.restored).one_more
        times, reached = {**self.times, self.restored: known.times}, max(self.reached, _step(self.restored))
        return self._replace(restored="", times=times, in_a_row=known.in_a_row, reached=reached)

    def of(self, key: str) -> Crashes:
        return Crashes(self.times.get(key, 0), self.most, self.in_a_row, self.reached)

    def dumps(self) -> bytes:
        """Return the text of the note; empty if nothing was counted."""
        if not (self.restored or self.times or self.number or self.failures):
            return b""
        given: dict[str, Any] = {"restored": self.restored, "max_crashes": self.most, "crashes": {**self.times}}
        given |= {"in_a_row": self.in_a_row, "reached": self.reached, "newest": self.newest, "number": self.number}
        given |= {"run": self.run, "failures": self.failures}
        return f"{json.dumps(given, indent=1)}\n".encode()


class CrashCounter:
    """Counts the crashes of one run, in the note of ``store``: its directory, or a directory of this machine.

    ``max_crashes`` crashes are enough; ``None`` counts none. ``counts``: whether this rank writes the note: rank 0,
    or one rank of each machine. ``shared``: whether all machines have the same ``store``. ``token`` is the run's, and
    ``holds`` says whether the run has the lock.
    """

    def __init__(
        self,
        store: CheckpointStore,
        max_crashes: int | None,
        counts: bool,
        shared: bool = True,
        token: str = "",
        holds: bool = False,
    ) -> None:
        self.max_crashes = max_crashes
        self.crashed = False  # whether the end of this run is a crash even if the process goes on
        self._store, self._process, self._shared = store, os.getpid() if counts else 0, shared
        self._token, self._holds, self._own_process = token, holds, os.getpid()
        self._unwritten: str | None = None  # what is to be noted once the run has the lock
        self._note: RestoreRecord | None = None  # of earlier runs; None until it is read
        self._restored = ""  # the checkpoint that this run restored, until the run comes further
        self._saved: set[str] = set()  # the checkpoints that this run saved
        self._lock = threading.Lock()  # saves to the store and to the tier end on two threads
        shutdown.wait_for(self)

    def note(self) -> RestoreRecord | None:
        """Return the note of earlier runs; ``None`` on a rank that does not count."""
        if self._process != os.getpid():
            return None
        return _note_in(self._store, self._holds) if self._note is None else self._note

    def take_note(self, noted: Sequence[RestoreRecord | None]) -> None:
        """Take the newest of the notes that the ranks have read."""
        newest = max(filter(None, noted), key=lambda each: each.number, default=RestoreRecord())
        self._note = newest._replace(most=self.max_crashes)

    def hold(self) -> None:
        """The run has the lock from now on: write what is to be noted."""
        self._holds = True
        if self._unwritten is not None and self._process == os.getpid():
            self._write(self._unwritten)

    def crashes_of(
        self, store: CheckpointStore, near: Sequence[Checkpoint] = (), newest: int = -1
    ) -> dict[str, Crashes]:
        """Return the crashes of the checkpoints of a store, by path, and distrust skipped ones. On rank 0.

        ``near`` are the checkpoints in the tier of the run, ``newest`` is the step of the newest checkpoint. A newest
        step beyond all that was restored shows that the last run came further, but did not note it. Call
        :meth:`take_note` first.
        """
        if not self._is_ours(store):
            return {path: each._replace(most=self.max_crashes) for path, each in crashes_in(store).items()}
        note = self._note or RestoreRecord()
        there = {each.path: _key(each.name) for each in (self._store.checkpoints()[0] if note.times else ())}
        there |= {each.path: _key(each.name, near=True) for each in near}
        if note.in_a_row and newest > max(note.reached, note.newest):
            note = self._settle(note)
        if newest >= 0:
            self._note = note = note._replace(newest=newest)
        found = {path: note.of(key) for path, key in there.items()}
        self._store.retention.distrusted |= {path for path, each in found.items() if each.quarantined}
        return found

    def begin_restore(self, store: CheckpointStore, checkpoint: Checkpoint, near: bool) -> None:
        """Note that this run is about to restore a checkpoint, of its tier if ``near``."""
        if self._is_ours(store):
            self._restored = _key(checkpoint.name, near)
            self._store.retention.distrusted.discard(checkpoint.path)
            if self.max_crashes is not None:
                self._write(self._restored)

    def committed(self, step: int, near: bool = False) -> None:
        """Note that the run has saved a step. Thread-safe."""
        if self._process != os.getpid():
            return
        with self._lock:
            key, note = _key(step_name(step), near), self._note
            self._saved.add(key)
            if note is None:  # the run has restored nothing of this directory
                self.forget()
            elif step > max(note.reached, _step(self._restored)) and (
                self._restored or note.in_a_row or key in note.times
            ):
                self._restored = ""
                self._settle(note)
                self._write()

    def forget(self) -> None:
        """Drop all counts: the run restores nothing of this directory."""
        known, self._restored = self.note(), ""
        if known is not None:
            self._note = RestoreRecord(number=known.number)
            if known.times or known.failures:
                self._write()

    def leave(self) -> None:
        """Remove the note: the run releases the directory in good order. Idempotent."""
        if self._restored and not self.crashed and self._process == os.getpid():
            self._restored = ""
            self._note = (self._note or RestoreRecord())._replace(times=self._times())
            if self.max_crashes is not None:
                self._write()

    def failed(self, error: BaseException) -> None:
        """Note the error that ends this rank: remove the note, unless the error is to be counted. Any rank."""
        if self._own_process != os.getpid():
            return
        self.crashed = not is_in_order(error)
        if is_consequence(error) or (self.crashed and is_out_of_memory(error)):
            return
        with within(_BEST_EFFORT_S):
            note = self._note if self._process else RestoreRecord.read(self._store)
        ours = self._restored if self._process else note is not None and note.run == self._token and note.restored
        if note is None or not ours:  # nothing was restored, or the run has come further
            return
        if self.crashed and is_automatic():
            failure = f"{type(error).__qualname__} at {place_of(error)}"
            if failure in note.failures:
                return
            note = note._replace(failures=(*note.failures, failure)[-_MOST_FAILURES:])
        self.crashed, self._note = False, note
        if self._process:
            self.leave()
        elif self.max_crashes is not None:
            self._holds = True  # rank 0 wrote the note of this run
            self._write()

    def finish(self) -> bool:
        """Call :meth:`leave` at the end of the job or the process, unless an error has ended it."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        self.leave()
        return True

    def skipped_next(self) -> str:
        """Return that the next start skips the checkpoint since this run ends in a crash; empty if it does not."""
        known = (self._note or RestoreRecord()).of(self._restored).one_more
        if not (self.crashed and self._restored and self._holds and known.quarantined):
            return ""
        with within(_BEST_EFFORT_S):
            left = RestoreRecord.read(self._store)  # another rank may have removed the note
        return _skips(self._restored, known) if left.restored and left.run == self._token else ""

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not at_the_end():  # the program has let go of its checkpointer
            self.leave()

    def _is_ours(self, store: CheckpointStore) -> bool:
        ours = os.path.realpath(store.root) == os.path.realpath(self._store.root)
        return ours and self._process == os.getpid()

    def _settle(self, note: RestoreRecord) -> RestoreRecord:
        """Drop the counts, except of skipped checkpoints that were not saved again."""
        most = self.max_crashes
        quarantined = {key: each for key, each in self._times().items() if most is not None and each >= most}
        self._note = RestoreRecord(times=quarantined, most=most, number=note.number)
        return self._note

    def _times(self) -> dict[str, int]:
        """Return the counts of the steps that this run has not saved again."""
        times = {} if self._note is None else self._note.times
        return {key: each for key, each in times.items() if key not in self._saved}

    def _write(self, restored: str = "") -> None:
        if not self._holds:
            self._unwritten = restored
            return
        note = self._note or RestoreRecord()
        self._note = note._replace(most=self.max_crashes, number=note.number + (not self._shared), run=self._token)
        try:
            with within(_BEST_EFFORT_S):
                self._store.backend.replace(RESTORED, self._note._replace(restored=restored).dumps())
        except Exception as error:
            _log.warning("stagereg: crashes are not counted in %s: %s", self._store.root, error)
        known = self._note.of(restored)
        is_last_try = bool(restored) and known.one_more.quarantined
        if is_last_try and known.times and not known.quarantined:
            _log.warning(_LAST_TRY, restored, self._store.root, known, option("checkpoint.resume", "auto"), retry())
        loss.publish(NEXT_START, _skips(restored, known.one_more) if is_last_try else "")


def _skips(key: str, known: Crashes) -> str:
    return (
        f"The next start with {option('checkpoint.resume', 'auto')} skips {key}, which is {known}. If the crashes have "
        f"another cause, resume from it with {retry()}."
    )


def retry() -> str:
    """Return the option with which no checkpoint is quarantined."""
    return option("checkpoint.restore.max_crashes", None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a process had too little memory, of the machine or of an accelerator."""
    text = str(error).lower() if isinstance(error, (RuntimeError, OSError)) else ""
    return isinstance(error, MemoryError) or any(each in text for each in _OUT_OF_MEMORY)


def is_in_order(error: BaseException | None) -> bool:
    """Whether a run that ends by ``error`` has not crashed: ``None``, Ctrl-C, a preemption, a failed save."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, RESUME_CODE) or isinstance(error, Stopped)
    if isinstance(error, CheckpointError):  # of the storage, or since another rank failed
        return not is_consequence(error)
    return error is None or isinstance(error, KeyboardInterrupt)


def crashes_in(store: CheckpointStore) -> dict[str, Crashes]:
    """Return the crashes of the checkpoints of a store, by path. Any process. Raises: ``OSError``."""
    note = _note_in(store)
    there = {each.path: _key(each.name) for each in store.checkpoints()[0]} if note.times else {}
    return {path: note.of(key) for path, key in there.items() if key in note.times}


def _note_in(store: CheckpointStore, holds: bool = False) -> RestoreRecord:
    """Return the note of earlier runs: a run that is alive, and has the lock, has not crashed."""
    note = RestoreRecord.read(store)
    return note.counted() if note.restored and (holds or store.holder() is None) else note


def _key(name: str, near: bool = False) -> str:
    """Return the key that a checkpoint is counted by."""
    return f"{'tier/' * near}{plain_name(name)}"


def _count(value: Any) -> int:
    """Return a whole number from -1 on. Raises: ``ValueError``."""
    if type(value) is not int or not -1 <= value <= MOST:
        raise ValueError(f"{value!r:.50} is no count")
    return value


def _step(key: str) -> int:
    """Return the step of a key; -1 if it has none."""
    found = step_within(key)
    return -1 if found is None else found
