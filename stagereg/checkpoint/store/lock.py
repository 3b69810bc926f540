"""The lock of a checkpoint directory, which ensures that only one run at a time writes there.

The run locks the file ``.lock`` with ``fcntl.lockf``, and writes the owner of the lock into the file. The kernel
releases such a POSIX record lock when the process ends. Forked children do not inherit the lock, and it works across
machines, on NFS and on cluster file systems. ``flock`` works only within one machine on some of these, such as GPFS.
A process loses a POSIX lock when it closes any descriptor of the file, so no other code may open ``.lock``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import json
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stagereg.base.option_text import option
from stagereg.base.small_files import open_or_make
from stagereg.errors import CheckpointError

LOCK = ".lock"
LOCK_TIMEOUT_S = 3.0  # seconds to wait for an owner that is terminating

_COMMAND_LENGTH = 120
_OWNER_BYTES = 1 << 16
_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # do not follow links, do not block on a named pipe

_log = logging.getLogger(__name__)
_held: dict[str, Owner] = {}  # locks that this process holds or is acquiring, by real path or URL


@dataclass(frozen=True)
class Owner:
    """The owner of a directory lock, as recorded in the lock file.

    ``pid``: the process ID; 0 if unknown. ``host``: the host name of the machine. ``since``: the time of locking, in
    seconds since the epoch. ``command``: the command line, shortened.
    """

    pid: int = 0
    host: str = ""
    since: float = 0.0
    command: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.process}, since {began} ({self.command})"

    @property
    def process(self) -> str:
        """The process ID and the host, for messages."""
        return f"process {self.pid} on {self.host}"

    @classmethod
    def ourselves(cls) -> Owner:
        shown = (command := " ".join(sys.argv))[:_COMMAND_LENGTH] + "..." * (len(command) > _COMMAND_LENGTH)
        return cls(os.getpid(), socket.gethostname(), time.time(), shown)

    @classmethod
    def parse(cls, who: Mapping[str, Any]) -> Owner:
        """Parse the record in a lock file. Any exception may be raised if the record is invalid or partly written."""
        host, command = (text if text.isprintable() else ascii(text) for text in (who["host"], who["command"]))
        owner = cls(int(who["pid"]), host, float(who["since"]), command)
        str(owner)  # raises if ``since`` is not a valid time
        return owner


class StoreLock(contextlib.AbstractContextManager["StoreLock"]):
    """The lock of a checkpoint directory. The constructor acquires the lock.

    Garbage collection releases the lock. Interpreter shutdown does not, because the last save may finish later. If the
    file system does not support locks, a warning is logged, and only Checkpointers in this process exclude each other.

    Raises: ``OSError``; ``CheckpointError`` if another run still holds the lock after ``patience`` seconds.
    """

    _look_s = 0.05
    _process = 0  # ID of the process that holds the lock; forked children do not hold it

    def __init__(self, root: str | os.PathLike[str], patience: float = LOCK_TIMEOUT_S) -> None:
        self.root, self._key, mine = os.fspath(root), _key(root), Owner.ourselves()
        self._path, self._descriptor = f"{self.root}/{LOCK}", -1
        if _held.setdefault(self._key, mine) is not mine:
            gc.collect()  # an unreachable Checkpointer releases its lock
        if _held.setdefault(self._key, mine) is not mine:
            text = f"{self.root} is in use by another Checkpointer of this process. Close it first.{self._to_read}"
            raise CheckpointError(text)
        began = time.monotonic()
        try:
            while not self._take(waited := time.monotonic() - began):
                if waited >= patience:
                    raise self._refused(self._other())
                time.sleep(self._look_s)
        except BaseException:
            del _held[self._key]
            raise
        self._process = os.getpid()

    @property
    def held(self) -> bool:
        """Whether this process has not released the lock."""
        return bool(self._process)

    def check(self) -> None:
        """Raise ``CheckpointError`` if this run has lost the lock, ``OSError`` if that is unknown. Thread-safe."""
        if not self._process:
            raise CheckpointError(f"This run has released the lock of {self.root}, so it must not write there.")
        if self._is_ours():
            return
        if not self._make():
            raise CheckpointError(
                f"{self._other()} has taken the lock of {self.root} from this run: {LOCK} was deleted, or not renewed "
                "in time. Two runs must not write there: stop one of them."
            )
        _log.warning("stagereg: %s/%s was deleted while this run held the lock. It is locked again.", self.root, LOCK)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._process == os.getpid():
            self._process = 0
            try:
                self._release()
            finally:
                del _held[self._key]

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self, at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be cleared
        if not at_the_end():
            self.release()

    def _take(self, waited: float) -> bool:
        """Try to acquire the lock. Raises an error if retries cannot help. ``waited``: seconds since the first try."""
        return self._make()

    def _make(self) -> bool:
        """Acquire the lock; return False if another process holds the lock or has just deleted the file."""
        self._close()
        try:
            self._descriptor = open_or_make(self._path, os.O_RDWR | os.O_CREAT | _FLAGS)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            text = f"Cannot lock {self._path}: it is not a regular file. Delete it or move it away."
            raise CheckpointError(text) from error
        ours = False
        try:
            ours = self._is_ours()
            if ours and os.fstat(self._descriptor).st_nlink > 1:  # writing would change a hard-linked file
                os.unlink(self._path)
                return self._make()
        finally:
            if not ours:
                self._close()
        if ours:
            self._share()
            with contextlib.suppress(OSError):  # a full disk fails the save later
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, json.dumps(asdict(Owner.ourselves())).encode(), 0)
        return ours

    def _share(self) -> None:
        """Make the lock file writable for other users of the directory, because a killed run leaves the file there."""
        with contextlib.suppress(OSError):  # another user owns the file, or the file system has no modes
            folder, found = os.stat(self.root), os.fstat(self._descriptor)
            group = stat.S_IWGRP if found.st_gid == folder.st_gid else 0
            may = 0 if folder.st_mode & stat.S_ISVTX else folder.st_mode & (group | stat.S_IWOTH)
            mode = stat.S_IMODE(found.st_mode)
            if wider := (mode & 0o044) >> 1 & may & ~mode:
                os.fchmod(self._descriptor, mode | wider)

    def _is_ours(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            # If this process holds the lock, the call has no effect. If it has lost the lock, the call locks again.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            _warn_no_locks(self.root, error.strerror)
        return _is_at(self._descriptor, self._path)

    def _other(self) -> Owner:
        return _other(self._path) or Owner()

    def _release(self) -> None:
        if _is_at(self._descriptor, self._path):
            # Delete before unlocking: a waiting process that has this file open then detects the deletion.
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1  # another file may get the same descriptor

    @property
    def _to_read(self) -> str:
        return f" To only read there, use stagereg.open_checkpoint({self.root!r})."

    def _refused(self, owner: Owner) -> CheckpointError:
        return CheckpointError(
            f"{self.root} is in use: another run writes checkpoints there, {owner}. Wait until that run ends, or give "
            f"this run its own directory: {option('checkpoint.dir', 'PATH')}.{self._to_read}"
        )


def holder(root: str | os.PathLike[str]) -> Owner | None:
    """Return the owner of a local directory's lock, or ``None`` if no run holds it. Returns immediately."""
    return _held.get(_key(root)) or _other(os.path.join(root, LOCK))


def _other(path: str) -> Owner | None:
    """Return the process that holds the lock on the file, or ``None``. This process must not have the file open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return None
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except OSError as error:
        return _read_owner(descriptor) if error.errno in _TAKEN else None
    finally:
        os.close(descriptor)
    return None


@functools.cache  # one warning per process and argument
def _warn_no_locks(root: str, why: str) -> None:
    text = "stagereg: the file system of %s does not support locks (%s). Let only one run at a time write there."
    _log.warning(text, root, why)


def _key(root: str | os.PathLike[str]) -> str:
    return os.fspath(root) if "://" in os.fspath(root) else os.path.realpath(root)


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether ``path`` still names the open file, which may have been deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _read_owner(descriptor: int) -> Owner:
    try:
        return Owner.parse(json.loads(os.pread(descriptor, _OWNER_BYTES, 0)))
    except Exception:
        return Owner()
