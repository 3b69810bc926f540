"""Leases of readers, which prevent the writing run from deleting a checkpoint that is being read.

A reader writes a lease next to the checkpoint, ``.reading.step-00000100.TOKEN``. The run lists the leases before it
hides old checkpoints. It lists them again when all are hidden, and makes the checkpoints that are being read visible
again; a later save deletes them. A reader without write permission in the directory has no lease.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Generator

from stagereg.base.small_files import UnfitFileError, temporary_of, warn_skipped
from stagereg.checkpoint.format.manifest import new_token, step_of
from stagereg.checkpoint.store.backend import Backend
from stagereg.checkpoint.store.lease import LEASE_S, Lease, LeaseRecord

_PREFIX = ".reading."

_log = logging.getLogger(__name__)


class Readers:
    """The leases of the readers of checkpoints in a store."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._leases: dict[tuple[str, LeaseRecord], float] = {}  # leases with the time of their last change

    @contextlib.contextmanager
    def read_lease(self, path: str) -> Generator[None, None, None]:
        """Hold a lease on the checkpoint at ``path`` until the block ends or the generator is freed."""
        folder, _, name = self._backend.resolve(path).rpartition("/")
        if step_of(name) is None:
            yield
            return
        lease = Lease(f"{folder}/{reader_name(name)}", self._backend.write, self._backend.delete)
        try:
            lease.renew()
            lease.keep("stagereg-reading", logging.DEBUG)
        except (OSError, RuntimeError) as error:
            _log_without(folder, str(getattr(error, "strerror", error)))
        try:
            yield
        finally:
            lease.end()

    def found(self, delete: bool = False) -> dict[str, list[LeaseRecord]]:
        """Return the current leases by checkpoint name; ``delete`` deletes expired leases, and requires the lock.

        A lease expires when its process on this machine ends, or when it has not changed for a minute.
        """
        now, root = time.monotonic(), self._backend.root
        there = [self._lease(name) for name in self._backend.list(root) if _being_read(name)]
        self._leases = {each: self._leases.get(each, now) for each in there if each is not None}
        found: dict[str, list[LeaseRecord]] = {}
        for (name, record), since in self._leases.items():
            if not record.is_orphaned() and now <= since + LEASE_S:
                found.setdefault(_being_read(name) or "", []).append(record)
            elif delete:
                self._backend.delete(f"{root}/{name}")
        return found

    def _lease(self, name: str) -> tuple[str, LeaseRecord] | None:
        """Return a lease with its name; ``None`` if the file is not a lease."""
        path = f"{self._backend.root}/{name}"
        try:
            return name, LeaseRecord.loads(self._backend.read(path))
        except UnfitFileError as error:
            warn_skipped(path, error)
            return None
        except OSError:
            return name, LeaseRecord()


def reader_name(checkpoint: str) -> str:
    """Return the file name of a new lease on the checkpoint directory named ``checkpoint``."""
    return f"{_PREFIX}{checkpoint}.{new_token()}"


def _being_read(name: str) -> str | None:
    """Return the checkpoint name in the name of a lease file, even during a renewal; ``None`` for other names."""
    name = temporary_of(name) or name
    checkpoint, _, token = name.removeprefix(_PREFIX).rpartition(".")
    return checkpoint if name.startswith(_PREFIX) and token and step_of(checkpoint) is not None else None


@functools.cache  # once a process
def _log_without(root: str, why: str) -> None:
    _log.debug("Checkpoints in %s are read without a lease: %s", root, why)
