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

from stagereg.checkpoint.damage import of_error
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.lock import DirectoryLock, Owner, StoreLock, holder
from stagereg.checkpoint.manifest import LATEST, FileMark, file_mark, new_token, step_name
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import ConfigError

__all__ = ["FILE_URL", "LocalStore", "local_path", "mark_file"]

FILE_URL = "file://"
_LEFTOVER = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")


class LocalStore(CheckpointStore):
    """A directory of this machine's file systems, shared ones included.

    Args:
        root: its path, see :func:`local_path`.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(str(local_path(root)))

    def holder(self) -> Owner | None:
        return holder(self.root)

    def leftovers(self) -> list[str]:
        return sorted(f"{self.root}/{name}" for name in self._listing(self.root) if _LEFTOVER.fullmatch(name))

    def _listing(self, path: str) -> dict[str, int | str | None]:
        try:
            with os.scandir(path) as entries:
                return {entry.name: _size(entry) for entry in entries}
        except (FileNotFoundError, NotADirectoryError):  # anything else must not look like an empty store
            return {}

    def _resolve(self, path: str) -> str:
        return os.path.realpath(local_path(path))

    def _read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def _mark(self, path: str) -> FileMark:
        return mark_file(Path(path))

    # -- writing

    def lock(self) -> StoreLock:
        os.makedirs(self.root, exist_ok=True)
        self._hold = DirectoryLock(self.root)
        return self._hold

    def temporary(self, step: int, token: str) -> str:
        return f"{self.root}/.{step_name(step)}.{token}.tmp"

    def mark(self, written: str, name: str) -> FileMark:
        _sync(Path(written) / name)
        return super().mark(written, name)

    def discard(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _write(self, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)
        _sync(Path(path))

    def _commit(self, written: str, step: int) -> str:
        _sync(Path(written))
        failpoint("described")
        final = f"{self.root}/{step_name(step)}"
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
        link.replace(f"{self.root}/{LATEST}")
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


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path that a path or a ``file://`` URL means; ``~`` is the user's.

    Raises:
        ConfigError: the URL names another machine, or the path the home of a user who is not known.
    """
    if isinstance(path, str) and path.startswith(FILE_URL) and not path.startswith(f"{FILE_URL}/"):
        raise ConfigError(f"{path} names another machine; a directory of this one has three slashes: file:///runs.")
    expanded = os.path.expanduser(os.fspath(path).removeprefix(FILE_URL))
    if expanded.startswith("~"):
        raise ConfigError(f"{path} begins with the home of a user who is not known here; ./{path} is a name.")
    return Path(expanded).absolute()


def mark_file(path: Path) -> FileMark:
    """Read a file once and return its size and checksum."""
    with path.open("rb") as file:
        return file_mark(file)


def _size(entry: os.DirEntry[str]) -> int | str | None:
    try:
        if entry.is_dir():  # mostly known without another look
            return None
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        return of_error(error)
    return found.st_size if stat.S_ISREG(found.st_mode) else "no regular file"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
