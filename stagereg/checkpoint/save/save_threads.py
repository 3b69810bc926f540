"""The threads of a checkpointer's save targets, in the order of the targets. Called on the training thread."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from stagereg.checkpoint.extension import Saves
from stagereg.checkpoint.save.retake import Retake
from stagereg.checkpoint.save.save_thread import MOST_UNDER_WAY, SaveThread
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy, Write
from stagereg.checkpoint.stats import CheckpointStats
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import CheckpointError


class SaveThreads(Saves):
    """The threads of all targets. Each save to any target also goes to the first target, which prepares the copy.

    Args:
        targets: the targets in order, a local tier before the checkpoint directory; the same on all ranks.
        timeout: the timeout of one save to one target.
        warns: whether failures are logged instead of raised.
    """

    def __init__(self, targets: Sequence[SaveTarget], timeout: datetime.timedelta, warns: bool = False) -> None:
        self.stats, self.retake = CheckpointStats(), Retake(timeout.total_seconds())
        self.all: list[SaveThread] = []
        for target in targets:
            self.all.append(SaveThread(target, timeout, warns, self.stats, self.retake, [*self.all]))
        self.targets, self.last = targets, self.all[-1]  # the last target retains checkpoints longest
        self.failures = self.last.failures  # includes the errors that kept this rank from staging

    @property
    def newest(self) -> int | None:
        return self.last.newest

    def note_newest(self, step: int | None) -> None:
        self.last.newest = step

    def ends_by(self, until: float) -> bool:
        return self.last.ends_by(until)

    @property
    def hanging(self) -> bool:
        """Whether the current save of some target has exceeded its timeout."""
        return any(each.hanging for each in self.all)

    def admit(self, request: Request) -> None:
        """Wait until a save may be staged. Raises ``CheckpointError`` if an earlier save has failed or hangs."""
        for number in request.targets:
            thread = self.all[number]
            thread.wait(MOST_UNDER_WAY)
            for each in self.all[: number + 1]:
                each.raise_failure()
            if any(each.hanging for each in self.all[: number + 1]):
                thread.failures.set_status(request.step)
                raise CheckpointError(
                    f"Step {request.step} was not saved: an earlier save hangs. {thread.describe_newest()}"
                )

    def submit(self, request: Request, copy: StagedCopy) -> None:
        """Queue a copy for each target of a request."""
        for number in request.targets:
            thread = self.all[number]
            thread.submit(Write(request, copy, thread.target, number))

    def held(self, request: Request, seconds: float) -> None:
        """Report to the schedules how long a save has blocked the training loop. Collective."""
        for number in request.targets:
            self.all[number].target.schedule.held(request.step, seconds)

    def wait(self) -> bool:
        """Wait until all saves have ended or failed. Return False if a save exceeds its timeout."""
        ended = [each.wait() for each in self.all]
        return all(ended)

    def finish(self) -> bool:
        ended = [*(each.wait() for each in self.all[:-1]), self.last.finish()]
        return all(ended)

    def finish_before_restore(self) -> None:
        """Wait for every save before a restore. Raises: ``CheckpointError`` if a save hangs."""
        self.finish()
        if self.hanging:  # the ranks still exchange messages about the save, and a restore would interfere
            self.raise_failure()
            raise CheckpointError("Nothing was restored: a save has not ended yet, because the storage hangs.")

    def restored(self, step: int, path: str) -> None:
        """Record that ``step`` was restored from ``path``. Called on all ranks."""
        for each in self.all:
            each.target.schedule.restored(step)
            if each.target.names(path):
                each.newest = step

    def raise_failure(self) -> None:
        for each in self.all:
            each.raise_failure()

    def describe_newest(self) -> str:
        return self.last.describe_newest()

    def close(self) -> None:
        """End the threads. Saves that have not ended, for example because the storage hangs, will not commit."""
        for each in self.all:
            each.close()
