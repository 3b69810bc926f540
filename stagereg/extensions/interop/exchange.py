"""Gives a new file or directory the name of an old one, in one step if the file system can."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from stagereg.base.small_files import temporary, temporary_of

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def exchange(beside: Path, path: Path) -> Path:
    """Give ``beside`` the name ``path``; return the new path of the former file, folder or link. Deletes nothing.

    In one step, or in two if the file system has none: killed between them, it is at :func:`aside`.
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
    """Return a name ``.NAME.TOKEN.old`` in the folder of ``path`` that cannot be foreseen; makes nothing."""
    return f"{temporary(path).removesuffix('tmp')}old"


def aside_of(name: str) -> str | None:
    """Return the name that :func:`aside` made ``name`` from, without its folder; ``None`` if it made no such name."""
    return temporary_of(f"{name.removesuffix('old')}tmp") if name.endswith(".old") else None
