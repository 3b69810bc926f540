"""The lock of an object store: an object that its owner renews, and that others may replace once it does not.

A store has no locks that die with a process. A conditional write makes the object ``.lock``, and a thread renews it
every twenty seconds; after a minute without that it is free, and at once if its owner was a process of this machine
that has ended. The store's clock gives its age; without one, the waiting run watches the object for a minute.

This is weaker than a lock: a run that is stopped for more than a minute may believe for one request that it still holds
the lock. Of two writes at the same moment without a condition the second wins; the first run reads that afterwards.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import stagereg.checkpoint.store.lease as leases
from stagereg.checkpoint.store.lease import Lease, LeaseRecord
from stagereg.checkpoint.store.lock import LOCK, LOCK_TIMEOUT_S, Owner, StoreLock
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.object_store import ObjectStore
from stagereg.extensions.buckets.retry import retrying

_CLOCK = ".clock"  # an object that is written and deleted to learn what time it is in the store
_SETTLE_S = 1.0  # after which an object that two wrote at the same moment is as it will stay

_log = logging.getLogger(__name__)


class StoreLease(StoreLock):
    """The lock of the prefix ``root`` of an object store; a minute after the end of its owner it is free."""

    _look_s = 0.5

    def __init__(self, objects: ObjectStore, root: str) -> None:
        self._objects = objects
        self._lease = Lease(f"{root}/{LOCK}", objects.put, objects.delete, partial(_read, objects))
        self._first: LeaseRecord | None = None  # what was there at the first look,
        self._free_at = leases.LEASE_S  # and how many seconds of waiting it takes to be over
        super().__init__(root, leases.LEASE_S)
        self._lease.keep("stagereg-lease", logging.WARNING)

    def _take(self, waited: float) -> bool:
        if self._make():
            return True
        there = _read(self._objects, self._path)
        if there is None:
            return False
        if self._first is None:
            self._first = there
            self._free_at = waited + leases.LEASE_S - self._objects.age(self._path, f"{self.root}/{_CLOCK}")
            _log.info("stagereg: %s is held by %s, or was; this shows within a minute.", self.root, there.owner)
        if there.is_orphaned() or not there.token or (there == self._first and waited >= self._free_at):
            return self._replace()
        if there != self._first or (there.is_near() and waited > LOCK_TIMEOUT_S):
            raise self._refused(there.owner)
        return False

    def _make(self) -> bool:
        try:
            made = retrying("writing", self._path, lambda: self._objects.create(self._path, self._lease.content()))
        except NotImplementedError:
            return _read(self._objects, self._path) is None and self._replace()
        return made or self._is_ours()  # the answer to an earlier try was lost

    def _replace(self) -> bool:
        """Write the object; whether it is still ours after another one that did the same has had its time."""
        self._objects.put(self._path, self._lease.content())
        time.sleep(_SETTLE_S)
        return self._is_ours()

    def _is_ours(self) -> bool:
        return self._lease.is_ours()

    def _other(self) -> Owner:
        there = _read(self._objects, self._path)
        if there is None:
            raise CheckpointError(f"{self._path} can neither be made nor read: look at the rights for that name.")
        return there.owner

    def _release(self) -> None:
        self._lease.end()


def leaseholder(objects: ObjectStore, root: str) -> Owner | None:
    """Return who holds a prefix at this moment, or None; neither waits nor locks."""
    note = _read(objects, f"{root}/{LOCK}")
    return None if note is None or note.is_over() else note.owner


def _read(objects: ObjectStore, url: str) -> LeaseRecord | None:
    try:
        return LeaseRecord.loads(objects.get(url))
    except FileNotFoundError:
        return None
