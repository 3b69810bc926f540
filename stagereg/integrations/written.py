"""Writes a directory atomically, for example an exported model: the directory is either complete or absent.

An existing directory is replaced only if it contains the file ``.written-by-stagereg``. A symbolic link is replaced.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stagereg.base.providers import has, needs
from stagereg.base.small_files import discard, temporary, temporary_of, write_new
from stagereg.errors import CheckpointError, InstallationError

_MARK = ".written-by-stagereg"


def begin(final: str) -> str:
    """Create a hidden directory next to ``final`` and return its path. Delete hidden directories of killed runs.

    Raises:
        CheckpointError: ``final`` exists and was not written by stagereg.
        OSError: the hidden directory cannot be created.
    """
    _expect_own(final)
    folder, name = os.path.split(final)
    os.makedirs(folder or ".", exist_ok=True)
    for each in os.listdir(folder or "."):
        if temporary_of(each) == name:
            remove(os.path.join(folder, each))
    hidden = temporary(final)
    os.mkdir(hidden)
    _mark(hidden)
    return hidden


def commit(hidden: str, final: str) -> None:
    """Replace ``final`` by ``hidden``, and delete the old directory. Raises the errors of :func:`begin`."""
    _expect_own(final)
    _mark(hidden)
    remove(os.fspath(exchange(Path(hidden), Path(final))))


def exchange(hidden: Path, path: Path) -> Path:
    """Rename ``hidden`` to ``path``, atomically if possible. Return the path to which an old ``path`` was moved."""
    if not has("interop"):
        raise InstallationError(f"Replacing {path} {needs('interop')}")
    from stagereg.extensions.interop.exchange import exchange

    return exchange(hidden, path)


def remove(path: str) -> None:
    """Delete ``path`` if it is a link or a directory that stagereg wrote. Ignores errors."""
    if os.path.islink(path) or _is_own(path):
        discard(path)


def _expect_own(final: str) -> None:
    if os.path.lexists(final) and not os.path.islink(final) and not _is_own(final):
        raise CheckpointError(
            f"{final} exists and was not written by stagereg, so it was not replaced. Move it away, or save to another "
            "directory."
        )


def _is_own(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _MARK))


def _mark(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        write_new(os.path.join(path, _MARK), b"", flush=False)
