"""Coordinates the operations of a checkpointer on all ranks: saves, restores, and the end of the run.

Before each operation, a rank appends the operation to a shared log. A rank without data, which has left its training
loop, performs the operations in the log. A rank that has missed an operation reports this, so that the other ranks do
not wait. At the end all ranks wait for each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from stagereg.checkpoint.dispatch import Extensions, weakly
from stagereg.checkpoint.extension import CheckpointExtension
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import OperationLog, ShutdownBarrier
from stagereg.checkpoint.save.save_thread import SaveThreads
from stagereg.checkpoint.save.saver import Saver
from stagereg.errors import CheckpointError, RankMismatchError, name_ranks

SAVE, LEAVE, RESTORE = "save", "leave", "restore"
"""First words of log entries: save a step to numbered targets; save a step and exit; restore."""


class RankCoordinator:
    """Coordinates this rank with the other ranks.

    ``follow(what, step, targets, follows)`` is the bound method that saves. ``follows`` is True if this rank has left
    its training loop and takes part in a save of the other ranks. The other arguments are objects of the checkpointer.
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
        self._follow, self._left = weakly(follow, None), False

    def post(self, what: str) -> None:
        """Append the operation ``what``, which this rank begins now, to the log. Called on the training thread."""
        self._requests.post(what)

    def save(self, step: int, everywhere: bool) -> None:
        """Log and start a save: to all targets if ``everywhere``, otherwise to the targets that are due."""
        what, targets, request = SAVE, None, ""
        if not self._saver.leaving:
            if self._extensions.leaves_after(step):
                what, request = LEAVE, f"{LEAVE} {step}"
            else:
                targets = self._saver.targets_of(step, everywhere)
                request = f"{SAVE} {step} {' '.join(map(str, targets))}"
            self.post(request)
        self._follow(what, step, targets, False)

    def follow(self) -> None:
        """After this rank has left its loop, take part in the other ranks' operations. Called between steps."""
        self._extensions.notify(CheckpointExtension.follow, False)
        while not self._left and (entry := self._requests.take_next()) is not None:
            what, step, targets = _read(entry)
            if what == RESTORE:
                self.answer(entry)
            else:
                self._follow(what, step, targets, True)

    def loop_ended(self) -> None:
        """Notify the extensions that all ranks have left the loop of a join. The join calls this on all ranks."""
        self._extensions.notify(CheckpointExtension.follow, True)

    def answer(self, entry: str | None) -> None:
        """Notify the other ranks that this rank does not take part in the operation of a log entry."""
        what, step, targets = _read(entry or "")
        if what == RESTORE:
            with contextlib.suppress(CheckpointError):
                self._ranks.run_on_all("Nothing was restored", self._refuse_restore)
        elif what:
            self._saver.miss_save(step, targets)

    def reject_pending(self) -> None:
        """Reject all operations that other ranks have begun, because this rank has reached the end of the run."""
        while (entry := self._requests.take_next()) is not None:
            self.answer(entry)

    def look_for_missed(self) -> None:
        """Reject an operation that this rank has missed, so that other ranks do not wait. On the background thread."""
        self._saver.look_for_hang()
        self._extensions.notify(CheckpointExtension.idle)
        self.answer(self._requests.take_missed())
        self._ending.look()

    def end(self, seen: int | None) -> None:
        """Wait until all ranks reach the end of the run. Raises ``CheckpointError`` if a rank cannot reach it."""
        try:
            self._ending.wait(seen, self.reject_pending, self._ranks.limit.total_seconds())
        except CheckpointError:
            self._background.raise_failure()  # the failure of a save is more specific
            raise

    def leave(self) -> None:
        """Stop all coordination with other ranks."""
        self._left = True
        self._ending.leave()
        with contextlib.suppress(RuntimeError):  # the rendezvous store may be gone
            self.reject_pending()

    def _refuse_restore(self) -> None:
        raise RankMismatchError(f"{name_ranks([self._ranks.rank])} did not call restore(), which all ranks must call")


def _read(entry: str) -> tuple[str, int, Sequence[int] | None]:
    """Parse a log entry: return the operation, the step, and the numbers of the targets (``None`` for all targets)."""
    what, *numbers = entry.split(" ")
    step, *targets = [*map(int, numbers)] or [-1]
    return what, step, targets or None
