"""A lease: a small file that names the user of something, which a thread renews every twenty seconds.

A lease that has not changed for a minute is over, and at once if its owner was a process of this machine that has
ended. Readers of checkpoints have leases, and a writer where there are no locks that die with a process.
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

LEASE_S = 60.0  # seconds that it is good for after it was renewed
REQUEST_S = 10.0  # seconds that writing or deleting it may take

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


def _lives(pid: int) -> bool:
    try:  # a zombie has ended, though its exit status was not read yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
