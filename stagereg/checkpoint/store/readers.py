"""Read leases, which prevent a training run from deleting a checkpoint while another process reads it.

A reader writes a lease file next to the checkpoint, ``.reading.step-00000100.TOKEN``. The run lists the leases before
it hides old checkpoints, and again afterwards. If a hidden checkpoint is being read, the run makes it visible again,
and a later save deletes it. A reader without write permission in the directory cannot have a lease.
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
    """Creates read leases on the checkpoints of a store, and lists the leases of all processes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._leases: dict[tuple[str, LeaseRecord], float] = {}  # time of the first listing with this content

    @contextlib.contextmanager
    def read_lease(self, path: str) -> Generator[None, None, None]:
        """Hold a lease on the checkpoint at ``path`` until the ``with`` block ends."""
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
        """Return the current leases by checkpoint name. If ``delete``, delete expired leases; the lock must be held.

        A lease expires if its process on this machine has ended, or if the file has not changed for a minute.
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
        """Return the file name and the content of a lease, or ``None`` if the file is not a regular file."""
        path = f"{self._backend.root}/{name}"
        try:
            return name, LeaseRecord.loads(self._backend.read(path))
        except UnfitFileError as error:
            warn_skipped(path, error)
            return None
        except OSError:
            return name, LeaseRecord()


def reader_name(checkpoint: str) -> str:
    """Return a file name for a new lease on the checkpoint with the given name."""
    return f"{_PREFIX}{checkpoint}.{new_token()}"


def _being_read(name: str) -> str | None:
    """Return the name of the checkpoint that a lease file protects, or ``None`` for the name of any other file."""
    name = temporary_of(name) or name
    checkpoint, _, token = name.removeprefix(_PREFIX).rpartition(".")
    return checkpoint if name.startswith(_PREFIX) and token and step_of(checkpoint) is not None else None


@functools.cache  # one message per process and argument
def _log_without(root: str, why: str) -> None:
    _log.debug("Checkpoints in %s are read without a lease: %s", root, why)
