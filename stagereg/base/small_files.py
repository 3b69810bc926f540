"""Small files in directories to which other users may write: records, manifests, pointers, results.

Reading never blocks and never follows a link. Writing creates a file with an unpredictable temporary name, then renames
the file. Only temporary files of killed processes are deleted. This module imports no other module of the project.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import shutil
import stat

MOST_BYTES = 1 << 24  # largest small file in bytes
_OURS = re.compile(r"\.(?P<of>.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_log = logging.getLogger(__name__)


class UnfitFileError(OSError):
    """Raised for a file that stagereg does not read: it is not regular, is too large, or belongs to another user."""


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, owner: int | None = None, mode: int = 0o666
) -> int:
    """Open a regular file and return its descriptor. Never blocks, and never follows a link.

    Args:
        path: the file; with ``O_CREAT`` in ``flags`` it need not exist.
        flags: flags for ``os.open``.
        owner: the ID of the user who must own the file; ``None`` for any user.
        mode: permissions of a new file, before the umask.

    Raises:
        FileNotFoundError: The file does not exist.
        UnfitFileError: The path is a link, a pipe, a device or a directory, or another user owns it.
        OSError: The file cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError) if flags & os.O_CREAT else contextlib.nullcontext():
        _expect_regular(path, os.lstat(path))  # opening a device may have side effects
    descriptor = open_or_make(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        _expect_regular(path, os.fstat(descriptor), owner)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_or_make(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file with ``os.open`` without following links; with ``O_CREAT``, also a file that another user created.

    In a sticky directory to which others may write, Linux rejects ``O_CREAT`` for such a file even for root and for
    users who may write to the file (``fs.protected_regular``), but opens it without that flag.
    """
    flags |= os.O_NOFOLLOW
    while flags & os.O_CREAT:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags & ~os.O_CREAT)
        with contextlib.suppress(FileExistsError):  # another process has just created the file
            return os.open(path, flags | os.O_EXCL, mode)
    return os.open(path, flags)


def read_small(path: str | os.PathLike[str], most: int = MOST_BYTES, owner: int | None = None) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. Raises the errors of :func:`open_regular`."""
    with open(path, "rb", buffering=0, opener=functools.partial(open_regular, owner=owner)) as file:
        if os.fstat(file.fileno()).st_size <= most:
            data = bytearray()
            while len(data) <= most and (block := file.read(min(1 << 20, most + 1 - len(data)))):
                data += block
            if len(data) <= most:
                return bytes(data)
    raise UnfitFileError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))


def warn_skipped(path: str, error: UnfitFileError) -> None:
    """Log that a small file is skipped, and why. Logs the same file and reason only once per process."""
    _warn_skipped(path, error.strerror)


@functools.cache  # the key is a string, because a cached exception would keep its traceback alive
def _warn_skipped(path: str, why: str) -> None:
    _log.warning("stagereg: skipped %s: %s. Delete it or move it away.", path, why)


def write_new(path: str | os.PathLike[str], data: bytes, mode: int = 0o666, flush: bool = True) -> None:
    """Write a new file; with ``flush``, also flush it to the disk.

    Raises: ``FileExistsError`` if the path exists or is a dangling link. After another ``OSError``, no file is left.
    """
    with open(path, "wb", buffering=0, opener=lambda path, _: os.open(path, _NEW, mode)) as file:
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if flush:
                os.fsync(file.fileno())
        except BaseException:
            _unlink(path)
            raise


def replace_small(path: str | os.PathLike[str], data: bytes, mode: int = 0o666, flush: bool = True) -> None:
    """Replace ``path`` atomically with a new file; a link is replaced, not followed.

    With ``flush``, also flush the file and its directory entry to the disk. If a step fails, ``OSError`` is raised.
    """
    beside = temporary(path)
    write_new(beside, data, mode, flush)
    try:
        os.replace(beside, path)
    except BaseException:
        _unlink(beside)
        raise
    if flush:
        sync(os.path.dirname(beside) or ".")


def temporary(path: str | os.PathLike[str]) -> str:
    """Return a temporary path ``.NAME.TOKEN.tmp`` next to ``path``, with a random token. Creates no file."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{secrets.token_hex(6)}.tmp")


def temporary_of(name: str) -> str | None:
    """Return NAME if ``name`` has the form ``.NAME.TOKEN.tmp`` of :func:`temporary`; otherwise return ``None``."""
    found = _OURS.fullmatch(name)
    return None if found is None else found["of"]


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file or a directory to the disk. Raises ``OSError`` if that fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: str) -> None:
    """Delete a file or a directory as far as possible, without following links. Never raises."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        _unlink(path)


def _unlink(path: str | os.PathLike[str]) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _expect_regular(path: str | os.PathLike[str], found: os.stat_result, owner: int | None = None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    if owner not in (None, found.st_uid):
        raise UnfitFileError(errno.EPERM, f"it belongs to another user (uid {found.st_uid})", os.fspath(path))
