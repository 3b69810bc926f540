"""The lock that lets one run at a time write to a directory, and who holds it.

::

    runs/gpt/
        .lock           locked by the run that writes here (``fcntl.lockf``)
        .lock.owner     who that is, for the message of who is refused

The lock is a POSIX record lock: it dies with its process, however that ends, forked children such as the workers of a
``DataLoader`` do not inherit it, and it works over NFS. Such a lock knows processes only, and a process loses it as
soon as it closes the file a second time; so the holders inside one process are kept here, and nothing else may open
``.lock``. The file may be deleted with its directory under a run that goes on: :meth:`DirectoryLock.check` notices.

A :class:`StoreLock` is what a checkpoint store gives to its writer: this lock, or its counterpart in an object store
(:mod:`stagereg.checkpoint.store.lease`). Reading needs neither.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from stagereg.errors import CheckpointError

__all__ = ["LOCK", "UNFIT", "DirectoryLock", "Owner", "StoreLock", "holder", "in_use", "ourselves"]

LOCK = ".lock"
_OWNER = ".lock.owner"
_PATIENCE_S = 3.0
_LOOK_S = 0.05
_COMMAND_LENGTH = 120
_OWNER_BYTES = 1 << 16
_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_log = logging.getLogger(__name__)
_guard = threading.Lock()
_held: dict[tuple[int, int], int] = {}
"""Device and inode of each lock file that is held here, and by which process: a forked child's copy means nothing."""
_warned: set[str] = set()
"""Directories whose file system has no locks; each is warned of once a process."""


class StoreLock(ABC):
    """A directory of checkpoints that this process may write to. A context manager, which releases it."""

    @abstractmethod
    def check(self) -> None:
        """Make sure that the directory is still held; to be called before each commit, on any thread.

        Raises:
            CheckpointError: another run has taken it over; the message names it. ``OSError``.
        """

    @abstractmethod
    def release(self) -> None:
        """Let others lock it. Twice is harmless."""

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class Owner:
    """Who holds a directory, as that process wrote it down; ``pid`` is 0 where that could not be read.

    Attributes:
        pid: its process.
        host: the name of its machine.
        since: seconds since the epoch.
        command: its command line, shortened.
    """

    pid: int
    host: str
    since: float
    command: str

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {began} ({self.command})"

    @classmethod
    def parse(cls, who: Mapping[str, Any]) -> Owner:
        """Parse what an owner has written down, fit to be printed. Raises: one of :data:`UNFIT`."""
        owner = cls(int(who["pid"]), _printable(who["host"]), float(who["since"]), _printable(who["command"]))
        str(owner)  # no date can be made of some numbers
        return owner


UNFIT = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What parsing an owner may raise, of a file that is not ours or half written."""
_NOBODY_KNOWN = Owner(0, "", 0.0, "")


def ourselves() -> Owner:
    """Return this process as an owner."""
    command = " ".join(sys.argv) or sys.executable
    short = command if len(command) <= _COMMAND_LENGTH else command[: _COMMAND_LENGTH - 1] + "…"
    return Owner(os.getpid(), socket.gethostname(), time.time(), short)


def in_use(root: str, owner: Owner) -> str:
    """Return the error message for a run that is refused the directory ``root``."""
    return (
        f"{root} is in use: another run writes checkpoints there, {owner}. Wait for its end, or give this run a "
        "directory of its own: checkpoint.dir=PATH."
    )


class DirectoryLock(StoreLock):
    """Holds a directory of a file system from its construction on, until :meth:`release` or its own end.

    Where the file system has no locks, one warning is logged, and only checkpointers of this process are kept out.

    Args:
        root: the directory, which must be there.
        patience: seconds to wait for an owner that is just ending; this process's own are not waited for.

    Raises:
        CheckpointError: another run holds it; the message names it. ``OSError``: no file can be made in it.
    """

    def __init__(self, root: str | os.PathLike[str], patience: float = _PATIENCE_S) -> None:
        self._root = os.fspath(root)
        self._taken = _take(self._root, patience)
        self._end = weakref.finalize(self, _give_back, self._taken)
        # The end of the process frees it; an earlier one might come before the last save.
        self._end.atexit = False

    def check(self) -> None:
        """See :class:`StoreLock`.

        A lock file that was deleted, or replaced by a process that has ended, is locked anew.
        """
        if not self._end.alive:
            raise CheckpointError(f"This run has let go of {self._root}; it may not write there any more.")
        with _guard:
            if self._taken.still_ours():
                return
            gone = not os.path.lexists(self._taken.path)
            self._taken.close()
        try:
            again = _take(self._root, 0.0)
        except _InUseError as refusal:
            raise CheckpointError(
                f"{self._root} was taken over while this run had it, by {refusal.owner}: something deleted "
                f"{self._taken.path}, or the directory. Two runs must not write there; end one of them."
            ) from None
        self._taken.replace(again)
        what = "was deleted" if gone else "was replaced"
        _log.warning("stagereg: %s %s while this run held it; it is held again.", self._taken.path, what)

    def release(self) -> None:
        """See :class:`StoreLock`."""
        self._end()


def holder(root: str | os.PathLike[str]) -> Owner | None:
    """Return who holds a local directory at this moment, or None; neither waits nor locks."""
    path = Path(root) / LOCK
    with _guard:
        if _held_here(path):
            return _read_owner(root)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            os.lockf(descriptor, os.F_TEST, 0)
        except OSError as error:
            return _read_owner(root) if error.errno in _TAKEN else None
        finally:
            os.close(descriptor)
    return None


class _InUseError(CheckpointError):
    def __init__(self, message: str, owner: Owner) -> None:
        super().__init__(message)
        self.owner = owner

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str]]:
        return CheckpointError, (str(self),)  # on its way to the other ranks


@dataclass
class _LockFile:
    """A lock file that is open, and locked where the file system can."""

    path: str
    descriptor: int
    identity: tuple[int, int]
    locked: bool
    process: int

    def still_ours(self) -> bool:
        if self.descriptor < 0 or _identity(self.path) != self.identity:
            return False
        if self.locked:
            try:
                # Nothing happens if it is held; it was lost if something in this process has closed the same file.
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno not in _TAKEN
        return True

    def replace(self, other: _LockFile) -> None:
        self.descriptor, self.identity, self.locked = other.descriptor, other.identity, other.locked

    def close(self) -> None:
        if self.descriptor >= 0:
            _held.pop(self.identity, None)
            os.close(self.descriptor)
            self.descriptor = -1


def _give_back(taken: _LockFile) -> None:
    if os.getpid() != taken.process:  # a forked child has the object too, and holds nothing
        return
    with _guard:
        if taken.still_ours():
            # Whoever waits with the old file open finds it gone and opens the new one.
            for path in (Path(taken.path).with_name(_OWNER), Path(taken.path)):
                with contextlib.suppress(OSError):
                    path.unlink()
        taken.close()


def _take(root: str, patience: float) -> _LockFile:
    deadline = time.monotonic() + patience
    path = Path(root) / LOCK
    collected = False
    while True:
        with _guard:
            ours = _held_here(path)
            taken = None if ours else _try(path)
            if taken is not None:
                _held[taken.identity] = os.getpid()
                _write_owner(root)
                return taken
        if ours and collected:
            raise _InUseError(
                f"{root} is in use by another Checkpointer of this process; close() that one before you construct "
                "another one for the same directory.",
                ourselves(),
            )
        if ours:
            collected = True
            gc.collect()  # an unreachable Checkpointer releases its lock
        elif time.monotonic() >= deadline:
            owner = _read_owner(root)
            raise _InUseError(in_use(root, owner), owner)
        else:
            threading.Event().wait(_LOOK_S)


def _try(path: Path) -> _LockFile | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        locked = _locked(descriptor, path)
        if locked is None:
            os.close(descriptor)
            return None
        found = os.fstat(descriptor)
        identity = found.st_dev, found.st_ino
        if _identity(path) == identity:
            return _LockFile(str(path), descriptor, identity, locked, os.getpid())
        os.close(descriptor)  # its owner has just deleted it


def _locked(descriptor: int, path: Path) -> bool | None:
    """Lock a file: None if another process has, False if the file system cannot."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return None
        if error.errno in _NO_LOCKS:
            _warn_no_locks(path.parent, error)
            return False
        os.close(descriptor)
        raise
    return True


def _held_here(path: str | os.PathLike[str]) -> bool:
    identity = _identity(path)
    return identity is not None and _held.get(identity) == os.getpid()


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _warn_no_locks(root: Path, error: OSError) -> None:
    if str(root) not in _warned:
        _warned.add(str(root))
        _log.warning(
            "stagereg: the file system of %s has no locks (%s): see to it that one run at a time writes there.",
            root,
            error.strerror,
        )


def _write_owner(root: str) -> None:
    path = Path(root) / _OWNER
    with contextlib.suppress(OSError):  # a full disk is found by who has to write
        path.unlink(missing_ok=True)  # it may be a link to somewhere else, or a pipe
        with path.open("x") as file:
            file.write(json.dumps(asdict(ourselves())))


def _read_owner(root: str | os.PathLike[str]) -> Owner:
    try:
        descriptor = os.open(Path(root) / _OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            return Owner.parse(json.loads(file.read(_OWNER_BYTES)))
    except UNFIT:
        return _NOBODY_KNOWN


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
