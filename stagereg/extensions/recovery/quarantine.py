"""Keeps restores from checkpoints that runs crash after: rejects them, and notes what is about to be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from stagereg.base.option_text import option
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, Rejection, RestoreRequest, Saves, Setup
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.open_store import open_parent_store
from stagereg.errors import CheckpointError
from stagereg.extensions.recovery.crashes import CrashCounter, Crashes, RestoreRecord, is_in_order, retry

TIER = "tier"
"""The source whose steps are counted apart from the checkpoints of the directory."""

_log = logging.getLogger(__name__)


class Quarantine(CheckpointExtension):
    """Skips the checkpoints that ``"auto"`` quarantines, and counts the crashes of its run.

    Args:
        max_crashes: how many crashes are enough; ``None`` counts none.
        locks_early: whether the run has the lock from its start.
        leads: whether this rank is the lowest one of its machine, for a run that has a note on each machine.
    """

    name = "quarantine"

    def __init__(self, max_crashes: int | None, locks_early: bool, leads: Callable[[], bool]) -> None:
        self._max_crashes, self._locks_early, self._leads = max_crashes, locks_early, leads

    def start(self, setup: Setup, saves: Saves) -> None:
        counts = setup.ranks.rank == 0 if setup.stores else self._leads()
        options = setup.store, self._max_crashes, counts, setup.stores, setup.token, self._locks_early
        self._counter = CrashCounter(*options)

    def locked(self) -> None:
        if not self._locks_early:
            self._counter.hold()

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        self._counter.committed(step, near=where == TIER)

    def ending(self, error: BaseException | None) -> None:
        self._counter.crashed = True  # unless all ranks come to the end
        if error is not None:
            self._counter.failed(error)

    def ended(self) -> None:
        self._counter.crashed = False

    def outlook(self) -> str:
        return self._counter.skipped_next()

    def close(self, in_time: bool) -> None:
        if in_time:  # else a thread hangs, and may still write
            self._counter.leave()

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        counter, ranks = self._counter, request.ranks

        def answer(noted: list[RestoreRecord | None]) -> list[tuple[list[Candidate], RestoreRecord | None]]:
            counter.take_note(noted)
            return [(self._without_quarantined(request, listed), counter.note())] * ranks.size

        found, note = ranks.round_trip(request.failing, counter.note, answer, ranks.limit)
        counter.take_note([note])
        return found

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        assert candidate.checkpoint is not None
        self._counter.begin_restore(
            _store_of(request, [candidate], candidate.path), candidate.checkpoint, candidate.source == TIER
        )

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if candidate is None:
            self._counter.forget()

    def refused(self, error: CheckpointError) -> None:
        if is_in_order(error):  # the restore has crashed nothing
            self._counter.leave()

    def _without_quarantined(self, request: RestoreRequest, listed: Sequence[Candidate]) -> list[Candidate]:
        """Reject the checkpoints that ``"auto"`` skips for their crashes; warn if another ``resume`` takes one."""
        is_auto, retried = request.resume == "auto", retry()
        in_tier = [each.found.checkpoint for each in listed if each.source == TIER]
        newest = next((each.manifest.step for each in listed if each.manifest and not each.found.damages), -1)
        also, reached = [each for each in in_tier if each is not None], newest if is_auto else -1
        crashes = self._counter.crashes_of(_store_of(request, listed, request.resume), also, reached) if listed else {}
        found = []
        for each in listed:
            known = crashes.get(each.path, Crashes())
            if known.quarantined and is_auto:
                path = option("checkpoint.resume", "PATH")
                why = Rejection(
                    *("quarantined", "restored", known.why),
                    f"If the crashes had another cause, resume from it with {path} or {retried}.",
                    "What ends each run in this way may be in the program, its data or a machine: see the errors of "
                    f"those runs. When it is mended, resume from the newest with {retried}, or from another one with "
                    f"{path}.\n",
                )
                each = Candidate(each.found, each.source, (why, *each.rejections))
            elif known.quarantined:
                _log.warning("%s is restored since it was asked for, although it is %s.", each.path, known)
            found.append(each)
        return found


def _store_of(request: RestoreRequest, listed: Sequence[Candidate], path: str) -> CheckpointStore:
    """Return the store that candidates are counted in; ``path`` is of one, if ``resume`` names a path."""
    in_tier = any(each.source == TIER for each in listed)
    return request.store if in_tier or not request.is_path else open_parent_store(path)
