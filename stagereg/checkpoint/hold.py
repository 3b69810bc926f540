"""The hold of a run on the directory that it writes to: rank 0 has it, and no other run writes there meanwhile."""

from __future__ import annotations

from functools import partial
from operator import methodcaller

from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lock import StoreLock
from stagereg.checkpoint.store.open_store import is_url
from stagereg.checkpoint.store.retry import answered, within
from stagereg.checkpoint.store.sweep_job import take_for_job


def take_hold(store: CheckpointStore, seconds: float, resume: str) -> StoreLock:
    """Make sure that ``store`` can be written to, take hold of it, and clear away what dead runs have left.

    Raises:
        CheckpointError: another run holds it, or it does not answer within ``seconds``.
    """
    take = partial(_take, store, seconds, resume)
    return answered(store.root, seconds, take, methodcaller("release")) if is_url(store.root) else take()


def let_go(store: CheckpointStore, hold: StoreLock) -> None:
    """Let other runs write to ``store``."""
    if store.appears_as:  # its first save has failed
        store.backend.discard(store.root)
    store.settle()
    hold.release()


def _take(store: CheckpointStore, seconds: float, resume: str) -> StoreLock:
    with within(seconds):
        hold = store.lock()
        failpoint("locked")
        try:
            store.sweep()
            take_for_job(store, resume)
        except BaseException:
            hold.release()
            raise
        failpoint("swept")
        return hold
