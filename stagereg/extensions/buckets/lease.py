"""A lock for object stores: a lease, which its owner renews. After it expires, another run may take it over.

Object stores have no locks that end with a process. A conditional write creates the object ``.lock``, and a thread
renews it every 20 seconds. The lease expires after a minute without renewal, or, for an owner on this machine, when the
owner exits. The store's clock measures the age of a lease. If the store has no clock, a waiting run polls for a minute.

A lease is weaker than a lock: a run that was suspended for more than a minute may send one request before it detects
that it has lost the lease. If two runs replace the lease at once, the last write wins, and the other run detects that.
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

_CLOCK = ".clock"  # a temporary object, written to read the store's clock
_SETTLE_S = 1.0  # seconds after which concurrent writes of one object have taken effect

_log = logging.getLogger(__name__)


class StoreLease(StoreLock):
    """The lock of the prefix ``root`` in an object store. It expires at most a minute after its owner exits."""

    _look_s = 0.5

    def __init__(self, objects: ObjectStore, root: str) -> None:
        self._objects = objects
        self._lease = Lease(f"{root}/{LOCK}", objects.put, objects.delete, partial(_read, objects))
        self._first: LeaseRecord | None = None  # another run's lease, as the first attempt has read it
        self._free_at = leases.LEASE_S  # waiting time in seconds after which the other run's lease has expired
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
            _log.info("stagereg: %s has a possibly stale lock of %s. Waiting up to a minute.", self.root, there.owner)
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
        return made or self._is_ours()  # an earlier attempt may have succeeded without a response

    def _replace(self) -> bool:
        """Overwrite the object, wait for concurrent writes of other runs, and return whether this run has the lease."""
        self._objects.put(self._path, self._lease.content())
        time.sleep(_SETTLE_S)
        return self._is_ours()

    def _is_ours(self) -> bool:
        return self._lease.is_ours()

    def _other(self) -> Owner:
        there = _read(self._objects, self._path)
        if there is None:
            raise CheckpointError(f"{self._path} can be neither created nor read. Check the permissions for it.")
        return there.owner

    def _release(self) -> None:
        self._lease.end()


def leaseholder(objects: ObjectStore, root: str) -> Owner | None:
    """Return the owner of the lock on a prefix; ``None`` if the prefix is not locked. Does not wait for the lock."""
    note = _read(objects, f"{root}/{LOCK}")
    return None if note is None or note.is_over() else note.owner


def _read(objects: ObjectStore, url: str) -> LeaseRecord | None:
    try:
        return LeaseRecord.loads(objects.get(url))
    except FileNotFoundError:
        return None
