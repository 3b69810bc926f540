"""The parts of one run that lie on one machine: those that its own ranks wrote, and copies of other machines'.

All processes of the run on this machine use the same folder, ``<dir>/<run>``. A part is written beside and becomes
complete with its manifest, in one step, so a process that dies leaves complete parts and what :meth:`sweep` removes.
A save has a folder of its own, by its token: nothing is overwritten, and a process that still writes although its run
has been started again writes where nobody looks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from stagereg.checkpoint.format.manifest import step_of
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.lock import LOCK
from stagereg.checkpoint.tiers.part import Part, SaveId, is_manifest, manifest_name
from stagereg.machine import boot_id
from stagereg.small_files import discard, sync

_log = logging.getLogger(__name__)

NOTE = ".run.json"  # the run's id and branches, in the folder of the run, in that of the tier, and in the store
BOOT = ".boot"  # notes since which boot the folder of a run is there, where files do not outlive one
_COPIED = ".copied"
_RECEIVED = ".received"


class MachineFolder:
    """Those of one run. Errors are ``OSError``.

    Args:
        root: the folder of the tier, for all runs.
        run: the run's id.
        durable: whether files are flushed, and so outlive a reboot; else what is from before one is void.
    """

    def __init__(self, root: str, run: str, durable: bool) -> None:
        self.path, self._durable = f"{root}/{run}", durable

    def make(self) -> None:
        """Make the folder, also where somebody has deleted it under a run that goes on."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        if not self._durable and not (noted := Path(self.path, BOOT)).exists():
            noted.write_text(boot_id())

    def prepare(self) -> None:
        """Make the folder; delete what a reboot has made void."""
        noted, since = Path(self.path, BOOT), ""
        with contextlib.suppress(FileNotFoundError):
            since = noted.read_text()
        if not self._durable and since != boot_id():
            if since:
                _log.warning("stagereg: %s is from before a reboot, and what was in memory then is void.", self.path)
                noted.unlink()
            self.delete((), keep=True)
        self.make()

    def directory(self, save: SaveId) -> str:
        """Return the full path of the folder of a save; makes nothing."""
        return f"{self.path}/{save.folder}"

    def parts(self) -> list[Part]:
        """Return the complete parts, the latest first: all files are there, and have their sizes."""
        found = [part for name in self._saves() for part in _parts_in(f"{self.path}/{name}")]
        return sorted(found, key=lambda each: (each.save.order, -each.rank), reverse=True)

    def find(self, save: SaveId, rank: int) -> Part | None:
        """Return the part of a rank in a save, if it is here and complete."""
        return _complete_part(self.directory(save), manifest_name(rank))

    def complete(self, part: Part, received: bool = False) -> None:
        """Make a part complete whose files are in :meth:`directory`, each flushed if this is durable."""
        folder = self.directory(part.save)
        if received:
            Path(folder, manifest_name(part.rank) + _RECEIVED).touch()
        self._replace(folder, manifest_name(part.rank), part.dumps())
        if self._durable:
            sync(Path(self.path))
        failpoint("part")

    def note_copied(self, part: Part, machines: Sequence[str]) -> None:
        """Note which machines have acknowledged a copy of an own part; the last call holds."""
        self._replace(self.directory(part.save), manifest_name(part.rank) + _COPIED, "\n".join(machines))

    def delete(self, saves: Collection[str], keep: bool = False) -> None:
        """Delete the folders of these saves, by :attr:`.SaveId.folder`; with ``keep`` all others. Raises nothing."""
        with contextlib.suppress(OSError):
            for name in self._saves():
                if (name in saves) != keep:
                    gone = f"{self.path}/.{name}.tmp"  # in one step no part of it is complete any more
                    with contextlib.suppress(OSError):
                        os.rename(f"{self.path}/{name}", gone)
                    shutil.rmtree(gone, ignore_errors=True)

    def drop(self, save: SaveId, ranks: Collection[int]) -> None:
        """Delete the parts of these ranks in a save: they are not what was staged."""
        for part in (self.find(save, rank) for rank in ranks):
            for name in () if part is None else (manifest_name(part.rank), *part.files):
                discard(f"{self.directory(save)}/{name}")

    def sweep(self) -> None:
        """Delete what dead processes have left half-written. For the process that holds the folder's lock."""
        for entry in [*os.scandir(self.path)]:
            if entry.name in (LOCK, NOTE, BOOT):
                continue
            if step_of(entry.name) is None:
                discard(entry.path)
                continue
            parts = [*_parts_in(entry.path)]
            known = {manifest_name(each.rank) + more for each in parts for more in ("", _COPIED, _RECEIVED)}
            known |= {name for each in parts for name in each.files}
            for name in os.listdir(entry.path):
                if name not in known:
                    discard(f"{entry.path}/{name}")
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)

    def remove(self) -> None:
        """Delete all of it, also what is noted, once nobody holds the lock."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _saves(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return [name for name in os.listdir(self.path) if step_of(name) is not None]
        return []

    def _replace(self, folder: str, name: str, text: str) -> None:
        beside = Path(folder, f".{name}.{secrets.token_hex(4)}.tmp")  # two senders may complete one part
        beside.write_text(text)
        if self._durable:
            sync(beside)
        os.replace(beside, f"{folder}/{name}")
        if self._durable:
            sync(Path(folder))


def read_part(folder: str, name: str) -> Part:
    """Read the manifest of a part. Raises ``ValueError`` if it is invalid or has another save or rank; ``OSError``."""
    part = Part.loads(Path(folder, name).read_bytes())
    if part.save.folder != os.path.basename(folder) or manifest_name(part.rank) != name:
        raise ValueError("it is of another save or rank")
    return part


def _parts_in(folder: str) -> Iterator[Part]:
    with contextlib.suppress(FileNotFoundError):
        for name in filter(names_part, os.listdir(folder)):
            if (part := _complete_part(folder, name)) is not None:
                yield part


def _complete_part(folder: str, name: str) -> Part | None:
    try:
        part = read_part(folder, name)
        for file, known in part.files.items():
            if (size := os.lstat(f"{folder}/{file}").st_size) != known.nbytes:
                raise ValueError(f"{file} has {size} of {known.nbytes} bytes")
        return part
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("stagereg: %s/%s is passed over: %s", folder, name, error)
        return None


def names_part(name: str) -> bool:
    """Whether a file is the manifest of a part, complete or damaged."""
    return is_manifest(name) and not name.startswith(".") and not name.endswith((_COPIED, _RECEIVED))


def notes_of_part(folder: str, name: str) -> tuple[tuple[str, ...], bool]:
    """Return what is noted of the part with this manifest: where its copies are, and whether it is one."""
    copied = ""
    with contextlib.suppress(OSError, ValueError):
        copied = Path(folder, name + _COPIED).read_text()
    return tuple(copied.split("\n")) if copied else (), os.path.exists(f"{folder}/{name}{_RECEIVED}")
