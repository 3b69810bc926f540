"""The record of crashes: how often runs crashed after a checkpoint was restored, before they came further.

Only an end that restoring can have caused is a crash:

- A process was killed by a signal, or left by ``os._exit``: it writes nothing. So rank 0 notes the checkpoint in
  ``.restored.json`` before it loads any file, and a note that the next run finds is a crash. Without a directory, one
  rank of each machine writes the note.
- A process ran out of memory.
- The same Python exception, by type and place, ended a run that a launcher or a scheduler had started again
  (:func:`.is_automatic`). The first of its kind is only noted: another failure each time is no sign of a corrupt state,
  while failures that take turns come again and are counted, so the restarts end.

Any other Python exception is an error of a program that a person starts and mends: the rank that raises it removes the
note, whichever rank that is, since rank 0 may be killed for it. A rank that fails since another one has failed leaves
the note as it is. An end in order (:func:`is_in_order`) removes the note. Only a run that has the lock of the directory
writes the note: a program that never saves leaves nothing. A note that cannot be read or written counts nothing.

Crashes are counted by step: a step that is saved again has the count of its predecessor. Only a checkpoint beyond every
step that a crashed run was restored from ends the counting. :mod:`.quarantine` counts, and skips checkpoints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from stagereg.checkpoint.format.manifest import MOST, RESTORED, plain_name, step_within
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import MALFORMED, RESUME_CODE, CheckpointError, Stopped, is_consequence

STORE = "store"
"""The source of checkpoints in the checkpoint directory; those of each other source are counted apart."""
_MOST_TRIED = 5  # crashes in a row, in units of `max_crashes`, after which nothing is tried any more
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")  # as torch and systems say it

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
            return f"not tried: runs crashed {self.in_a_row} times in a row{further}"
        return f"{self.times} times, and each time the run crashed{further}"

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
            found = cls(str(read.get("restored", "")), None if most is None else _count(most), times, **numbers)
            return found._replace(run=str(read.get("run", "")), failures=tuple(map(str, read.get("failures", ()))))
        except (OSError, *MALFORMED) as error:
            _log.warning("stagereg: cannot read the record of crashes in %s: %s", store.root, error)
            return cls()

    def counted(self) -> RestoreRecord:
        """Return the note after the end of the run that wrote it: a restored checkpoint in it was a crash."""
        if not self.restored:
            return self
        known = self.of(self.restored).one_more
        times, reached = {**self.times, self.restored: known.times}, max(self.reached, step_of(self.restored))
        return self._replace(restored="", times=times, in_a_row=known.in_a_row, reached=reached)

    def of(self, key: str) -> Crashes:
        """Return the crashes of the checkpoint with a key (:func:`key_of`)."""
        return Crashes(self.times.get(key, 0), self.most, self.in_a_row, self.reached)

    def dumps(self) -> bytes:
        """Return the text of the note; empty if nothing was counted."""
        if not (self.restored or self.times or self.number or self.failures):
            return b""
        given: dict[str, Any] = {"restored": self.restored, "max_crashes": self.most, "crashes": {**self.times}}
        given |= {"in_a_row": self.in_a_row, "reached": self.reached, "newest": self.newest, "number": self.number}
        given |= {"run": self.run, "failures": self.failures}
        return f"{json.dumps(given, indent=1)}\n".encode()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a process had too little memory, of the machine or of an accelerator."""
    text = str(error).lower() if isinstance(error, (RuntimeError, OSError)) else ""
    return isinstance(error, MemoryError) or any(each in text for each in _OUT_OF_MEMORY)


def is_in_order(error: BaseException | None) -> bool:
    """Whether a run that ends by ``error`` has not crashed: ``None``, Ctrl-C, a preemption, a failed save."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, RESUME_CODE) or isinstance(error, Stopped)
    if isinstance(error, CheckpointError):  # raised by the storage, or because another rank failed
        return not is_consequence(error)
    return error is None or isinstance(error, KeyboardInterrupt)


def crashes_in(store: CheckpointStore) -> dict[str, Crashes]:
    """Return the crashes of the checkpoints of a store, by path. Any process. Raises: ``OSError``."""
    record = record_in(store)
    there = {each.path: key_of(each.name) for each in store.checkpoints()[0]} if record.times else {}
    return {path: record.of(key) for path, key in there.items() if key in record.times}


def record_in(store: CheckpointStore, holds: bool = False) -> RestoreRecord:
    """Return the record of earlier runs: a run that is alive, and has the lock, has not crashed."""
    record = RestoreRecord.read(store)
    return record.counted() if record.restored and (holds or store.holder() is None) else record


def key_of(name: str, source: str = STORE) -> str:
    """Return the key that a checkpoint is counted by."""
    return plain_name(name) if source == STORE else f"{source}/{plain_name(name)}"


def _count(value: Any) -> int:
    """Return a whole number from -1 on. Raises: ``ValueError``."""
    if type(value) is not int or not -1 <= value <= MOST:
        raise ValueError(f"{value!r:.50} is not an integer in -1..{MOST}")
    return value


def step_of(key: str) -> int:
    """Return the step of a key; -1 if it has none."""
    found = step_within(key)
    return -1 if found is None else found
