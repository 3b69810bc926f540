"""What the ranks of a checkpointer do together beside training: this rank's part in it, and its answers to others.

A rank puts what it does into the list of requests first. One that has left its loop does the same; one that has passed
over something says so, in place of others' waiting for it; and in the end all wait for each other.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Callable

import torch.distributed as dist

from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import OperationLog, ShutdownBarrier
from stagereg.checkpoint.save.save_thread import SaveThread
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, RankMismatchError, name_ranks
from stagereg.extensions.preemption.consensus import PreemptionConsensus

SAVE, NEAR, LEAVE, RESTORE = "save", "near", "leave", "restore"
"""What a request begins with: to save a step, in the tier alone, or to save it and exit; to restore."""


class RankCoordinator:
    """This rank's part.

    ``follow`` is a method. After this rank has left its loop, ``follow(what, step, True)`` saves as other ranks
    do. The other arguments are the checkpointer's.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        token: str,
        ranks: RankGroup,
        saver: Saver,
        grace: datetime.timedelta | None,
        background: SaveThread,
        follow: Callable[[str, int, bool], None],
    ) -> None:
        training, name = None if ranks.group is None else process_group or dist.group.WORLD, f"checkpoint/{token}"
        self.preemption: PreemptionConsensus | None = None  # stays so if signals are left alone
        if grace is not None:
            signals, newest = OperationLog(training, f"{name}/signals"), background.describe_newest
            self.preemption = PreemptionConsensus(RankGroup(process_group), grace.total_seconds(), newest, signals)
        self._requests, self._ending = OperationLog(training, f"{name}/saves"), ShutdownBarrier(training, f"{name}/end")
        self._ranks, self._saver, self._background = ranks, saver, background
        self._follow, self._left = weakref.WeakMethod(follow), False

    def post(self, what: str) -> None:
        """This rank does ``what`` now; all others are to. On the training thread."""
        self._requests.post(what)

    def begin_save(self, step: int, near: bool = False) -> str:
        """This rank saves ``step`` now; return ``SAVE``, ``NEAR``, or ``LEAVE`` if the ranks exit after it."""
        if self._saver.leaving:
            return SAVE
        leaves = self.preemption is not None and self.preemption.agreed_before_save(step)
        what = LEAVE if leaves else NEAR if near else SAVE
        self.post(f"{what} {step}")
        return what

    def follow(self) -> None:
        """Do as ranks in a loop do that this rank has left. Called by a join, between two steps."""
        if self.preemption is not None:
            self.preemption.follow()
        while not self._left and (entry := self._requests.take_next()) is not None:
            what, _, step = entry.partition(" ")
            if what == RESTORE:
                self.answer(entry)
            elif (follow := self._follow()) is not None:
                follow(what, int(step), True)

    def loop_ended(self) -> None:
        """No rank is in the loop of a join any more. Called by the join, on all ranks."""
        if self.preemption is not None:
            self.preemption.loop_ended()

    def answer(self, entry: str | None) -> None:
        """Have other ranks know that this one does not do what they do."""
        what, _, step = (entry or "").partition(" ")
        if what == RESTORE:
            with contextlib.suppress(CheckpointError):
                self._ranks.run_on_all("Nothing was restored", self._refuse_restore)
        elif what:
            self._saver.miss_save(int(step), near=what == NEAR)

    def reject_pending(self) -> None:
        """Answer what ranks still ask for, now that this one has come to its end."""
        while (entry := self._requests.take_next()) is not None:
            self.answer(entry)

    def look_for_missed(self) -> None:
        """Answer what other ranks wait for, where this one has passed over it; on the background thread."""
        self._saver.look_for_hang()
        if self.preemption is not None:
            self.preemption.look_for_missed()
        self.answer(self._requests.take_missed())
        self._ending.look()

    def end(self, seen: int | None) -> None:
        """Wait until all ranks have come to the end. Raises: ``CheckpointError`` if one will not come, or has not."""
        try:
            self._ending.wait(seen, self.reject_pending, self._ranks.limit.total_seconds())
        except CheckpointError:
            self._background.raise_failure()  # of a save, which says more
            raise

    def leave(self) -> None:
        """This rank does nothing together with others any more."""
        self._left = True
        self._ending.leave()
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.reject_pending()

    def _refuse_restore(self) -> None:
        raise RankMismatchError(f"{name_ranks([self._ranks.rank])} did not call restore(), which is for all ranks")
