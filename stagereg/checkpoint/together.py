"""What the ranks of a checkpointer do together beside training: this rank's part in it, and its answers to others.

A rank puts what it does into the list of requests first. One that has left its loop does the same; one that has passed
over something says so, in place of others' waiting for it; and in the end all wait for each other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist

from stagereg.checkpoint.dispatch import Extensions
from stagereg.checkpoint.extension import CheckpointExtension
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import OperationLog, ShutdownBarrier
from stagereg.checkpoint.save.save_threads import SaveThreads
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, RankMismatchError, name_ranks

SAVE, LEAVE, RESTORE = "save", "leave", "restore"
"""What a request begins with: to save a step, in the targets of some numbers; to save it and exit; to restore."""


class RankCoordinator:
    """This rank's part.

    ``follow`` is a method. After this rank has left its loop, ``follow(what, step, targets, True)`` saves as other
    ranks do. The other arguments are the checkpointer's.
    """

    def __init__(
        self,
        training: dist.ProcessGroup | None,
        token: str,
        ranks: RankGroup,
        saver: Saver,
        background: SaveThreads,
        extensions: Extensions,
        follow: Callable[[str, int, Sequence[int] | None, bool], None],
    ) -> None:
        name = f"checkpoint/{token}"
        self._requests, self._ending = OperationLog(training, f"{name}/saves"), ShutdownBarrier(training, f"{name}/end")
        self._ranks, self._saver, self._background = ranks, saver, background
        self._extensions = extensions
        self._follow, self._left = weakref.WeakMethod(follow), False

    def post(self, what: str) -> None:
        """This rank does ``what`` now; all others are to. On the training thread."""
        self._requests.post(what)

    def save(self, step: int, everywhere: bool) -> None:
        """This rank saves ``step`` now, or the ranks exit after it: in the targets that are due, or ``everywhere``."""
        what, targets, request = SAVE, None, ""
        if not self._saver.leaving:
            if self._extensions.leaves_after(step):
                what, request = LEAVE, f"{LEAVE} {step}"
            else:
                targets = self._saver.targets_of(step, everywhere)
                request = f"{SAVE} {step} {' '.join(map(str, targets))}"
            self.post(request)
        if (save := self._follow()) is not None:
            save(what, step, targets, False)

    def follow(self) -> None:
        """Do as ranks in a loop do that this rank has left. Called by a join, between two steps."""
        self._extensions.notify(CheckpointExtension.follow, False)
        while not self._left and (entry := self._requests.take_next()) is not None:
            what, step, targets = _read(entry)
            if what == RESTORE:
                self.answer(entry)
            elif (follow := self._follow()) is not None:
                follow(what, step, targets, True)

    def loop_ended(self) -> None:
        """No rank is in the loop of a join any more. Called by the join, on all ranks."""
        self._extensions.notify(CheckpointExtension.follow, True)

    def answer(self, entry: str | None) -> None:
        """Have other ranks know that this one does not do what they do."""
        what, step, targets = _read(entry or "")
        if what == RESTORE:
            with contextlib.suppress(CheckpointError):
                self._ranks.run_on_all("Nothing was restored", self._refuse_restore)
        elif what:
            self._saver.miss_save(step, targets)

    def reject_pending(self) -> None:
        """Answer what ranks still ask for, now that this one has come to its end."""
        while (entry := self._requests.take_next()) is not None:
            self.answer(entry)

    def look_for_missed(self) -> None:
        """Answer what other ranks wait for, where this one has passed over it; on the background thread."""
        self._saver.look_for_hang()
        self._extensions.notify(CheckpointExtension.idle)
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


def _read(entry: str) -> tuple[str, int, Sequence[int] | None]:
    """Return what a request is for, the step, and the numbers of the targets, ``None`` for all of them."""
    what, *numbers = entry.split(" ")
    step, *targets = [*map(int, numbers)] or [-1]
    return what, step, targets or None
