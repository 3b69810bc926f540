"""Repeats a save whose staged copy was discarded because the program changed the state during the copy.

All ranks get the failure in the exchange of that save. Immediately afterwards, the save threads of the ranks agree on
the step after which all ranks save again: the first step that no rank has ended. The training thread of a rank does not
end that step before the ranks have agreed. So all ranks save the same step, and no rank waits in a different save.

A save is never repeated under its own step, because the state is no longer the state at the end of that step. If no
later step ends, the failure is reported as an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.staged_copy import Request
from stagereg.errors import CheckpointError, WrittenWhileSavedError

_log = logging.getLogger(__name__)

_NO_STEP = -1


class _Reached(NamedTuple):
    """The progress of the training thread of one rank."""

    ended: int  # the last step that the thread has ended
    saves: int  # the number of saves that the thread has begun
    again: bool  # whether the discarded save was itself a repeated save


class _Answer(NamedTuple):
    """The decision whether and when the ranks repeat the save. It is the same on all ranks."""

    fails: bool = False  # the save cannot be repeated, so it is an error
    superseded: bool = False  # a newer save has already begun
    at: int | None = None  # the step after which to save; ``None``: at the program's next call of ``save()``


class Retake:
    """Determines the step at which this rank repeats a discarded save. The step is the same on all ranks."""

    def __init__(self, limit_s: float) -> None:
        self.pending: Request | None = None  # the discarded save to repeat
        self.failure: CheckpointError | None = None  # why the save was discarded
        # Confirms copies that are complete. The training thread calls it, so it runs no torch operation meanwhile.
        self.confirm: Callable[[], None] = lambda: None
        self._limit_s = limit_s
        self._at: int | None = None
        self._ended, self._saves = _NO_STEP, 0
        self._closed_from: int | None = None  # the first step that must wait for the decision
        self._answered = threading.Event()
        self._lock = threading.Lock()

    def due(self, step: int) -> bool:
        """Return whether to save again after ``step``. Called on the training thread once per step. Not collective.

        Waits only while the save threads agree on the step, which takes one exchange between the ranks.
        """
        with self._lock:
            waits = self._closed_from is not None and step >= self._closed_from
            self._ended = self._ended if waits else step
        if waits:
            self._answered.wait(self._limit_s)
            with self._lock:
                self._ended = step
        return self._at is not None and step >= self._at

    def begin_save(self) -> tuple[int, bool]:
        """Count a save that begins; return its number, and whether it replaces a discarded save. Thread-safe."""
        with self._lock:
            again = self.pending is not None
            self.pending = self.failure = self._at = None
            self._saves += 1
            return self._saves, again

    def save_again(
        self, save: Request, ranks: RankGroup, why: str, failure: WrittenWhileSavedError
    ) -> WrittenWhileSavedError | None:
        """Schedule the repeat of ``save``, which all ranks have discarded. Return ``failure`` if that is impossible.

        Collective. Called on the save thread. Raises no errors. Logs ``why``, the reason for discarding the save.
        """
        answer = self._agree(save, ranks, failure)
        if answer.fails:
            return failure
        when = "at the next call of save()" if answer.at is None else f"at the end of step {answer.at}"
        again = f"The state is saved again {when}, synchronously; if the run ends earlier, the save has failed."
        again = "A newer save has begun." if answer.superseded else again
        log = _log.warning if ranks.rank == 0 else _log.info
        log("stagereg: %s. %s", why.rstrip("."), again)
        return None

    def _agree(self, save: Request, ranks: RankGroup, failure: CheckpointError) -> _Answer:
        answer = _Answer(fails=True)
        try:
            answer = ranks.round_trip(
                f"Step {save.step} was not saved again",
                lambda: self._reached(save.again),
                lambda reached: [_answer(save.number, reached)] * ranks.size,
                ranks.limit,
            )
        except CheckpointError:
            _log.debug("The ranks could not agree on a step to save again.", exc_info=True)
        with self._lock:
            self._closed_from = None
            if not (answer.fails or answer.superseded) and self._saves == save.number:
                self.pending, self.failure, self._at = save, failure, answer.at
        self._answered.set()
        return answer

    def _reached(self, again: bool) -> _Reached:
        with self._lock:
            self._answered.clear()
            self._closed_from = self._ended + 1
            return _Reached(self._ended, self._saves, again)


def _answer(number: int, reached: list[_Reached]) -> _Answer:
    if any(each.again for each in reached):
        return _Answer(fails=True)
    if any(each.saves > number for each in reached):
        return _Answer(superseded=True)
    ended = [each.ended for each in reached]
    return _Answer(at=None if _NO_STEP in ended else max(ended) + 1)
