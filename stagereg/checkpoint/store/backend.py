"""What a checkpoint store asks of the place where it lies: the verbs that a directory and a bucket do each in its way.

:class:`.Directory` renames a save to commit it, :class:`.Bucket` writes its manifest last. Everything else, such as
which checkpoints are complete, which stay, and in which order a save is committed, is the same for both, and theirs
to whom it is asked for: :class:`.CheckpointStore` and :class:`.Retention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from stagereg.checkpoint.format.damage import WHOLE, Condition
from stagereg.checkpoint.format.manifest import Checkpoint, FileMark, Manifest
from stagereg.checkpoint.store.lock import Owner, StoreLock


class Backend(Protocol):
    """Directories with files in them, below one root.

    Paths are full paths or URLs, as text. What is written is safely stored when a call returns. Errors are ``OSError``
    unless said otherwise. Any thread may call, and any process reads; the run that holds the lock writes.

    Attributes:
        root: the directory of checkpoints, without a slash at its end.
        in_place: whether a save is written under the name that it keeps, as nothing can be renamed. A directory with a
            token in its name and without a manifest is then a save that has not ended, or a checkpoint being deleted.
    """

    root: str
    in_place: bool

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        """Return what is in a directory: sizes of files, or what is wrong with one; ``None`` of directories.

        Nothing is in one that is not there; one that cannot be looked at is an error. Where listings may be late,
        ``files`` are asked for by their names.
        """

    def resolve(self, path: str) -> str:
        """Return the directory that a path means, which may be that of a ``latest`` (:meth:`point`)."""

    def read(self, path: str) -> bytes:
        """Read a small file. Raises ``FileNotFoundError`` if it is not there."""

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileMark:
        """Read a file to its end, or a part of it, and return the mark of that; ``flush``: first have it stored."""

    def holder(self) -> Owner | None:
        """Return who holds the lock at this moment, or ``None``; neither waits nor locks."""

    def lock(self) -> StoreLock:
        """Lock the root, which is made if it is not there, until the lock is released.

        Raises:
            CheckpointError: another run holds it, which the message names. ``OSError``: nothing can be written there.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write a small file into a directory that nobody reads yet, or one of which nobody minds a half."""

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a small file of the root in one step; delete it if there is no ``data``."""

    def delete(self, path: str) -> None:
        """Delete a small file, if it is there."""

    def commit(self, written: str, manifest: Manifest) -> str:
        """Give ``written`` its manifest, and make a checkpoint of it in one step; return its path.

        Nothing is overwritten: where the plain name of the step is taken, it has a token. If it raises, ``written`` is
        no checkpoint, as far as that can be undone.
        """

    def point(self, name: str) -> None:
        """Have ``latest`` point to a directory of the root, in one step."""

    def link(self, checkpoint: Checkpoint) -> str:
        """Have a checkpoint lie under its plain name as well, in one step; return that path.

        Empty if the name is taken, or names here keep their tokens.
        """

    def remove(self, each: Condition, is_read: Callable[[str], bool]) -> str:
        """Make a checkpoint none, in one step, and return where it is now, to be discarded.

        One with a manifest is brought back, and the result is empty, where ``is_read``, which is asked after that with
        its name, says so.
        """

    def discard(self, path: str) -> None:
        """Delete a directory that is no checkpoint; what cannot be deleted stays and does no harm."""

    def tidy(self) -> Sequence[str]:
        """Delete what killed runs have left that is in no directory of a save; return full paths. Raises nothing."""
