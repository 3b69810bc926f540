"""The lock of an object store: an object that its owner renews, and that others may replace once it does not.

A store has no locks that die with a process. The object ``.lock`` names its writer and the time of its last renewal. It
is made by a conditional write, which one of several that try it at once wins, and renewed every twenty seconds by a
thread; one that was not renewed for a minute is free. So after a machine was lost, another one waits up to a minute; on
the same machine, an owner that has ended is found out at once.

This is weaker than a lock. A run that is stopped for more than a minute and wakes up again may believe for one request
that it still holds what another one has taken over; it looks before each commit. Where a store has no conditional
write, and where an old object is replaced, the second of two writers at the same moment wins, and the first finds out
by reading again. Clocks of machines that differ by more than a minute defeat it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagereg.checkpoint.lock import LOCK, UNFIT, Owner, StoreLock, in_use, ourselves
from stagereg.checkpoint.store.object_store import ObjectStore
from stagereg.checkpoint.store.retry import retrying, within
from stagereg.errors import CheckpointError

__all__ = ["StoreLease", "leaseholder"]

LEASE_S = 60.0
"""Seconds that it is good for after it was renewed."""

_ENDING_S = 3.0
_LOOK_S = 0.5
_REQUEST_S = 10.0

_log = logging.getLogger(__name__)
_here: set[str] = set()
"""The tokens of what this process holds; a forked child has a copy that does no harm, since it makes its own tokens."""


class StoreLease(StoreLock):
    """Holds a prefix of an object store from its construction on, until :meth:`release` or a minute after its end.

    Args:
        objects: the store.
        root: the URL of the prefix.
        seconds: how long it is good for after it was renewed, which is done three times as often.
        settle: seconds after which an object that two wrote at the same moment is as it will stay.

    Raises:
        CheckpointError: another run holds it; the message names it. ``OSError``: the store cannot be reached.
    """

    def __init__(self, objects: ObjectStore, root: str, seconds: float = LEASE_S, settle: float = 1.0) -> None:
        self._held = _LeaseRecord(objects, root, seconds, settle, _note())
        self._held.take()
        self._thread = threading.Thread(target=_renew, args=(self._held,), name="stagereg-lease", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _give_back, self._held, os.getpid())
        self._end.atexit = False  # as of a lock: not before the last save

    def check(self) -> None:
        """See :class:`.StoreLock`. An object that was deleted is made again."""
        if not self._end.alive:
            raise CheckpointError(f"This run has let go of {self._held.root}; it may not write there any more.")
        self._held.check()

    def release(self) -> None:
        """See :class:`.StoreLock`."""
        self._end()


def leaseholder(objects: ObjectStore, root: str, seconds: float = LEASE_S) -> Owner | None:
    """Return who holds a prefix at this moment, or None; neither waits nor locks."""
    note = _read(objects, f"{root}/{LOCK}")
    return None if note is None or note.is_over(seconds) else note.owner


@dataclass(frozen=True)
class _Note:
    """The content of the object: the owner, which of its locks, on which machine, and when it was last renewed."""

    owner: Owner
    token: str
    machine: str
    renewed: float

    def dumps(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def loads(cls, data: bytes) -> _Note:
        read = json.loads(data)
        owner = Owner.parse(read["owner"])
        renewed = float(read["renewed"])
        if not math.isfinite(renewed):
            raise ValueError("renewed at no time")
        return cls(owner, str(read["token"]), str(read["machine"]), renewed)

    def is_over(self, seconds: float) -> bool:
        if self.is_near() and self.owner.pid == os.getpid():
            return self.token not in _here  # else of a checkpointer that was closed while the store was away
        return time.time() > self.renewed + seconds or (self.is_near() and not _lives(self.owner.pid))

    def is_near(self) -> bool:
        return self.machine == _machine()


_NOBODY = _Note(Owner(0, "", 0.0, ""), "", "", 0.0)
"""Stands for an object that cannot be read as one of ours: it is over."""


@dataclass
class _LeaseRecord:
    """The object, and what this process last wrote there."""

    objects: ObjectStore
    root: str
    seconds: float
    settle: float
    note: _Note

    def __post_init__(self) -> None:
        self.ended = threading.Event()
        self.busy = threading.Lock()  # the thread that renews must not write after the one that deletes

    @property
    def url(self) -> str:
        return f"{self.root}/{LOCK}"

    def take(self) -> None:
        """Take it. Raises: ``CheckpointError`` if another process keeps it."""
        first: _Note | None = None
        began = time.monotonic()
        while True:
            if self._write_new():
                _here.add(self.note.token)
                return
            there = _read(self.objects, self.url)
            if there is None:
                if time.monotonic() - began > self.seconds:
                    raise CheckpointError(f"{self.url} can neither be made nor read: look at the rights for that name.")
                self.ended.wait(_LOOK_S)
                continue
            if there.token in _here and there.owner.pid == os.getpid():
                raise CheckpointError(
                    f"{self.root} is in use by another Checkpointer of this process; close() that one before you "
                    "construct another one for the same directory."
                )
            first = first or there
            waited = time.monotonic() - began
            # By our own clock too: one that is ahead or behind must not keep a dead run's object for ever.
            unchanged = there == first and waited > self.seconds
            if there.is_over(self.seconds) or unchanged:
                if self._replace():
                    return
                first, began = None, time.monotonic()
            elif there != first or (there.is_near() and waited > _ENDING_S):
                raise CheckpointError(in_use(self.root, there.owner))
            else:
                self.ended.wait(_LOOK_S)

    def check(self) -> None:
        """Make sure that it is still ours. Raises: ``CheckpointError`` if another process has it."""
        with self.busy:
            there = _read(self.objects, self.url)
            if there is None and self._write_new():
                _log.warning("stagereg: %s was deleted while this run held it; it is held again.", self.url)
                return
            there = there or _read(self.objects, self.url)
            if there is not None and there.token == self.note.token:
                return
        owner = "another run" if there is None else str(there.owner)
        raise CheckpointError(
            f"{self.root} was taken over while this run had it, by {owner}: {self.url} was deleted or had not been "
            f"renewed for {self.seconds:.0f} s. Two runs must not write there; end one of them."
        )

    def renew(self) -> None:
        """Renew it if it is ours; if not, :meth:`check` will raise."""
        with self.busy, within(min(_REQUEST_S, self.seconds / 3)):
            there = _read(self.objects, self.url)
            if there is not None and there.token == self.note.token and not self.ended.is_set():
                self.note = replace(self.note, renewed=time.time())
                self.objects.put(self.url, self.note.dumps())

    def delete(self) -> None:
        """Let go of it, if it is ours."""
        try:
            with self.busy, within(_REQUEST_S):
                there = _read(self.objects, self.url)
                if there is not None and there.token == self.note.token:
                    self.objects.delete(self.url)
        finally:
            _here.discard(self.note.token)  # not earlier: others of this process would take it, and lose it to this

    def _write_new(self) -> bool:
        """Write the object unless there is one; whether there is ours now."""
        self.note = replace(self.note, renewed=time.time())
        try:
            if retrying("writing", self.url, lambda: self.objects.create(self.url, self.note.dumps())):
                return True
        except NotImplementedError:
            if _read(self.objects, self.url) is None:
                return self._replace()
        there = _read(self.objects, self.url)
        return there is not None and there.token == self.note.token  # the answer to an earlier try was lost

    def _replace(self) -> bool:
        """Write the object; whether it is still ours after another one that did the same has had its time."""
        self.note = replace(self.note, renewed=time.time())
        self.objects.put(self.url, self.note.dumps())
        self.ended.wait(self.settle)
        there = _read(self.objects, self.url)
        if there is None or there.token != self.note.token:
            return False
        _here.add(self.note.token)
        return True


def _note() -> _Note:
    return _Note(ourselves(), uuid.uuid4().hex, _machine(), time.time())


def _read(objects: ObjectStore, url: str) -> _Note | None:
    """Return the content of the object; None if there is none."""
    try:
        data = objects.get(url)
    except FileNotFoundError:
        return None
    try:
        return _Note.loads(data)
    except UNFIT:
        return _NOBODY


def _renew(held: _LeaseRecord) -> None:
    while not held.ended.wait(held.seconds / 3):
        try:
            held.renew()
        except Exception as error:
            _log.warning("stagereg: %s could not be renewed: %s", held.url, error)


def _give_back(held: _LeaseRecord, process: int) -> None:
    if os.getpid() != process:  # a forked child has the object too, and holds nothing
        return
    held.ended.set()
    with contextlib.suppress(Exception):  # it is free in a minute
        held.delete()


def _machine() -> str:
    """Return what is the same for processes that see the same process ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        # A zombie has ended, though its exit status was not read yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
