"""What a checkpoint store needs of a place: the operations of a directory and of a bucket.

:class:`.Directory` renames a save to commit it, :class:`.Bucket` writes its manifest last. :class:`.CheckpointStore`
and :class:`.Retention` do everything else, the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from stagereg.checkpoint.format.damage import WHOLE, VerificationResult
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.store.lock import Owner, StoreLock


class Backend(Protocol):
    """Directories with files in them, below one root.

    Paths are full paths or URLs, as text. A write is safely stored when the call returns. Errors are ``OSError`` unless
    said otherwise. Thread-safe; any process reads; the run that holds the lock writes.

    Attributes:
        root: the directory of checkpoints, without a slash at its end.
        in_place: whether a save is written under its final name. A directory with a token in its name and without a
            manifest is then an unfinished save, or a checkpoint being deleted.
    """

    root: str
    in_place: bool

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        """Return the content of a directory, if it exists: sizes or damage of files; ``None`` for directories.

        If listings may be late, each of ``files`` is looked up by its name.
        """

    def resolve(self, path: str) -> str:
        """Return the directory that a path means, which may be that of a ``latest`` (:meth:`point`)."""

    def read(self, path: str) -> bytes:
        """Read a small file. Raises ``FileNotFoundError``, and ``UnfitFileError`` if it is not a file."""

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        """Read a file to its end, or a part of it, and return the mark of that; ``flush``: first have it stored."""

    def holder(self) -> Owner | None:
        """Return who holds the lock at this moment, or ``None``; neither waits nor locks."""

    def lock(self) -> StoreLock:
        """Lock the root, and make it, until the lock is released. Raises: ``CheckpointError``, ``OSError``."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file into a directory that is not read yet, or a file of which a half does no harm."""

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a small file of the root in one step; delete it if there is no ``data``."""

    def delete(self, path: str) -> None:
        """Delete a small file, if it is there."""

    def commit(self, written: str, manifest: Manifest) -> str:
        """Write the manifest of ``written``, and make a checkpoint of it in one step; return its path.

        Nothing is overwritten: if the plain name of the step is taken, the new name has a token. After an error
        ``written`` is not a checkpoint, as far as that can be undone.
        """

    def point(self, name: str) -> None:
        """Have ``latest`` point to a directory of the root, in one step."""

    def link(self, checkpoint: Checkpoint) -> str:
        """Link a checkpoint under its plain name too, in one step; return that path, or nothing if it is taken."""

    def hide(self, each: VerificationResult) -> str:
        """Hide a checkpoint in one step, and return its path now, to be discarded or given to :meth:`bring_back`."""

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        """Undo :meth:`hide` of a checkpoint with a manifest, in one step."""

    def discard(self, path: str) -> None:
        """Delete a directory that is no checkpoint; what cannot be deleted stays and does no harm."""

    def tidy(self) -> Sequence[str]:
        """Delete what killed runs left outside of the directories of saves; return full paths. Raises nothing."""
