"""The backend for checkpoints in a file system. A save is written to a hidden directory, and committed by a rename.

``latest`` is a symbolic link to a checkpoint. Links inside checkpoints are not followed, and count as corrupt files.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
from collections.abc import Iterable, Sequence

import stagereg.checkpoint.format.manifest as manifests
from stagereg.base.small_files import MOST_BYTES, discard, read_small, replace_small, sync, temporary_of, write_new
from stagereg.checkpoint.format.damage import WHOLE, VerificationResult, damage_of
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST, NOTES, Checkpoint, FileDigest, Manifest, step_name
from stagereg.checkpoint.store.failpoints import failpoint
from stagereg.checkpoint.store.local_files import LocalFiles, local_path, mark_file
from stagereg.checkpoint.store.lock import Owner, StoreLock, holder
from stagereg.errors import CheckpointError

_MOST_BYTES = 1 << 30  # size limit for reading a file of a checkpoint

_log = logging.getLogger(__name__)


class Directory(LocalFiles):
    """The backend for a directory in a local or network file system; see :class:`.Backend`."""

    in_place = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        try:
            with os.scandir(path) as entries:
                return {entry.name: _size(entry) for entry in entries}
        except (FileNotFoundError, NotADirectoryError):  # other errors must not look like an empty directory
            return {}

    def resolve(self, path: str) -> str:
        return os.path.realpath(local_path(path))

    def read(self, path: str) -> bytes:
        return read_small(path, MOST_BYTES if os.path.dirname(path) == self.root else _MOST_BYTES)

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        if flush:
            sync(path)
        return mark_file(path, part)

    def holder(self) -> Owner | None:
        return holder(self.root)

    def lock(self) -> StoreLock:
        os.makedirs(self.root, exist_ok=True)
        return StoreLock(self.root)

    def write(self, path: str, data: bytes) -> None:
        try:
            write_new(path, data)
        except FileExistsError:
            replace_small(path, data)

    def replace(self, name: str, data: bytes) -> None:
        if data:
            replace_small(f"{self.root}/{name}", data)
        else:
            self.delete(f"{self.root}/{name}")

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def commit(self, written: str, manifest: Manifest) -> str:
        self.delete(f"{written}/{MANIFEST}")  # a killed copy may have left a manifest
        write_new(f"{written}/{MANIFEST}", manifest.dumps().encode())
        sync(written)
        failpoint("described")
        final = f"{self.root}/{step_name(manifest.step)}"
        if os.path.lexists(final):
            final = f"{self.root}/{os.path.basename(written)[1:].removesuffix('.tmp')}"
        os.rename(written, final)
        failpoint("renamed")
        try:
            sync(self.root)
        except OSError:
            with contextlib.suppress(OSError):  # best effort, because the disk may be failing
                os.rename(final, written)
            raise
        return final

    def point(self, name: str) -> None:
        link, latest = self._hidden(name), f"{self.root}/{LATEST}"
        os.symlink(name, link)
        try:
            os.replace(link, latest)
        except OSError as error:
            discard(link)
            if isinstance(error, IsADirectoryError):  # not deleted: it may contain data of the user
                text = f"{latest} is a directory, perhaps because a program copied the link. Delete it or move it away."
                raise CheckpointError(text) from error
            raise
        sync(self.root)

    def link(self, checkpoint: Checkpoint) -> str:
        plain = f"{self.root}/{manifests.plain_name(checkpoint.name)}"
        if os.path.lexists(plain):
            return ""
        beside = self._hidden(checkpoint.name)
        try:
            os.mkdir(beside)
            for name in (*checkpoint.manifest.files, MANIFEST):
                os.link(f"{checkpoint.path}/{name}", f"{beside}/{name}")
        except OSError:
            self.discard(beside)
            raise
        sync(beside)
        os.rename(beside, plain)
        sync(self.root)
        failpoint("named")
        return plain

    def hide(self, each: VerificationResult) -> str:
        hidden = self._hidden(each.name)
        os.rename(each.path, hidden)
        failpoint("hidden")
        return hidden

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        os.rename(hidden, each.path)

    def discard(self, path: str) -> None:
        hidden = self._hidden(os.path.basename(path).removeprefix("."))
        with contextlib.suppress(OSError):  # so that a rank that still writes cannot add files
            os.rename(path, hidden)
            path = hidden
        discard(path)
        with contextlib.suppress(OSError):  # lstat() fails if the directory was deleted, which is the usual case
            if (owner := os.lstat(path).st_uid) != os.geteuid():
                _warn_of_another_users(self.root, owner)

    def tidy(self) -> Sequence[str]:
        left: list[str] = []
        with contextlib.suppress(OSError):
            for path in [f"{self.root}/{name}" for name in os.listdir(self.root) if temporary_of(name) in NOTES]:
                with contextlib.suppress(OSError):  # the name may belong to a user's directory
                    os.unlink(path)
                    left.append(path)
        return left

    def _hidden(self, name: str) -> str:
        """Return a new hidden path for a directory. If this run is killed, the next run deletes that directory."""
        return f"{self.root}/.{name.partition('.')[0]}.{manifests.new_token()}.tmp"


@functools.cache  # one warning per process and argument
def _warn_of_another_users(root: str, owner: int) -> None:
    _log.warning(
        "stagereg: old checkpoints in %s belong to another user, %d. Only that user can delete them: they stay hidden "
        "until that user starts a run there. Users who share a directory must set `umask 002` before they train.",
        *(root, owner),
    )


def _size(entry: os.DirEntry[str]) -> int | str | None:
    try:
        if entry.is_dir():  # scandir() usually returns the type without another system call
            return None
        found = entry.stat(follow_symlinks=False)
    except OSError as error:
        return damage_of(error)
    if stat.S_ISLNK(found.st_mode):
        return "a link (cp -rL copies the file itself)"
    return found.st_size if stat.S_ISREG(found.st_mode) else "not a regular file"
