"""Stores the parts of one run on one machine. A part is the set of files that one rank writes in one save.

The parts are written by the ranks of this machine, or copied from other machines. All processes of the run on this
machine use one folder, ``<dir>/<run>``. A part becomes complete when its manifest is atomically renamed into place. A
killed process leaves complete parts, and incomplete files that :meth:`sweep` deletes. Each save has a folder with a
unique token in its name, so a process that outlives a restart of its run cannot write to files of the new start.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shlex
import stat
from collections.abc import Collection, Iterator, Sequence
from typing import IO

import stagereg.base.small_files as small_files
from stagereg.base.machine import boot_id
from stagereg.base.option_text import option
from stagereg.base.small_files import UnfitFileError, discard, read_small, sync, warn_skipped, write_new
from stagereg.checkpoint.format.manifest import RUN, plain_name, step_of
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lock import LOCK
from stagereg.errors import CheckpointError
from stagereg.extensions.tiers.part import Part, SaveId, is_manifest, manifest_name

_log = logging.getLogger(__name__)

NOTE = RUN  # file with the lineage of a run: in the run's folder, and in the tier's folder or checkpoint directory
BOOT = ".boot"  # file with the machine's boot ID from the creation of the folder; written if a reboot voids the files
_COPIED = ".copied"  # suffix of a file next to a manifest; the file lists the machines that have copies of the part
_RECEIVED = ".received"  # suffix of an empty file next to a manifest; marks the part as a copy from another machine
_HIDDEN = re.compile(r"\.step-\d+\.\w+\.tmp")  # name of a save's folder while its files are deleted
_PRIVATE = 0o600
_MANIFEST_BYTES = 1 << 28  # maximum size of a part's manifest, which has about ten bytes for each block of 4 MiB


class MachineFolder:
    """The folder of one run on this machine, which stores parts. Methods raise ``OSError`` if an operation fails.

    Other users may be able to rename the folder, so each file is read only if this user owns the file. ``root``: the
    folder of the tier, which all runs share. ``run``: the ID of the run. ``durable``: whether files are flushed and
    survive a reboot. If not, saves from before a reboot are deleted.
    """

    def __init__(self, root: str, run: str, durable: bool) -> None:
        self.path, self._durable = f"{root}/{run}", durable

    def make(self, save: SaveId | None = None) -> None:
        """Create the folder of the run and, if given, of ``save``. Called before each save: users may delete folders.

        Raises: ``CheckpointError`` if another user owns the folder or may write to it.
        """
        make_private(self.path)
        if not self._durable and not os.path.lexists(f"{self.path}/{BOOT}"):
            self._replace(self.path, BOOT, boot_id())
        if save is not None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.directory(save), 0o700)

    def prepare(self) -> None:
        """Create the folder of the run, and delete saves that a reboot has made invalid. Raises like :meth:`make`."""
        make_private(self.path)
        since = read_own(f"{self.path}/{BOOT}").decode(errors="replace")
        if not self._durable and since != boot_id():
            if since:
                _log.warning("stagereg: Deleted the steps in %s: they were saved before a reboot.", self.path)
                os.unlink(f"{self.path}/{BOOT}")
            self.delete((), keep=True)
        self.make()

    def directory(self, save: SaveId) -> str:
        """Return the full path of the folder of a save, without creating it."""
        return f"{self.path}/{save.folder}"

    def parts(self) -> list[Part]:
        """Return the complete parts, the latest first. A part is complete if all its files have the expected sizes."""
        found = [part for name in self._saves() for part in _parts_in(f"{self.path}/{name}")]
        return sorted(found, key=lambda each: (each.save.order, -each.rank), reverse=True)

    def find(self, save: SaveId, rank: int) -> Part | None:
        """Return the part of a rank in a save; ``None`` if the part is missing or incomplete on this machine."""
        return _complete_part(self.directory(save), manifest_name(rank))

    def complete(self, part: Part, received: bool = False) -> None:
        """Commit a part with files in :meth:`directory`. ``received``: whether another machine sent the part."""
        folder = self.directory(part.save)
        if received:
            with contextlib.suppress(FileExistsError):
                write_new(f"{folder}/{manifest_name(part.rank)}{_RECEIVED}", b"", _PRIVATE, flush=False)
        self._replace(folder, manifest_name(part.rank), part.dumps())
        if self._durable:
            sync(self.path)
        failpoint("part")

    def note_copied(self, part: Part, machines: Sequence[str]) -> None:
        """Record which ``machines`` have acknowledged their copies of this part. Replaces the previous record."""
        self._replace(self.directory(part.save), manifest_name(part.rank) + _COPIED, "\n".join(machines))

    def delete(self, saves: Collection[str], keep: bool = False) -> None:
        """Delete the saves with these folder names; with ``keep``, delete all other saves instead. Does not raise."""
        with contextlib.suppress(OSError):
            for name in self._saves():
                if (name in saves) != keep:
                    gone = f"{self.path}/.{name}.tmp"  # the rename removes all parts of the save atomically
                    with contextlib.suppress(OSError):
                        os.rename(f"{self.path}/{name}", gone)
                    discard(gone)

    def drop(self, save: SaveId, ranks: Collection[int]) -> None:
        """Delete the parts of ``ranks`` in a save, because these parts are corrupt."""
        for part in (self.find(save, rank) for rank in ranks):
            for name in () if part is None else (manifest_name(part.rank), *part.files):
                discard(f"{self.directory(save)}/{name}")

    def sweep(self) -> None:
        """Delete the incomplete files of dead processes. The caller must hold the lock of the folder."""
        for name in os.listdir(self.path):
            if _HIDDEN.fullmatch(name) or small_files.temporary_of(name) in (NOTE, BOOT):
                discard(f"{self.path}/{name}")
        for folder in [f"{self.path}/{name}" for name in self._saves()]:
            parts = [*_parts_in(folder)]
            known = {manifest_name(each.rank) + more for each in parts for more in ("", _COPIED, _RECEIVED)}
            known |= {name for each in parts for name in each.files}
            for name in os.listdir(folder):
                if name not in known:
                    discard(f"{folder}/{name}")
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def remove(self) -> None:
        """Delete all saves and records of the run, then its folder if empty. The caller must hold the folder's lock."""
        self.delete((), keep=True)
        for name in (LOCK, NOTE, BOOT):
            discard(f"{self.path}/{name}")
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _saves(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as found:
            return [each.name for each in found if _is_save(each.name) and each.is_dir(follow_symlinks=False)]
        return []

    def _replace(self, folder: str, name: str, text: str) -> None:
        small_files.replace_small(f"{folder}/{name}", text.encode(), _PRIVATE, self._durable)


def make_private(path: str) -> None:
    """Create a folder that only this user may write to, if it does not exist.

    Raises:
        CheckpointError: the path is a link, belongs to another user, or other users may write to it.
        OSError: the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    found = os.lstat(path)
    cure = "Delete it"
    if not stat.S_ISDIR(found.st_mode):
        why = "is a link or not a folder"
    elif found.st_uid != os.geteuid():
        why = f"belongs to another user (uid {found.st_uid})"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"is writable by other users (mode {stat.S_IMODE(found.st_mode):04o})"
        cure = f"If you trust its files, run `chmod go-w {shlex.quote(path)}`"
    else:
        return
    other = option("tier.dir", "PATH")
    raise CheckpointError(f"{path} {why}, so its files may be forged. {cure}, or use another folder: {other}.")


def read_own(path: str) -> bytes:
    """Return the content of a file that this user owns; empty if no file exists. Raises like :func:`.read_small`."""
    with contextlib.suppress(FileNotFoundError):
        return read_small(path, owner=os.geteuid())
    return b""


def open_own(path: str) -> IO[bytes]:
    """Open a file that this user owns for reading. Raises the errors of :func:`.open_regular`."""
    return open(path, "rb", buffering=0, opener=functools.partial(small_files.open_regular, owner=os.geteuid()))


def read_or_skip(path: str) -> bytes:
    """Return the content of a small file, which any user may own; empty, if needed with a warning, if unreadable."""
    try:
        return read_small(path)
    except UnfitFileError as error:
        warn_skipped(path, error)
    except OSError:
        pass
    return b""


def read_part(folder: str, name: str, owner: int | None = None) -> Part:
    """Read the manifest of a part. If the user ID ``owner`` is given, that user must own the file.

    Raises: the errors of :func:`.read_small`; ``ValueError`` if the manifest is invalid or is not of this part.
    """
    part = Part.loads(read_small(f"{folder}/{name}", _MANIFEST_BYTES, owner))
    if part.save.folder != os.path.basename(folder) or manifest_name(part.rank) != name:
        raise ValueError("the manifest belongs to another save or another rank")
    return part


def _parts_in(folder: str) -> Iterator[Part]:
    with contextlib.suppress(FileNotFoundError):
        for name in filter(names_part, os.listdir(folder)):
            if (part := _complete_part(folder, name)) is not None:
                yield part


def _complete_part(folder: str, name: str) -> Part | None:
    try:
        part = read_part(folder, name, os.geteuid())
        for file, known in part.files.items():
            found = os.lstat(f"{folder}/{file}")
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ValueError(f"{file} is not a regular file of this user")
            if found.st_size != known.nbytes:
                raise ValueError(f"{file}: expected {known.nbytes} bytes, got {found.st_size}")
        return part
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("stagereg: Skipped %s/%s: %s", folder, name, error)
        return None


def _is_save(name: str) -> bool:
    """Return whether a folder name is the name of a save: a step followed by a token."""
    return step_of(name) is not None and name != plain_name(name)


def names_part(name: str) -> bool:
    """Return whether a file name is the name of a part's manifest. The manifest itself may be corrupt."""
    return is_manifest(name) and not name.startswith(".") and not name.endswith((_COPIED, _RECEIVED))


def notes_of_part(folder: str, name: str) -> tuple[tuple[str, ...], bool]:
    """Return the machines that have a copy of the part with this manifest, and whether the part itself is a copy."""
    copied = ""
    with contextlib.suppress(UnicodeDecodeError):
        copied = read_or_skip(f"{folder}/{name}{_COPIED}").decode()
    return tuple(copied.split("\n")) if copied else (), os.path.exists(f"{folder}/{name}{_RECEIVED}")
