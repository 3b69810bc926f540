"""The crash record: how often runs crashed after restoring a checkpoint, before they saved a later checkpoint.

A run counts as crashed only if the restored state can be the cause:

- A signal killed a process, or the process called ``os._exit``, so it could not record its crash. For this case, rank 0
  enters the checkpoint in ``.restored.json`` before it loads any file. If the next run finds this entry, the earlier
  run crashed. Without a checkpoint directory, one rank of each machine writes the file.
- A process ran out of memory.
- A Python exception of the same type at the same line ended the run before, and a launcher or scheduler restarted the
  run (:func:`.is_automatic`). The first such exception is recorded but not counted, because failures that differ each
  time do not indicate a corrupt state. If different exceptions alternate, each is counted when it occurs again.

After any other Python exception, the user has to fix the program. The rank that raises the exception removes the entry,
because the failure may kill rank 0 first. A rank that fails because another rank failed does not change the entry. A
normal exit (:func:`is_in_order`) removes the entry. Only a run that holds the lock of the directory writes the file, so
a program that never saves leaves no file. If the file cannot be read or written, crashes are not counted.

Crashes are counted by step, so a step that a crashing run saves again keeps its count. A checkpoint later than every
step that a crashed run restored resets the counts. :mod:`.quarantine` updates the record and skips checkpoints.
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
"""The source name of checkpoints in the checkpoint directory. Crashes are counted separately for each source."""
_MOST_TRIED = 5  # consecutive crashes, as a multiple of `max_crashes`, after which every checkpoint is skipped
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")  # in error messages

_log = logging.getLogger(__name__)


class Crashes(NamedTuple):
    """The crash counts of one checkpoint, and the limit at which the checkpoint is skipped."""

    times: int = 0  # crashes after a restore of this checkpoint
    most: int | None = None  # number of crashes at which the checkpoint is skipped; ``None``: never
    in_a_row: int = 0  # consecutive crashes of the run, after restores of any checkpoint
    reached: int = -1  # the latest step that a crashed run restored

    @property
    def quarantined(self) -> bool:
        """Whether the checkpoint is skipped."""
        return self.most is not None and (self.times >= self.most or self.in_a_row >= _MOST_TRIED * self.most)

    @property
    def one_more(self) -> Crashes:
        """A copy with one more crash."""
        return self._replace(times=self.times + 1, in_a_row=self.in_a_row + 1)

    @property
    def why(self) -> str:
        """The reason why the checkpoint is skipped."""
        further = f" before it saved a checkpoint beyond step {self.reached}"
        if self.most is not None and self.times < self.most:
            return f"not tried: the run crashed {self.in_a_row} times in a row{further}"
        return f"{self.times} times, and each time the run crashed{further}"

    def __str__(self) -> str:
        text = f"{self.times} crash{'es' * (self.times != 1)}"
        if self.quarantined:
            in_all = f" ({self.in_a_row} in a row)" * (self.in_a_row > self.times)
            return f"quarantined after {text}{in_all}"
        return f"{text} after it was restored" if self.times else ""


class RestoreRecord(NamedTuple):
    """The content of ``.restored.json``: the crash counts of the checkpoints in one directory."""

    restored: str = ""  # key of the checkpoint that the last run restored; empty once that run has exited normally
    most: int | None = None  # ``max_crashes`` of that run
    times: Mapping[str, int] = {}  # crashes by key of the checkpoint; never modified in place
    in_a_row: int = 0  # as in :class:`Crashes`
    reached: int = -1  # as in :class:`Crashes`
    newest: int = -1  # step of the newest valid checkpoint when that run resumed, quarantined or not
    number: int = 0  # version of the record; the machines of a run may have different versions
    run: str = ""  # the token of the last run
    failures: tuple[str, ...] = ()  # Python exceptions that ended runs since the counts were reset

    @classmethod
    def read(cls, store: CheckpointStore) -> RestoreRecord:
        """Return the record in a checkpoint directory; an empty record if the file cannot be read."""
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
        """Return the record with one more crash if the last run crashed, that is, if ``restored`` is still set."""
        if not self.restored:
            return self
        known = self.of(self.restored).one_more
        times, reached = {**self.times, self.restored: known.times}, max(self.reached, step_of(self.restored))
        return self._replace(restored="", times=times, in_a_row=known.in_a_row, reached=reached)

    def of(self, key: str) -> Crashes:
        """Return the crash counts of the checkpoint with this key (:func:`key_of`)."""
        return Crashes(self.times.get(key, 0), self.most, self.in_a_row, self.reached)

    def dumps(self) -> bytes:
        """Return the JSON text of the record; empty if the record is empty."""
        if not (self.restored or self.times or self.number or self.failures):
            return b""
        given: dict[str, Any] = {"restored": self.restored, "max_crashes": self.most, "crashes": {**self.times}}
        given |= {"in_a_row": self.in_a_row, "reached": self.reached, "newest": self.newest, "number": self.number}
        given |= {"run": self.run, "failures": self.failures}
        return f"{json.dumps(given, indent=1)}\n".encode()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error reports a lack of memory, on the machine or on an accelerator."""
    text = str(error).lower() if isinstance(error, (RuntimeError, OSError)) else ""
    return isinstance(error, MemoryError) or any(each in text for each in _OUT_OF_MEMORY)


def is_in_order(error: BaseException | None) -> bool:
    """Return whether ``error`` is a normal end of a run: no error, Ctrl-C, a preemption or a failed save."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, RESUME_CODE) or isinstance(error, Stopped)
    if isinstance(error, CheckpointError):  # raised by the storage, or because another rank failed
        return not is_consequence(error)
    return error is None or isinstance(error, KeyboardInterrupt)


def crashes_in(store: CheckpointStore) -> dict[str, Crashes]:
    """Return the crash counts of the checkpoints in a directory, by path. Raises: ``OSError``."""
    record = record_in(store)
    there = {each.path: key_of(each.name) for each in store.checkpoints()[0]} if record.times else {}
    return {path: record.of(key) for path, key in there.items() if key in record.times}


def record_in(store: CheckpointStore, holds: bool = False) -> RestoreRecord:
    """Return the record of earlier runs. Counts no crash while another, live run holds the lock."""
    record = RestoreRecord.read(store)
    return record.counted() if record.restored and (holds or store.backend.holder() is None) else record


def key_of(name: str, source: str = STORE) -> str:
    """Return the key under which the crashes of a checkpoint are counted."""
    return plain_name(name) if source == STORE else f"{source}/{plain_name(name)}"


def _count(value: Any) -> int:
    """Return ``value`` if it is an integer of at least -1. Raises: ``ValueError``."""
    if type(value) is not int or not -1 <= value <= MOST:
        raise ValueError(f"{value!r:.50} is not an integer in -1..{MOST}")
    return value


def step_of(key: str) -> int:
    """Return the step in a key; -1 if the key has no step."""
    found = step_within(key)
    return -1 if found is None else found
