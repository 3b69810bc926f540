"""Small files in directories that others may have made or may write to: notes, manifests, pointers, results.

Reading never waits and never follows a link. Writing creates a file under a name that nobody can foresee, and renames
it. Only what has such a name is ever deleted as a leftover. This module imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat

MOST_BYTES = 1 << 24  # of a note
_OURS = re.compile(r"\.(?P<of>.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_small(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: it is a link, a pipe, a device or a directory; it has more bytes; or it cannot be read.
    """
    _expect_regular(path, os.lstat(path).st_mode)  # opening a device may do something
    descriptor = os.open(path, _READ)
    with open(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        _expect_regular(path, found.st_mode)
        if found.st_size <= most:
            data = bytearray()
            while len(data) <= most and (block := file.read(min(1 << 20, most + 1 - len(data)))):
                data += block
            if len(data) <= most:
                return bytes(data)
    raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))


def write_new(path: str | os.PathLike[str], data: bytes, mode: int = 0o666, flush: bool = True) -> None:
    """Write a file that is not there yet, and have it safely on the disk with ``flush``.

    Raises:
        FileExistsError: something has that name, a link to nothing too.
        OSError: it could not be written; what was written is deleted.
    """
    with open(os.open(path, _NEW, mode), "wb", buffering=0) as file:
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if flush:
                os.fsync(file.fileno())
        except BaseException:
            discard(os.fspath(path))
            raise


def replace_small(path: str | os.PathLike[str], data: bytes, mode: int = 0o666, flush: bool = True) -> None:
    """Write a file and give it the name ``path`` in one step; what had that name goes, a link itself. Raises OSError.

    With ``flush`` the file and its name are safely on the disk.
    """
    beside = temporary(path)
    write_new(beside, data, mode, flush)
    try:
        os.replace(beside, path)
    except BaseException:
        discard(beside)
        raise
    if flush:
        sync(os.path.dirname(beside))


def temporary(path: str | os.PathLike[str]) -> str:
    """Return a name that nobody can foresee, in the folder of ``path``; makes nothing."""
    folder, name = os.path.split(os.path.abspath(path))
    return f"{folder}/.{name}.{secrets.token_hex(6)}.tmp"


def temporary_of(name: str) -> str | None:
    """Return of what a name is the :func:`temporary` one, without its folder; ``None`` if it is not ours."""
    found = _OURS.fullmatch(name)
    return None if found is None else found["of"]


def sync(path: str | os.PathLike[str]) -> None:
    """Have a file or a directory safely on the disk. Raises: ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: str) -> None:
    """Delete a file or a directory, as far as that can be; a link is not followed. Raises nothing."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _expect_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
