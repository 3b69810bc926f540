"""A directory of a file system: a checkpoint is committed by renaming its directory.

::

    runs/gpt/
        step-00000100/                 a complete checkpoint
        step-00000100.<token>/         likewise, of a step that was there when it was saved again
        latest -> step-00000100        relative symbolic link to the checkpoint committed last
        .step-00000200.<token>.tmp/    being written; never looked at by readers, swept at the next start

The files lie in a hidden sibling directory and are flushed; the manifest is written and flushed; the directory is
renamed to its final name, which nothing else has, and the parent flushed; ``latest`` is replaced by one rename. A
checkpoint that is deleted gets a hidden name first.

Reading follows no link: a file of a checkpoint is a regular file inside its directory, or there is no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.damage import of_error
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.lock import DirectoryLock, Owner, StoreLock, holder
from stagereg.checkpoint.manifest import LATEST, MANIFEST, FileMark, Manifest, file_mark, new_token, step_name, step_of
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore

__all__ = ["LocalStore", "mark_file"]

_LEFTOVER = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")


class LocalStore(CheckpointStore):
    """A directory of this machine's file systems, shared ones included.

    Args:
        root: its path; a relative one is of the current directory, ``~`` is the user's.
    """

    remote = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(str(Path(os.path.expanduser(root)).absolute()))
        self._latest = Path(self.root) / LATEST

    def holder(self) -> Owner | None:
        return holder(self.root)

    def leftovers(self) -> list[str]:
        try:
            return sorted(f"{self.root}/{name}" for name in os.listdir(self.root) if _LEFTOVER.fullmatch(name))
        except OSError:
            return []

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:  # which knows what a directory is without another look
                return [entry.name for entry in entries if step_of(entry.name) is not None and entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):  # anything else must not look like an empty store
            return []

    def _resolve(self, path: str) -> str:
        return str(Path(path).resolve())

    def _sizes(self, path: str) -> dict[str, int | str]:
        try:
            return {name: _size(Path(path) / name) for name in os.listdir(path)}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def _read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def _pointed(self) -> str | None:
        return os.readlink(self._latest) if self._latest.is_symlink() else None

    # -- writing

    def lock(self) -> StoreLock:
        os.makedirs(self.root, exist_ok=True)
        self._hold = DirectoryLock(self.root)
        return self._hold

    def temporary(self, step: int, token: str) -> str:
        return f"{self.root}/.{step_name(step)}.{token}.tmp"

    def put(self, written: str, name: str, data: bytes) -> FileMark:
        path = Path(written) / name
        path.write_bytes(data)
        _sync(path)
        return FileMark(len(data), crc32(data))

    def mark(self, written: str, name: str, flush: bool = True) -> FileMark:
        path = Path(written) / name
        if flush:
            _sync(path)
        return mark_file(path)

    def discard(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _commit(self, written: str, manifest: Manifest) -> str:
        self.put(written, MANIFEST, manifest.dumps().encode())
        _sync(Path(written))
        failpoint("described")
        final = f"{self.root}/{step_name(manifest.step)}"
        if os.path.lexists(final):
            final = f"{self.root}/{os.path.basename(written)[1:].removesuffix('.tmp')}"
        os.rename(written, final)
        failpoint("renamed")
        try:
            _sync(Path(self.root))
        except OSError:
            with contextlib.suppress(OSError):  # as far as it can be undone where the disk fails
                os.rename(final, written)
            raise
        return final

    def _point(self, name: str) -> None:
        link = Path(self._hidden(name))
        link.symlink_to(name)
        link.replace(self._latest)
        _sync(Path(self.root))

    def _delete(self, path: str) -> None:
        # Out of sight first: a deletion that is interrupted must not leave half a checkpoint under its name.
        hidden = self._hidden(os.path.basename(path))
        os.rename(path, hidden)
        failpoint("hidden")
        self.discard(hidden)

    def _hidden(self, name: str) -> str:
        """Return a name that the next start deletes."""
        return f"{self.root}/.{name.partition('.')[0]}.{new_token()}.tmp"


def mark_file(path: Path) -> FileMark:
    """Read a file once and return its size and checksum."""
    with path.open("rb") as file:
        return file_mark(file)


def _size(path: Path) -> int | str:
    try:
        found = os.lstat(path)
    except OSError as error:
        return of_error(error)
    return found.st_size if stat.S_ISREG(found.st_mode) else "no regular file"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
