"""The lock of an object store: an object that its owner renews, and that others may replace once it does not.

A store has no locks that die with a process. A conditional write makes the object ``.lock``, and a thread renews it
every twenty seconds; after a minute without that it is free, and at once if its owner was a process of this machine
that has ended. The store's clock gives its age; without one, the waiting run watches the object for a minute.

This is weaker than a lock: a run that is stopped for more than a minute may believe for one request that it still holds
the lock. Of two writes at the same moment without a condition the second wins; the first run reads that afterwards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stagereg.base.machine import machine_name
from stagereg.base.retry import retrying, within
from stagereg.checkpoint.format.manifest import new_token
from stagereg.checkpoint.store.lock import LOCK, LOCK_TIMEOUT_S, Owner, StoreLock
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.object_store import ObjectStore

LEASE_S = 60.0  # seconds that it is good for after it was renewed
REQUEST_S = 10.0  # seconds that writing or deleting it may take
_CLOCK = ".clock"  # an object that is written and deleted to learn what time it is in the store
_SETTLE_S = 1.0  # after which an object that two wrote at the same moment is as it will stay

_log = logging.getLogger(__name__)


class Lease:
    """A file that names the user of something; a thread renews it until it is ended or garbage collected.

    With ``read``, another lease may replace it, which is then neither renewed nor deleted.
    """

    def __init__(
        self,
        path: str,
        write: Callable[[str, bytes], None],
        delete: Callable[[str], None],
        read: Callable[[str], LeaseRecord | None] | None = None,
    ) -> None:
        self._path, self._write, self._delete, self._read = path, write, delete, read
        self._owner, self._token, self._process = Owner.ourselves(), new_token(), os.getpid()
        self._ended = threading.Event()
        self._busy = threading.Lock()  # the thread that renews must not write after the one that deletes

    def content(self) -> bytes:
        """Return what it says now."""
        return LeaseRecord(self._owner, self._token, machine_name(), time.time()).dumps()

    def is_ours(self) -> bool:
        """Whether the file is not another one's."""
        there = None if self._read is None else self._read(self._path)
        return self._read is None or (there is not None and there.token == self._token)

    def renew(self) -> None:
        """Write it, if it is ours, and not ended."""
        with self._busy, within(REQUEST_S):
            if self.is_ours() and not self._ended.is_set():
                self._write(self._path, self.content())

    def keep(self, thread: str, level: int) -> None:
        """Have a thread of that name renew it; what fails then is logged at ``level``."""
        threading.Thread(target=_keep, args=(weakref.ref(self), self._ended, level), name=thread, daemon=True).start()

    def end(self) -> None:
        """Delete it, if it is ours, and not of the process that this one was forked from. Raises nothing."""
        self._ended.set()
        if self._process == os.getpid():
            with contextlib.suppress(Exception), self._busy, within(REQUEST_S):  # it counts for a minute at most
                if self.is_ours():
                    self._delete(self._path)


def _keep(held: weakref.ref[Lease], ended: threading.Event, level: int) -> None:
    while not ended.wait(LEASE_S / 3) and (lease := held()) is not None:
        try:
            lease.renew()
        except Exception as error:
            _log.log(level, "stagereg: the lease %s could not be renewed: %s", lease._path, error)
        del lease


class StoreLease(StoreLock):
    """The lock of the prefix ``root`` of an object store; a minute after the end of its owner it is free."""

    _look_s = 0.5

    def __init__(self, objects: ObjectStore, root: str) -> None:
        self._objects = objects
        self._lease = Lease(f"{root}/{LOCK}", objects.put, objects.delete, partial(_read, objects))
        self._first: LeaseRecord | None = None  # what was there at the first look,
        self._free_at = LEASE_S  # and how many seconds of waiting it takes to be over
        super().__init__(root, LEASE_S)
        self._lease.keep("stagereg-lease", logging.WARNING)

    def _take(self, waited: float) -> bool:
        if self._make():
            return True
        there = _read(self._objects, self._path)
        if there is None:
            return False
        if self._first is None:
            self._first = there
            self._free_at = waited + LEASE_S - self._objects.age(self._path, f"{self.root}/{_CLOCK}")
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


class LeaseRecord(NamedTuple):
    """The content of a lease: the owner, which of its leases, on which machine, and when it was last renewed."""

    owner: Owner = Owner()
    token: str = ""
    machine: str = ""
    renewed: float = 0.0

    @classmethod
    def loads(cls, data: bytes) -> LeaseRecord:
        """Read the content; one that is not ours is over."""
        try:
            read = json.loads(data)
            owner, machine = Owner.parse(read["owner"]), str(read.get("machine", ""))
            record = cls(owner, str(read["token"]), machine, float(read["renewed"]))
        except Exception:
            return cls()
        return record if math.isfinite(record.renewed) else cls()

    def dumps(self) -> bytes:
        """Return the content."""
        return json.dumps({**self._asdict(), "owner": asdict(self.owner)}).encode()

    def is_over(self) -> bool:
        """Whether its owner has ended, or has not renewed it in time by the clock of this machine."""
        return time.time() > self.renewed + LEASE_S or self.is_orphaned()

    def is_near(self) -> bool:
        """Whether the owner is another process of this machine."""
        return self.machine == machine_name() and self.owner.pid != os.getpid()

    def is_orphaned(self) -> bool:
        """Whether the owner is of this machine and has ended."""
        return self.is_near() and not _lives(self.owner.pid)


def _read(objects: ObjectStore, url: str) -> LeaseRecord | None:
    try:
        return LeaseRecord.loads(objects.get(url))
    except FileNotFoundError:
        return None


def _lives(pid: int) -> bool:
    try:  # a zombie has ended, though its exit status was not read yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
