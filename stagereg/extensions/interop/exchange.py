"""Replace a file or directory with a new one, atomically if the file system supports that."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from stagereg.base.small_files import temporary, temporary_of

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def exchange(beside: Path, path: Path) -> Path:
    """Rename ``beside`` to ``path``, and return the path to which the old file or directory was moved. Deletes nothing.

    If no atomic exchange is possible, a process that is killed midway leaves the old file at an :func:`aside` path.
    """
    if not os.path.lexists(path):
        os.rename(beside, path)
        return beside
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(beside), os.fsencode(path)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return beside
    old = Path(aside(path))
    os.rename(path, old)
    try:
        os.rename(beside, path)
    except OSError:
        os.rename(old, path)
        raise
    return old


def aside(path: Path) -> str:
    """Return a path ``.NAME.TOKEN.old`` next to ``path``, with a random token. Creates no file."""
    return f"{temporary(path).removesuffix('tmp')}old"


def aside_of(name: str) -> str | None:
    """Return NAME if ``name`` has the form ``.NAME.TOKEN.old`` of :func:`aside`; otherwise return ``None``."""
    return temporary_of(f"{name.removesuffix('old')}tmp") if name.endswith(".old") else None
