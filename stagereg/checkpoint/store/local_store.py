"""A directory of a file system: a checkpoint is committed by renaming its directory.

::

    runs/gpt/
        step-00000100/                 a complete checkpoint
        latest -> step-00000100        relative symbolic link to the checkpoint committed last
        .step-00000200.<token>.tmp/    being written; never looked at by readers, swept at the next start

The order makes every moment safe to be killed in: the files lie in a hidden sibling directory and are flushed; the
manifest is written and flushed; sizes are checked; the directory is renamed to its final name and the parent flushed;
``latest`` moves by one atomic replacement; only then are old checkpoints deleted. Nothing is overwritten in place.
Where the step has a directory already, the two change names in one atomic exchange (``renameat2``); a file system that
cannot exchange gets two renames with the old one set aside, and :meth:`LocalStore.sweep` puts it back if the process
died between them.

Reading follows no link: a file of a checkpoint is a regular file inside its directory, or there is no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
from pathlib import Path

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.damage import Condition, Found, Unclear, of_error
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.lock import DirectoryLock, Owner, StoreLock, holder
from stagereg.checkpoint.manifest import LATEST, MANIFEST, FileMark, Manifest, file_mark, new_token, step_name, step_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore, look, nothing_known
from stagereg.errors import CheckpointError

__all__ = ["LocalStore", "mark_file"]

_LEFTOVER = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")
_ASIDE = re.compile(r"\.(?P<name>step-\d+)\.[0-9a-f]+\.old")
_AT_CWD, _EXCHANGE = -100, 2


class LocalStore(CheckpointStore):
    """A directory of this machine's file systems, shared ones included.

    Args:
        root: its path; a relative one is of the current directory, ``~`` is the user's.
    """

    remote = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(str(Path(os.path.expanduser(root)).absolute()))
        self._latest = Path(self.root) / LATEST
        self._new_latest = self._latest.with_name(f".{LATEST}.tmp")

    def condition(self, path: str) -> Condition:
        """See :class:`.CheckpointStore`. The checkpoint's path is that of the directory itself, without links."""
        try:
            there = Path(path).resolve()
            found = _condition(there)
            moved = found.damages and Path(path).resolve() != there  # a run has moved `latest` meanwhile
            return self.condition(path) if moved else found
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
            return nothing_known(path, Unclear(f"cannot be looked at ({error})"))

    def holder(self) -> Owner | None:
        return holder(self.root)

    def leftovers(self) -> list[str]:
        try:
            return sorted(f"{self.root}/{name}" for name in os.listdir(self.root) if _LEFTOVER.fullmatch(name))
        except OSError:
            return []

    def _conditions(self) -> list[Condition]:
        while True:
            found = [_condition(path) for path in self._steps()]
            damaged = {each.path for each in found if each.damages}
            if not damaged or damaged <= set(map(str, self._steps())):
                return found  # or else a run has deleted one since they were listed, and a newer one may be there

    def _steps(self) -> list[Path]:
        try:
            with os.scandir(self.root) as entries:  # which knows what a directory is without another look
                return [Path(entry.path) for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):  # anything else must not look like an empty store
            return []

    def _pointed(self) -> str | None:
        return os.readlink(self._latest) if self._latest.is_symlink() else None

    def _read_mark(self, path: str, name: str) -> Found:
        file = Path(path) / name
        found = _size(file)
        return mark_file(file) if isinstance(found, int) else found

    # -- writing

    def lock(self) -> StoreLock:
        os.makedirs(self.root, exist_ok=True)
        self._hold = DirectoryLock(self.root)
        return self._hold

    def sweep(self) -> None:
        """See :class:`.CheckpointStore`. What was set aside goes back, or is deleted if what has its name is good."""
        for found in filter(None, map(_ASIDE.fullmatch, os.listdir(self.root))):
            aside, final = Path(self.root) / found[0], Path(self.root) / found["name"]
            there = _condition(final)
            if not os.path.lexists(final) or (there.damages and there.certain and not _condition(aside).damages):
                self.discard(str(final))
                aside.rename(final)
            elif not there.damages:
                self.discard(str(aside))
        self._new_latest.unlink(missing_ok=True)
        super().sweep()

    def temporary(self, step: int, token: str) -> str:
        return f"{self.root}/.{step_name(step)}.{token}.tmp"

    def files(self, written: str) -> list[str]:
        return os.listdir(written)

    def put(self, written: str, name: str, data: bytes) -> FileMark:
        path = Path(written) / name
        path.write_bytes(data)
        _sync(path)
        return FileMark(len(data), crc32(data))

    def mark(self, written: str, name: str) -> FileMark:
        path = Path(written) / name
        _sync(path)
        return mark_file(path)

    def discard(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _commit(self, written: str, manifest: Manifest) -> tuple[str, list[str]]:
        hidden, final = Path(written), Path(self.root) / step_name(manifest.step)
        self.put(written, MANIFEST, manifest.dumps().encode())
        _sync(hidden)
        complete = _condition(hidden)
        if complete.damages:
            raise CheckpointError(f"{written} did not reach the disk as it was written: {complete}")
        failpoint("described")
        replaced = [written] if final.is_dir() else []  # which gets the other name
        _rename(hidden, final)
        failpoint("renamed")
        try:
            _sync(Path(self.root))
        except OSError:
            with contextlib.suppress(OSError):  # as far as it can be undone where the disk fails
                _rename(hidden, final) if replaced else final.rename(hidden)
            raise
        return str(final), replaced

    def _point(self, name: str) -> None:
        self._new_latest.unlink(missing_ok=True)
        self._new_latest.symlink_to(name)
        self._new_latest.replace(self._latest)
        _sync(Path(self.root))

    def _delete(self, path: str) -> None:
        # Out of sight first: a deletion that is interrupted must not leave half a checkpoint under its name.
        hidden = f"{self.root}/.{os.path.basename(path).lstrip('.').partition('.')[0]}.{new_token()}.tmp"
        os.rename(path, hidden)
        failpoint("hidden")
        self.discard(hidden)


def mark_file(path: Path) -> FileMark:
    """Read a file once and return its size and checksum."""
    with path.open("rb") as file:
        return file_mark(file)


def _condition(path: Path) -> Condition:
    def looked() -> Condition:
        return look(str(path), step_of(path.name), lambda name: _size(path / name), (path / MANIFEST).read_bytes)

    found = looked()
    while found.damages and (again := looked()).manifest != found.manifest:
        found = again  # it was replaced or deleted while it was looked at
    return found


def _size(path: Path) -> Found:
    try:
        found = os.lstat(path)
    except OSError as error:
        return of_error(error)
    return found.st_size if stat.S_ISREG(found.st_mode) else "no regular file"


def _rename(hidden: Path, final: Path) -> None:
    """Give a directory its name; what has had that name gets the other one."""
    if not final.is_dir():
        hidden.rename(final)
    elif not _exchange(hidden, final):
        aside = hidden.with_suffix(".old")
        final.rename(aside)
        failpoint("aside")
        try:
            hidden.rename(final)
        except OSError:
            aside.rename(final)
            raise
        aside.rename(hidden)


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change names in one step; ``False`` where the file system cannot."""
    libc = ctypes.CDLL(None)
    return libc.renameat2(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
