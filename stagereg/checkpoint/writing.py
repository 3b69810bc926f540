"""The saves of one checkpointer as tasks of its background thread, and their results.

:mod:`stagereg.checkpoint.saving` does one save, with all ranks. This module adds what this rank does around it: it
records events, informs the schedule, checks the time-out, and logs or raises failures, with a hint what to do.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from dataclasses import dataclass, field

import stagereg.checkpoint.torchfiles as torchfiles
import stagereg.record as record
import stagereg.shutdown as shutdown
from stagereg.checkpoint.advice import advice
from stagereg.checkpoint.process import WriterProcess
from stagereg.checkpoint.rank_group import RankGroup, reason
from stagereg.checkpoint.saving import Save, SaveResult, carry_out
from stagereg.checkpoint.schedule import Schedule
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError

__all__ = ["SaveContext", "StorageHangsError", "Writing"]

_log = logging.getLogger(__name__)


class StorageHangsError(CheckpointError):
    """A save was not begun, since an earlier one has taken too long and not ended."""


class SaveTimeoutError(CheckpointError):
    """A save has taken longer than the time-out; ``everywhere`` if this rank only waits for others that report it."""

    everywhere = False


@dataclass
class SaveContext:
    """What the saves of one checkpointer have in common.

    Attributes:
        store: where they go.
        keep: how many stay.
        storage: writes the files.
        ranks: that save together.
        timeout: of one save.
        process: where the storage writes; ``None`` for here.
        schedule: gets the end of each.
        warns: whether failures are only logged; then the exit status is 1 if the last save has failed.
        plans: of the writes.
        outcomes: of the saves that were committed, in their order.
        newest: the step of the newest checkpoint that this run knows to be good.
        refused: steps that were not staged since the save before them hangs, until that is logged.
    """

    store: CheckpointStore
    keep: int
    storage: Storage
    ranks: RankGroup
    timeout: datetime.timedelta
    process: WriterProcess | None
    schedule: Schedule
    warns: bool
    plans: torchfiles.Plans = field(default_factory=torchfiles.Plans)
    outcomes: list[SaveResult] = field(default_factory=list)
    newest: int | None = None
    refused: list[int] = field(default_factory=list)

    def warn(self, failure: CheckpointError) -> None:
        """Log a failed save while training goes on. A failure that all ranks know is a warning on one of them only."""
        everywhere = not isinstance(failure, SaveTimeoutError) or failure.everywhere
        log = _log.info if everywhere and self.ranks.rank > 0 else _log.warning
        log("stagereg: %s Training goes on.", failure)

    def failed(self, step: int) -> None:
        """Note that the last save has failed; the reason is reported elsewhere."""
        if self.warns:
            text = f"the last save has failed, of step {step}, so the exit status is 1."
            shutdown.set_last_status(self.store.root, CheckpointError(f"{text} {self.there()}"))

    def refuse(self, step: int) -> CheckpointError:
        """Return why a save does not begin while an earlier one hangs."""
        self.refused.append(step)
        self.failed(step)
        return StorageHangsError(f"Step {step} was not saved: an earlier save hangs. {self.there()}")

    def described(self, text: str, hint: str = "") -> str:
        """Return the message on a failed save: what happened, what to do, what there is."""
        parts = (text if text.endswith(".") else f"{text}.", hint, self.there())
        return " ".join(part for part in parts if part)

    def there(self) -> str:
        """Return a sentence on the newest good checkpoint."""
        if self.newest is None:
            return f"This run has no complete checkpoint in {self.store.root} yet."
        return f"The newest good checkpoint is step {self.newest}, in {self.store.root}."


@dataclass
class Writing:
    """One save on the background thread, as :class:`stagereg.checkpoint.background.BackgroundTask`.

    Attributes:
        saves: what it has in common with the others.
        save: what is to be written.
        called: when the training loop has asked for it (``record.now``).
    """

    saves: SaveContext
    save: Save
    called: float

    def run(self) -> None:
        """Write and commit, with the other ranks. Raises: ``CheckpointError``, unless it was raised here before."""
        save, saves = self.save, self.saves
        save.until = time.monotonic() + saves.timeout.total_seconds()
        try:
            self._look_at_directory()
            outcome = carry_out(
                save, saves.store, saves.keep, saves.storage, saves.plans, saves.ranks.without_timeout, saves.process
            )
        except BaseException as error:
            save.record_copied()
            record.emit("lost", step=save.step, error=reason(error))
            saves.schedule.ended(None)
            known = save.failure is not None and isinstance(error, CheckpointError)
            cause = error.__cause__ if isinstance(error, CheckpointError) else error
            named = "" if isinstance(error, CheckpointError) else f"Step {save.step} was not saved: "
            saves.failed(save.step)
            if known:
                return
            raise CheckpointError(saves.described(named + reason(error), advice(error, saves.store.root))) from cause
        saves.outcomes.append(outcome)
        saves.newest = save.step
        shutdown.set_last_status(saves.store.root, None)
        saves.schedule.ended(outcome.began + outcome.seconds - self.called)
        record.emit("write", step=save.step, start=outcome.began, seconds=outcome.seconds, bytes=outcome.bytes_written)

    def late(self) -> CheckpointError:
        """Return that it has taken too long, and where this rank is at."""
        save, saves = self.save, self.saves
        alone = saves.ranks.group is None
        where = f"{'it' if alone else f'rank {saves.ranks.rank}'} is at: {save.at}"
        failure = SaveTimeoutError(
            saves.described(
                f"Step {save.step} was not saved: it has taken longer than {_duration(saves.timeout)} ({where})",
                "Does the storage hang? Until this ends, no other save begins.",
            )
        )
        failure.everywhere = save.waits
        saves.failed(save.step)
        return failure

    def back(self, error: BaseException | None) -> None:
        """Log that the storage responds again, and what has become of the save."""
        saves = self.saves
        if error is None:  # which may have been reported late in the very moment in which it was complete
            shutdown.set_last_status(saves.store.root, None)
        what = "is saved after all" if error is None else f"was not saved ({reason(error)})"
        steps = ", ".join(map(str, saves.refused))
        also = f" In the meantime these steps were not saved: {steps}." if steps else ""
        saves.refused.clear()
        log = _log.info if saves.ranks.rank > 0 else _log.warning
        seconds = record.now() - self.called
        log(
            "stagereg: storage is responding again; checkpoints resume: step %d %s, after %.0f s.%s",
            self.save.step,
            what,
            seconds,
            also,
        )

    def abandon(self) -> None:
        """Commit nothing any more."""
        self.save.abandoned = True

    def _look_at_directory(self) -> None:
        """Log it if all that was saved has been deleted; the save itself will report what else is wrong there."""
        store = self.saves.store
        if self.saves.ranks.rank > 0 or store.remote or os.path.isdir(store.root):
            return
        try:
            os.lstat(store.root)
        except FileNotFoundError:
            _log.warning(
                "stagereg: %s was deleted, with all checkpoints in it. It is made again for step %d.",
                store.root,
                self.save.step,
            )
        except OSError:  # such as of a server that is away, and may have them still
            return
        self.saves.newest = None


def _duration(length: datetime.timedelta) -> str:
    seconds = length.total_seconds()
    if seconds < 120:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min"
