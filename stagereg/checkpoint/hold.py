"""The hold of a run on the directory that it writes to: rank 0 has it, and no other run writes there meanwhile."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from operator import methodcaller

from stagereg.checkpoint.format.manifest import new_token
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.open_store import is_url
from stagereg.checkpoint.store.retry import answered, within
from stagereg.checkpoint.store.sweep_job import take_for_job

_log = logging.getLogger(__name__)


class Hold:
    """The hold of one run, which all of its ranks take, change and let go of together."""

    def __init__(self, ranks: RankGroup, seconds: float, resume: str) -> None:
        self._ranks, self._seconds, self._resume = ranks, seconds, resume
        self._store: CheckpointStore | None = None
        self._lock: StoreLock | None = None  # of rank 0

    def take(self, store: CheckpointStore, given: str) -> str:
        """Make sure that ``store`` can be written to, take it, and clear away what dead runs have left. Collective.

        ``given`` is the directory as the user wrote it. Returns a token of this run. Raises ``CheckpointError`` if
        another run holds it, or it does not answer in time.
        """

        def take() -> str:
            self._take(store)
            return new_token()

        return self._ranks.run_on_all(f"checkpoint.dir={given} cannot be written to", take)[0]

    def move(self, store: CheckpointStore, wait: Callable[[], None]) -> Hold:
        """Take another one, when each rank has waited for its saves, and return the hold of that. Collective.

        One that is not there yet appears with its first complete checkpoint. Raises as :meth:`take`.
        """
        root, other = store.root, Hold(self._ranks, self._seconds, self._resume)

        def take() -> bool:
            hidden = not is_url(root) and not os.path.lexists(root)
            wait()
            if hidden and self._ranks.rank == 0:
                store.hide()
            other._take(store)
            return hidden

        try:
            hidden = self._ranks.run_on_all(f"{root} cannot be written to", take)[0]
        except BaseException:
            if other._lock is not None:
                other._lock.release()
            raise
        if hidden:
            store.hide()
        return other

    def let_go(self) -> None:
        """Let other runs write there."""
        if self._store is not None and self._lock is not None:
            self._store.settle()
            self._lock.release()

    def _take(self, store: CheckpointStore) -> None:
        if self._ranks.rank == 0:
            take = partial(_take, store, self._seconds, self._resume)
            away = is_url(store.root)
            self._lock = answered(store.root, self._seconds, take, methodcaller("release")) if away else take()
            self._store = store


def warn_of_earlier_run(store: CheckpointStore) -> None:
    """Warn of what a run that saves and has restored nothing will delete."""
    if store.retention.spared:
        _log.warning(
            "stagereg: restore() was not called, and %s has checkpoints of an earlier run, among them %s: each is "
            "deleted when this run has passed its step. Call restore(state) before the loop to go on from them; or "
            "give this run another directory, or say that it starts anew, with resume='never'.",
            store.root,
            ", ".join(sorted(os.path.basename(each) for each in store.retention.spared)[-2:]),
        )


def _take(store: CheckpointStore, seconds: float, resume: str) -> StoreLock:
    with within(seconds):
        hold = store.lock()
        failpoint("locked")
        try:
            store.sweep()
            take_for_job(store, resume)
            if resume == "never":
                store.retention.spared.clear()
        except BaseException:
            hold.release()
            raise
        failpoint("swept")
        return hold
