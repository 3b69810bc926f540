"""What the ranks of a checkpointer do together beside training: this rank's part in it, and its answers to others.

A rank puts what it does into the list of requests first. One that has left its loop does the same; one that has passed
over something says so, in place of others' waiting for it; and in the end all wait for each other.
"""

from __future__ import annotations

import contextlib
import datetime
from functools import partial

import torch.distributed as dist

from stagereg.checkpoint.ranks.preemption_consensus import PreemptionConsensus
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import Ending, Requests
from stagereg.checkpoint.save.background import Background
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, DisagreementError, name_ranks

SAVE, LEAVE, RESTORE, MOVE = "save", "leave", "restore", "move_to"
"""What a request begins with: to save a step, to save it and exit, to restore, to go to another directory."""


class Together:
    """This rank's part.

    Attributes:
        preemption: whether the ranks are to leave; ``None`` if signals are left alone.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        token: str,
        ranks: RankGroup,
        saver: Saver,
        grace: datetime.timedelta | None,
        background: Background,
    ) -> None:
        training, name = None if ranks.group is None else process_group or dist.group.WORLD, f"checkpoint/{token}"
        self.preemption: PreemptionConsensus | None = None
        if grace is not None:
            signals, newest = Requests(training, f"{name}/signals"), background.describe_newest
            self.preemption = PreemptionConsensus(RankGroup(process_group), grace.total_seconds(), newest, signals)
        self._requests, self._ending = Requests(training, f"{name}/saves"), Ending(training, f"{name}/end")
        self._ranks, self._saver, self._background = ranks, saver, background

    def post(self, what: str) -> None:
        """This rank does ``what`` now; all others are to. On the training thread."""
        self._requests.post(what)

    def begin_save(self, step: int) -> str:
        """This rank saves ``step`` now; return ``SAVE``, or ``LEAVE`` if the ranks have agreed to exit after it."""
        if self._saver.leaving:
            return SAVE
        what = LEAVE if self.preemption is not None and self.preemption.agreed_before_save(step) else SAVE
        self.post(f"{what} {step}")
        return what

    def take(self) -> str | None:
        """Return the next request that this rank, which has left its loop, has not met."""
        return self._requests.take_next()

    def answer(self, entry: str | None) -> None:
        """Have other ranks know that this one does not do what they do."""
        what, _, step = (entry or "").partition(" ")
        if what in (RESTORE, MOVE):
            with contextlib.suppress(CheckpointError):
                failing = f"Nothing was {'restored' if what == RESTORE else 'saved'}"
                self._ranks.run_on_all(failing, partial(self._refuse, what))
        elif what:
            self._saver.miss_save(int(step))

    def answer_all(self) -> None:
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
            self._ending.wait(seen, self.answer_all, self._ranks.limit.total_seconds())
        except CheckpointError:
            self._background.raise_failure()  # of a save, which says more
            raise

    def leave(self) -> None:
        """This rank does nothing together with others any more."""
        self._ending.leave()
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.answer_all()

    def _refuse(self, what: str) -> None:
        raise DisagreementError(f"{name_ranks([self._ranks.rank])} did not call {what}(), which is for all ranks")
