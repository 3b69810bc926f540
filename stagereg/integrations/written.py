"""Directories that an adapter writes for other programs: complete or absent. Only directories of ours are replaced.

``.written-by-stagereg`` in a directory says that it is ours. A link in the place of a directory is replaced itself.
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
    """Make a hidden directory beside ``final`` and return its path; delete what killed runs have left there.

    Raises:
        CheckpointError: ``final`` exists, and is not ours.
        OSError: the directory cannot be made.
    """
    _expect_own(final)
    folder, name = os.path.split(final)
    os.makedirs(folder or ".", exist_ok=True)
    for each in os.listdir(folder or "."):
        if temporary_of(each) == name:
            remove(os.path.join(folder, each))
    beside = temporary(final)
    os.mkdir(beside)
    _mark(beside)
    return beside


def commit(beside: str, final: str) -> None:
    """Give ``beside`` the name ``final``, and delete the directory that had that name. Raises as :func:`begin`."""
    _expect_own(final)
    _mark(beside)
    remove(os.fspath(exchange(Path(beside), Path(final))))


def exchange(beside: Path, path: Path) -> Path:
    """Give ``beside`` the name ``path``, if possible in one step; return the path of what had that name."""
    if not has("interop"):
        raise InstallationError(f"Replacing {path} {needs('interop')}")
    from stagereg.extensions.interop.exchange import exchange

    return exchange(beside, path)


def remove(path: str) -> None:
    """Delete a directory that is ours, or a link; leave anything else. Raises nothing."""
    if os.path.islink(path) or _is_own(path):
        discard(path)


def _expect_own(final: str) -> None:
    if os.path.lexists(final) and not os.path.islink(final) and not _is_own(final):
        raise CheckpointError(
            f"{final} exists, and stagereg did not write it, so it was not replaced: move it away, or save to another "
            "directory."
        )


def _is_own(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _MARK))


def _mark(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        write_new(os.path.join(path, _MARK), b"", flush=False)
