"""Leases: small files that record which process uses a resource. A thread renews the file every twenty seconds.

A lease expires one minute after its last renewal, or immediately if its owner was a process on this machine and has
terminated. Processes that read a checkpoint hold a lease. In an object store, which cannot release the lock of a dead
process, the writing run holds a lease as well.
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
from pathlib import Path
from typing import NamedTuple

from stagereg.base.deadline import within
from stagereg.base.machine import machine_name
from stagereg.checkpoint.format.manifest import new_token
from stagereg.checkpoint.store.lock import Owner

LEASE_S = 60.0  # seconds from a renewal to the expiry
REQUEST_S = 10.0  # timeout of each request that writes or deletes the file, in seconds

_log = logging.getLogger(__name__)


class Lease:
    """A lease file of this process. A thread renews the file until :meth:`end` is called or the lease is freed.

    ``read`` is necessary if another lease may replace the file. After that, this lease does not change the file.
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
        self._busy = threading.Lock()  # the renewing thread must not write after the file is deleted

    def content(self) -> bytes:
        return LeaseRecord(self._owner, self._token, machine_name(), time.time()).dumps()

    def is_ours(self) -> bool:
        """Return whether the file still belongs to this lease."""
        there = None if self._read is None else self._read(self._path)
        return self._read is None or (there is not None and there.token == self._token)

    def renew(self) -> None:
        """Write the file with the current time, unless the lease has ended or another lease owns the file."""
        with self._busy, within(REQUEST_S):
            if self.is_ours() and not self._ended.is_set():
                self._write(self._path, self.content())

    def keep(self, thread: str, level: int) -> None:
        """Start a thread, named ``thread``, that renews the file and logs failures at ``level``."""
        threading.Thread(target=_keep, args=(weakref.ref(self), self._ended, level), name=thread, daemon=True).start()

    def end(self) -> None:
        """Delete the file if this lease still owns it; does nothing in a forked child. Raises nothing."""
        self._ended.set()
        if self._process == os.getpid():
            with contextlib.suppress(Exception), self._busy, within(REQUEST_S):  # the file expires anyway
                if self.is_ours():
                    self._delete(self._path)


def _keep(held: weakref.ref[Lease], ended: threading.Event, level: int) -> None:
    while not ended.wait(LEASE_S / 3) and (lease := held()) is not None:
        try:
            lease.renew()
        except Exception as error:
            _log.log(level, "stagereg: Cannot renew the lease %s: %s", lease._path, error)
        del lease


class LeaseRecord(NamedTuple):
    """The content of a lease file; ``token`` identifies the lease, ``renewed`` is the time of the last renewal."""

    owner: Owner = Owner()
    token: str = ""
    machine: str = ""
    renewed: float = 0.0

    @classmethod
    def loads(cls, data: bytes) -> LeaseRecord:
        """Parse the content of a lease file. If the content is invalid, return an expired lease."""
        try:
            read = json.loads(data)
            owner, machine = Owner.parse(read["owner"]), str(read.get("machine", ""))
            record = cls(owner, str(read["token"]), machine, float(read["renewed"]))
        except Exception:
            return cls()
        return record if math.isfinite(record.renewed) else cls()

    def dumps(self) -> bytes:
        return json.dumps({**self._asdict(), "owner": asdict(self.owner)}).encode()

    def is_over(self) -> bool:
        """Return whether the lease has expired according to this machine's clock, or its owner has terminated."""
        return time.time() > self.renewed + LEASE_S or self.is_orphaned()

    def is_near(self) -> bool:
        """Return whether the owner is another process on this machine."""
        return self.machine == machine_name() and self.owner.pid != os.getpid()

    def is_orphaned(self) -> bool:
        """Return whether the owner was a process on this machine and has terminated."""
        return self.is_near() and not _lives(self.owner.pid)


def _lives(pid: int) -> bool:
    try:  # a zombie (state Z) counts as terminated
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
