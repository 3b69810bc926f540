"""The lease of a reader: the run that writes in a directory does not delete a checkpoint that somebody reads.

A reader writes the file ``.reading.step-00000100.TOKEN`` beside the checkpoint, renews it every twenty seconds, and
deletes it when it has read. The run looks for such files before it deletes a checkpoint, and once more when it has just
taken that out of sight, and then brings it back. So what a reader finds complete after it has taken its lease stays as
long as it renews that. The checkpoint is deleted by a later save.

A reader that has ended without deleting its file no longer counts: one on the machine of the run at once, another one
when the file has not changed for a minute by the clock of the run, as clocks of machines differ. Locks of file systems
are not used, which do not reach other machines everywhere. Who may not write in the directory reads without a lease.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Generator

import stagereg.checkpoint.store.lease as lease
from stagereg.checkpoint.format.manifest import new_token, step_of
from stagereg.checkpoint.store.lock import Owner
from stagereg.checkpoint.store.retry import within

_PREFIX = ".reading."

_log = logging.getLogger(__name__)


def reader_name(checkpoint: str) -> str:
    """Return a name for a new lease of the checkpoint in the directory of that name."""
    return f"{_PREFIX}{checkpoint}.{new_token()}"


def being_read(name: str) -> str | None:
    """Return which checkpoint the file ``name`` is a lease of, None if it is none."""
    checkpoint, _, token = name.removeprefix(_PREFIX).rpartition(".")
    return checkpoint if name.startswith(_PREFIX) and token and step_of(checkpoint) is not None else None


@contextlib.contextmanager
def hold(path: str, write: Callable[[str, bytes], None], delete: Callable[[str], None]) -> Generator[None, None, None]:
    """Keep a lease in the file ``path``, as long as the block runs or the generator is referred to.

    Args:
        path: its full path or URL.
        write: writes a small file.
        delete: deletes one.
    """
    owner, token, process = Owner.ourselves(), new_token(), os.getpid()
    ended, busy = threading.Event(), threading.Lock()

    def renew() -> None:
        with busy, within(lease.REQUEST_S):
            if not ended.is_set():
                write(path, lease.LeaseRecord.renewed_now(owner, token).dumps())

    def keep() -> None:
        while not ended.wait(lease.LEASE_S / 3):
            try:
                renew()
            except Exception as error:
                _log.debug("The lease %s could not be renewed: %s", path, error)

    try:
        renew()
        threading.Thread(target=keep, name="stagereg-reading", daemon=True).start()
    except (OSError, RuntimeError) as error:
        _log_without(os.path.dirname(path), str(getattr(error, "strerror", error)))
    try:
        yield
    finally:
        ended.set()
        if os.getpid() == process:  # a forked child has the block too
            with contextlib.suppress(Exception), busy, within(lease.REQUEST_S):
                delete(path)


@functools.cache  # once a process
def _log_without(root: str, why: str) -> None:
    _log.debug("Checkpoints of %s are read without a lease: %s", root, why)
