"""A directory of a file system: a checkpoint is committed by renaming its directory.

::

    runs/gpt/
        step-00000100/                 a complete checkpoint
        latest -> step-00000100        relative symbolic link to the checkpoint committed last
        .step-00000200.<token>.tmp/    being written; never looked at by readers, swept at the next start

The order makes every moment safe to be killed in: the files lie in a hidden sibling directory and are flushed; the
manifest is written and flushed; sizes are checked; the directory is renamed to its final name and the parent flushed;
``latest`` moves by one atomic replacement; only then are old checkpoints deleted. Nothing is overwritten in place.
Where the step has a directory already, the two change names in one atomic exchange (``renameat2``, Linux); a file
system that cannot exchange gets two renames with the old one set aside, and :meth:`LocalStore.sweep` puts it back if
the process died between them.

Reading follows no link: a file of a checkpoint is a regular file inside its directory, or there is no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.damage import Condition, Damage, Found, Unclear, differences, of_error
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.lock import DirectoryLock, Owner, StoreLock, holder
from stagereg.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    MANIFEST_BYTES,
    Checkpoint,
    FileMark,
    Manifest,
    file_mark,
    new_token,
    newest_first,
    step_name,
    step_of,
)
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError

__all__ = ["LocalStore", "mark_file"]

_log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.(?P<name>step-\d+|latest|probe)\.[0-9a-f]+\.(?P<kind>tmp|old)")
_NO_FILE = "no regular file"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class LocalStore(CheckpointStore):
    """A directory of this machine's file systems, shared ones included.

    Args:
        root: its path; a relative one is of the current directory, ``~`` is the user's.
    """

    remote = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__()
        self._root = Path(root).expanduser().absolute()
        self.root = str(self._root)

    # -- reading

    def checkpoints(self) -> tuple[list[Checkpoint], dict[str, str]]:
        """See :class:`.CheckpointStore`."""
        while True:
            found = [_condition(path) for path in self._steps()]
            damaged = {each.path for each in found if each.damages}
            if not damaged or damaged <= set(map(str, self._steps())):
                break  # or else a run has deleted one since they were listed, and a newer one may be there
        complete = [each.checkpoint for each in found if each.checkpoint is not None]
        return newest_first(complete), {each.path: str(each) for each in found if each.damages}

    def condition(self, path: str) -> Condition:
        """See :class:`.CheckpointStore`. The checkpoint's path is that of the directory itself, without links."""
        try:
            there = Path(path).expanduser().resolve()
            found = _condition(there)
            if found.damages and Path(path).expanduser().resolve() != there:
                return self.condition(path)  # a run has moved `latest` meanwhile
            return found
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, up to Python 3.12
            return Condition(path, None, (Damage(MANIFEST, f"cannot be looked at ({error})", certain=False),))

    def contents(self, path: str, names: Iterable[str]) -> dict[str, Found]:
        """See :class:`.CheckpointStore`."""
        return {name: _content(Path(path) / name) for name in names}

    def latest(self) -> Checkpoint | None:
        """See :class:`.CheckpointStore`."""
        found = self.open(str(self._root / LATEST))
        return found if isinstance(found, Checkpoint) else None

    def holder(self) -> Owner | None:
        """See :class:`.CheckpointStore`."""
        return holder(self.root)

    def leftovers(self) -> list[str]:
        """See :class:`.CheckpointStore`."""
        try:
            found = [entry for entry in self._root.iterdir() if _LEFTOVER.fullmatch(entry.name)]
        except OSError:
            return []
        return sorted(str(entry) for entry in found if entry.is_dir())

    # -- writing

    def probe(self) -> None:
        """See :class:`.CheckpointStore`."""
        self._root.mkdir(parents=True, exist_ok=True)
        trial = self._root / f".probe.{new_token()}.tmp"
        trial.touch()
        trial.unlink(missing_ok=True)  # a run that is just starting there may have swept it

    def lock(self) -> StoreLock:
        """See :class:`.CheckpointStore`."""
        self._hold = DirectoryLock(self._root)
        return self._hold

    def sweep(self) -> None:
        """See :class:`.CheckpointStore`.

        What was set aside goes back if its name is free; ``latest`` is brought up to date.
        """
        for entry in list(self._root.iterdir()):
            leftover = _LEFTOVER.fullmatch(entry.name)
            if leftover is None:
                continue
            if leftover["kind"] == "old":
                _put_back(entry, self._root / leftover["name"])
            else:
                _discard(entry)
        complete, _ = self.checkpoints()
        latest = self.latest()
        # One that points to what is damaged stays as it is: that the newest is lost must not go unnoticed.
        behind = latest.manifest.serial if latest is not None else math.inf if (self._root / LATEST).exists() else -1
        if complete and behind < complete[0].manifest.serial:
            self._point_latest(Path(complete[0].path))  # its run was killed right after the commit

    def temporary(self, step: int, token: str) -> str:
        """See :class:`.CheckpointStore`."""
        return str(self._root / f".{step_name(step)}.{token}.tmp")

    def files(self, written: str) -> list[str]:
        """See :class:`.CheckpointStore`."""
        return os.listdir(written)

    def put(self, written: str, name: str, data: bytes) -> FileMark:
        """See :class:`.CheckpointStore`."""
        path = Path(written) / name
        path.write_bytes(data)
        _sync(path)
        return FileMark(len(data), crc32(data))

    def mark(self, written: str, name: str) -> FileMark:
        """See :class:`.CheckpointStore`. Flushes the file to the disk."""
        path = Path(written) / name
        _sync(path)
        return mark_file(path)

    def publish(
        self, written: str, step: int, world_size: int, storage: str, files: dict[str, FileMark], keep: int
    ) -> str:
        """See :class:`.CheckpointStore`."""
        if self._hold is not None:
            self._hold.check()
        failpoint("held")
        hidden = Path(written)
        known = [condition.manifest for condition in map(_condition, self._steps())]  # damaged ones count as well
        serial = 1 + max((manifest.serial for manifest in known if manifest is not None), default=0)
        manifest = Manifest(step, world_size, serial, files, storage, int(time.time()))
        _write(hidden / MANIFEST, manifest.dumps())
        _sync(hidden)
        complete = _condition(hidden)
        if complete.damages:
            raise CheckpointError(f"{written} did not reach the disk as it was written: {complete}")
        failpoint("described")
        final = self._root / step_name(step)
        if os.path.lexists(final) and not final.is_dir():
            _move_away(final)
        damaged = os.path.lexists(final) and (str(final) in self.distrusted or bool(_condition(final).damages))
        replaced = _rename(hidden, final)
        failpoint("renamed")
        try:
            _sync(self._root)
        except OSError:
            _rename_back(hidden, final, replaced)
            raise
        if damaged:
            self.distrusted.discard(str(final))
            _log.warning("stagereg: the damaged checkpoint %s is replaced: step %d was saved again.", final, step)
        try:
            failpoint("committed")
            if replaced is not None:
                _discard(replaced)
            try:
                self._point_latest(final)
                failpoint("pointed")
            finally:  # or a file system without links would fill up
                self._retain(keep)
            failpoint("retained")
        except OSError as error:  # the checkpoint is complete, so the save must not fail
            _log.warning(
                "stagereg: step %d is saved in %s, but not all that follows is done (moving `latest`, deleting old "
                "checkpoints); the next save makes up for it: %s",
                step,
                final,
                error,
            )
        return str(final)

    def discard(self, path: str) -> None:
        """See :class:`.CheckpointStore`."""
        _discard(Path(path))

    def _steps(self) -> Iterator[Path]:
        try:
            with os.scandir(self._root) as entries:  # which knows what a directory is without another look
                found = [entry.path for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):  # anything else must not look like an empty store
            return
        yield from map(Path, found)

    def _point_latest(self, final: Path) -> None:
        link, latest = self._root / f".{LATEST}.{new_token()}.tmp", self._root / LATEST
        link.symlink_to(final.name)
        if os.path.lexists(latest) and not latest.is_symlink():
            _move_away(latest)
        link.replace(latest)
        _sync(self._root)

    def _retain(self, keep: int) -> None:
        complete = [each for each in self.checkpoints()[0] if each.path not in self.distrusted]
        kept = (self._root / LATEST).resolve()
        for path in (Path(old.path) for old in complete[keep:]):
            if path.resolve() != kept:
                # Out of sight first: a deletion that is interrupted must not leave half a checkpoint under its name.
                hidden = self._root / f".{path.name}.{new_token()}.tmp"
                path.rename(hidden)
                failpoint("hidden")
                _discard(hidden)


def mark_file(path: Path) -> FileMark:
    """Read a file once and return its size and checksum."""
    with path.open("rb") as file:
        return file_mark(file)


def _condition(path: Path) -> Condition:
    found = _look(path)
    while found.damages and (again := _look(path)).manifest != found.manifest:
        found = again  # it was replaced or deleted while it was looked at
    return found


def _look(path: Path) -> Condition:
    try:
        lies = os.lstat(path / MANIFEST)
        if not stat.S_ISREG(lies.st_mode):
            return _unknown(path, _NO_FILE)
        if lies.st_size > MANIFEST_BYTES:
            return _unknown(path, f"damaged (it has {lies.st_size:,} bytes)")
        manifest = Manifest.loads((path / MANIFEST).read_bytes())
    except OSError as error:
        return _unknown(path, of_error(error))
    except ValueError as error:
        return _unknown(path, f"damaged ({error})")
    if step_of(path.name) not in (None, manifest.step):
        return _unknown(path, f"of step {manifest.step}, not of this one")
    found = {name: _size(path / name) for name in manifest.files}
    return Condition(str(path), manifest, differences(manifest, found))


def _unknown(path: Path, what: str | Unclear) -> Condition:
    damage = Damage(MANIFEST, what) if isinstance(what, str) else Damage(MANIFEST, what.why, certain=False)
    return Condition(str(path), None, (damage,))


def _size(path: Path) -> Found:
    try:
        found = os.lstat(path)
    except OSError as error:
        return of_error(error)
    return found.st_size if stat.S_ISREG(found.st_mode) else _NO_FILE


def _content(path: Path) -> Found:
    size = _size(path)
    if not isinstance(size, int):
        return size
    try:
        return mark_file(path)
    except OSError as error:
        return of_error(error)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _move_away(path: Path) -> None:
    """Give what is not of a run another name, under which no run touches it: notes, or what a copy made of a link."""
    other = path.with_name(f"{path.name}.{new_token()}.moved")
    path.rename(other)
    _log.warning("stagereg: %s was in the way of a checkpoint, and is %s now.", path, other.name)


def _write(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(written: Path, final: Path) -> Path | None:
    """Give a directory its name; return where what had that name is now, to be deleted when the name is on the disk."""
    if not os.path.lexists(final):
        written.rename(final)
        return None
    if _exchange(written, final):
        return written
    aside = written.with_suffix(".old")
    final.rename(aside)
    failpoint("aside")
    try:
        written.rename(final)
    except OSError:
        aside.rename(final)
        raise
    return aside


def _rename_back(written: Path, final: Path, replaced: Path | None) -> None:
    """Undo :func:`_rename`, as far as that can be done where the disk fails."""
    with contextlib.suppress(OSError):
        if replaced == written:
            _exchange(written, final)
            return
        final.rename(written)
        if replaced is not None:
            replaced.rename(final)


def _put_back(aside: Path, final: Path) -> None:
    """Let a checkpoint that was set aside have its name again, unless the one that took it is good."""
    there = _condition(final)
    lost = not os.path.lexists(final)
    if lost or (there.damages and there.certain and not _condition(aside).damages):
        _discard(final)
        aside.rename(final)
    elif there.certain:
        _discard(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change names in one step; ``False`` where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0
