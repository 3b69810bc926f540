"""The targets of a checkpointer, in order, each with its thread; for the training thread."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from stagereg.checkpoint.save.failures import Failures
from stagereg.checkpoint.save.retake import Retake
from stagereg.checkpoint.save.save_thread import SaveThread
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy
from stagereg.checkpoint.save.write import Write
from stagereg.checkpoint.stats import CheckpointStats
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import CheckpointError


class SaveThreads:
    """The threads of all targets. A save that is due for some target goes to the first one too, which prepares it.

    Args:
        targets: the nearest first; the same on all ranks.
        timeout: of one save of one target.
        warns: whether failures are logged, and never raised.

    Attributes:
        last: the thread of the last target, the one that lasts longest.
        retake: makes saves again that were discarded.
    """

    def __init__(self, targets: Sequence[SaveTarget], timeout: datetime.timedelta, warns: bool = False) -> None:
        self.stats, self.retake = CheckpointStats(), Retake(timeout.total_seconds())
        self.all: list[SaveThread] = []
        for target in targets:
            self.all.append(SaveThread(target, timeout, warns, self.stats, self.retake, [*self.all]))
        self.last = self.all[-1]

    @property
    def failures(self) -> Failures:
        """Those that are reported for all targets: of what kept this rank from staging."""
        return self.last.failures

    @property
    def targets(self) -> list[SaveTarget]:
        """Where saves go, the one that lasts longest last."""
        return [each.target for each in self.all]

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint in the last target that this run knows to be good."""
        return self.last.newest

    def note_newest(self, step: int | None) -> None:
        """Note that ``step`` is the newest good checkpoint in the last target, ``None`` for no checkpoint."""
        self.last.note_newest(step)

    def ends_by(self, until: float) -> bool:
        """Wait until all saves to the last target have ended, well or not; False if they have not at ``until``."""
        return self.last.ends_by(until)

    @property
    def hanging(self) -> bool:
        """Whether a save that is being written has passed the time-out."""
        return any(each.hanging for each in self.all)

    def admit(self, request: Request) -> None:
        """Wait until a save may be staged. Raises ``CheckpointError`` if an earlier save has failed, or hangs."""
        for number in request.targets:
            thread = self.all[number]
            thread.wait_for_turn()
            for each in self.all[: number + 1]:
                each.raise_failure()
            if any(each.hanging for each in self.all[: number + 1]):
                thread.failures.set_status(request.step)
                raise CheckpointError(
                    f"Step {request.step} was not saved: an earlier save hangs. {thread.describe_newest()}"
                )

    def submit(self, request: Request, copy: StagedCopy) -> None:
        """Have each target of a request write a copy."""
        for number in request.targets:
            thread = self.all[number]
            thread.submit(Write(request, copy, thread.target, number))

    def held(self, request: Request, seconds: float) -> None:
        """Tell the schedules how long a save has held the training loop. Collective."""
        for number in request.targets:
            self.all[number].target.schedule.held(request.step, seconds)

    def wait(self) -> bool:
        """Wait until all saves have ended, well or not; False if one of them takes too long."""
        ended = [each.wait() for each in self.all]
        return all(ended)

    def finish(self) -> bool:
        """As :meth:`wait`, and until what is old is deleted in the last target, which may take as long."""
        ended = [*(each.wait() for each in self.all[:-1]), self.last.finish()]
        return all(ended)

    def finish_before_restore(self) -> None:
        """Wait for every save, on the training thread, which then meets the other ranks in an exchange."""
        self.finish()
        if self.hanging:  # in an exchange with the other ranks, which another one must not meet
            self.raise_failure()
            raise CheckpointError("Nothing was restored: a save has not ended yet, since the storage hangs.")

    def restored(self, step: int, path: str) -> None:
        """Go on from ``step``, which was restored from ``path``. On all ranks."""
        for each in self.all:
            each.target.schedule.restored(step)
            if each.target.names(path):
                each.note_newest(step)

    def raise_failure(self) -> None:
        """Raise the first failure that no call has raised yet, and log later ones."""
        for each in self.all:
            each.raise_failure()

    def describe_newest(self) -> str:
        """Return a sentence on the newest good checkpoint of all targets."""
        return self.last.describe_newest()

    def close(self) -> None:
        """End the threads after their last saves; one that hangs commits nothing, should it ever go on."""
        for each in self.all:
            each.close()
