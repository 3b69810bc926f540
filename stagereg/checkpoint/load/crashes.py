"""Checkpoints that runs crash after: restored, and then the run died before it had committed another one.

A process that is killed can write nothing, so rank 0 notes which checkpoint it is about to restore, before any file of
it is loaded, in ``.restored.json`` of the directory. The run's next commit takes the note back, and so does an end in
good order (:func:`is_in_order`). A note that the next run finds there is a crash, whatever its cause. Only the run that
holds the directory writes here. What cannot be read or written counts nothing: it must not keep a run from training.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import stagereg.shutdown as shutdown
from stagereg.checkpoint.format.manifest import RESTORED, Checkpoint
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.retry import within
from stagereg.errors import RESUME_CODE, CheckpointError, Stopped
from stagereg.launch.rank import is_consequence

_BEST_EFFORT_S = 10.0

_log = logging.getLogger(__name__)


class Crashes(NamedTuple):
    """How often runs have crashed after a checkpoint was restored, in a row, and how often is enough to give it up."""

    times: int = 0
    most: int | None = None

    @property
    def given_up(self) -> bool:
        """Whether it is passed over."""
        return self.most is not None and self.times >= self.most

    def __str__(self) -> str:
        text = f"{self.times} crash{'es' * (self.times != 1)}"
        return f"given up after {text}" if self.given_up else f"{text} after it was restored" if self.times else ""


class CrashCounter:
    """Counts for one run, which writes to ``store``; on rank 0, on the others nothing.

    Args:
        store: the directory that the run holds.
        give_up_after: how many crashes in a row are enough; ``None`` counts none.
        counts: whether this is rank 0.

    Attributes:
        crashed: whether the end of this run, should it come now, is a crash also where the process goes on.
    """

    def __init__(self, store: CheckpointStore, give_up_after: int | None, counts: bool) -> None:
        self.give_up_after = give_up_after
        self.crashed = False
        self._store, self._process = store, os.getpid() if counts else 0
        self._times: dict[str, int] | None = None  # of the checkpoints that there are; None until they are read
        self._restored = ""  # by this run, which has committed nothing since
        shutdown.wait_for(self)

    def crashes_of(self, store: CheckpointStore, near: Sequence[Checkpoint] = ()) -> dict[str, Crashes]:
        """Return what is known of the checkpoints of a store, by their paths; those of this run's it distrusts.

        ``near`` are those of the run that are in its tier.
        """
        if not self._is_ours(store):
            return {path: each._replace(most=self.give_up_after) for path, each in crashes_in(store).items()}
        if self._times is None:
            self._times = _RestoreNote.read(self._store).counted(over=True)
        every = [*near, *(self._store.checkpoints()[0] if self._times else ())]
        there = {each.key: each.path for each in every}
        self._times = {key: times for key, times in self._times.items() if key in there}
        found = {there[key]: Crashes(times, self.give_up_after) for key, times in self._times.items()}
        self._store.retention.distrusted |= {path for path, each in found.items() if each.given_up}
        return found

    def begin_restore(self, store: CheckpointStore, checkpoint: Checkpoint) -> None:
        """Note that this run is about to restore a checkpoint, after :meth:`crashes_of`."""
        if self._is_ours(store):
            self._restored, times = checkpoint.key, self._times or {}
            self._store.retention.distrusted.discard(checkpoint.path)
            # In a row: of the others, those that are not given up begin anew.
            stay = {key for key in times if key == self._restored or Crashes(times[key], self.give_up_after).given_up}
            self._times = {key: times[key] for key in times if key in stay}
            if self.give_up_after is not None:
                self._write(self._restored)

    def committed(self, step: int) -> None:
        """Note that the run has committed a checkpoint, so that the one that it was restored from is no cause."""
        if self._restored:
            (self._times or {}).pop(self._restored, None)
            self._restored = ""
            self._write()

    def leave(self) -> None:
        """Take the note back: the run lets go of the directory in good order. Twice is harmless."""
        if self._restored and not self.crashed and self._process == os.getpid():
            self._restored = ""
            if self.give_up_after is not None:
                self._write()

    def move(self, store: CheckpointStore) -> None:
        """Count in another directory from now on, after :meth:`leave`."""
        self._store, self._times = store, None

    def finish(self) -> bool:
        """At the end of the job or the process: :meth:`leave`, unless an error has ended it."""
        if is_in_order(getattr(sys, "last_value", None)):
            self.leave()
        return True

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not at_the_end():  # the program has let go of its checkpointer
            self.leave()

    def _is_ours(self, store: CheckpointStore) -> bool:
        ours = os.path.realpath(store.root) == os.path.realpath(self._store.root)
        return ours and self._process == os.getpid()

    def _write(self, restored: str = "") -> None:
        note = _RestoreNote(restored, self.give_up_after, self._times or {})
        try:
            with within(_BEST_EFFORT_S):
                self._store.notes.write(RESTORED, note.dumps() if restored or note.times else b"")
        except Exception as error:
            _log.warning("stagereg: crashes are not counted in %s: %s", self._store.root, error)


def is_in_order(error: BaseException | None) -> bool:
    """Whether a run that ends by ``error`` has not crashed: by none, Ctrl-C, a preemption, or a save that failed."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, RESUME_CODE) or isinstance(error, Stopped)
    if isinstance(error, CheckpointError):  # of the storage, unless it is that another rank is gone
        return not is_consequence(error)
    return error is None or isinstance(error, KeyboardInterrupt)


def crashes_in(store: CheckpointStore) -> dict[str, Crashes]:
    """Return what is known of the checkpoints of a store, by their paths; any process. The run there has not crashed.

    Errors of the store are ``OSError``.
    """
    note = _RestoreNote.read(store)
    times = note.counted(over=store.holder() is None) if note.restored or note.times else {}
    there = {each.path: each.key for each in store.checkpoints()[0]} if times else {}
    return {path: Crashes(times[key], note.most) for path, key in there.items() if key in times}


class _RestoreNote(NamedTuple):
    """The content of the file: what the last run has restored, if it is not over; and crashes after checkpoints."""

    restored: str = ""
    most: int | None = None
    times: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def read(cls, store: CheckpointStore) -> _RestoreNote:
        try:
            read: Any = json.loads(store.notes.read(RESTORED) or b"{}")
            times = {str(key): int(each) for key, each in read.get("crashes", {}).items()}
            most = read.get("give_up_after")
            return cls(str(read.get("restored", "")), None if most is None else int(most), times)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            _log.warning("stagereg: crashes in %s are not known: %s", store.root, error)
            return cls()

    def counted(self, over: bool) -> dict[str, int]:
        more = {self.restored: self.times.get(self.restored, 0) + 1} if self.restored and over else {}
        return {**self.times, **more}

    def dumps(self) -> bytes:
        given = {"restored": self.restored, "give_up_after": self.most, "crashes": {**self.times}}
        return f"{json.dumps(given, indent=1)}\n".encode()
