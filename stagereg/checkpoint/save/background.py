"""The threads that write in the background: to the store, and to the tier nearer than it.

They are two, so that saves to the tier go on while a slow store takes one.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import stagereg.record as record
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.save.pending_save import PendingSave, SaveTarget
from stagereg.checkpoint.save.save_thread import SaveThread
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore


class TierBackground(SaveThread):
    """The saves to the tier."""

    def _completed(self, save: PendingSave, began: float, ended: float, nbytes: int) -> None:
        self.stats.tier_saves += 1
        if save.agreed is None:  # else the save to the store counts them
            self.stats.bytes_staged += save.copy.nbytes or 0
        record.emit("tier", step=save.step, start=began, seconds=ended - began, bytes=nbytes, dir=save.to.where)
        self._call_listeners(save.step)

    def _clear(self) -> None:
        """What is no longer kept goes before another save is written."""


class Background(SaveThread):
    """The saves to the store.

    Args:
        target: the store, and what its saves share.
        timeout: as of :class:`.SaveThread`, and so are the others.

    Attributes:
        on_committed: is called after the listeners, on rank 0; must neither wait nor raise.
    """

    def __init__(
        self, target: SaveTarget, timeout: datetime.timedelta, warns: bool = False, ahead: SaveThread | None = None
    ) -> None:
        super().__init__(target, timeout, warns, ahead)
        self.on_committed: Callable[[Checkpoint, CheckpointStore], None] | None = None
        self._store_target = target

    def note_lost(self, step: int, store: CheckpointStore) -> str:
        """Note that the checkpoint of a step is gone or damaged; return a sentence on the newest good one."""
        if self.newest == step and store is self._store_target.store:
            self.newest = next((each.manifest.step for each in store.checkpoints()[0]), None)
        return self.describe_newest()

    def _completed(self, save: PendingSave, began: float, ended: float, nbytes: int) -> None:
        to = self._store_target
        self.stats.saves += 1
        self.stats.write_seconds.append(ended - began)
        self.stats.bytes_staged += save.copy.nbytes or 0
        record.emit("write", step=save.step, start=began, seconds=ended - began, bytes=nbytes, dir=to.store.root)
        self._call_listeners(save.step)
        if self.on_committed is not None and to.committed is not None:
            self.on_committed(to.committed, to.store)

    def _clear(self) -> None:
        self._store_target.store.retention.clear()
