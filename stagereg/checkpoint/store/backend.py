"""The operations of a place that has checkpoints: a local directory, or an extension's backend for a URL.

:class:`.Directory` renames a save to commit it; an object store cannot rename, and gets the manifest last.
:class:`.CheckpointStore` and :class:`.Retention` do everything else, the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from io import BufferedReader, RawIOBase
from typing import Protocol, TypeVar

from stagereg.checkpoint.format.damage import WHOLE, VerificationResult
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.store.lock import Owner, StoreLock

T = TypeVar("T")


class Sink(Protocol):
    """A new file that is written in order. Errors are ``OSError``.

    Attributes:
        refused: whether the file system has refused to write past the page cache.
    """

    refused: bool

    def write(self, data: memoryview) -> None:
        """Write the next bytes: whole pages, except in the last call."""

    def end(self) -> None:
        """Make the complete file durable."""

    def close(self, whole: bool) -> None:
        """Close the file; ``whole`` is False for an incomplete file, which is useless. Raises nothing."""


class Files(Protocol):
    """Opens and creates the files that a storage reads and writes. Errors are ``OSError``. Thread-safe.

    Attributes:
        remote: whether the files are accessed by requests to URLs, which mean the same on every machine.
    """

    remote: bool

    @property
    def shared(self) -> bool:
        """Whether all machines see the same files, as far as this machine can know."""

    def attempt(self, doing: str, path: str, act: Callable[[], T]) -> T:
        """Return the result of ``act``, which may be repeated if the network loses a request."""

    def in_time(self, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
        """Return the result of ``act``; if requests hang, raise ``TimeoutError``; ``give_back`` gets a late result."""

    def fetch(self, path: str, part: range) -> bytes:
        """Read a range of a file in one request. Any thread."""

    def open(self, path: str) -> RawIOBase | BufferedReader:
        """Open a file for reading, at any offset. Raises ``UnfitFileError`` if it is not a regular file."""

    def make(self, path: str) -> None:
        """Create a directory below the root, if the backend has directories; it may exist."""

    def create(self, path: str, direct: bool = False, mode: int = 0o666) -> Sink:
        """Begin a new file; ``direct``: past the page cache if possible; ``mode``: less the umask."""


class Backend(Files, Protocol):
    """Directories with files in them, below one root.

    Paths are full paths or URLs, as text. A write is durable when the call returns. Errors are ``OSError`` unless the
    docstring differs. Thread-safe; any process reads; the run that holds the lock writes.

    Attributes:
        root: the directory of checkpoints, without a slash at its end.
        in_place: whether a save is written under its final name. A directory with a token in its name and without a
            manifest is then an unfinished save, or a checkpoint that is being deleted.
    """

    root: str
    in_place: bool

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        """Return the content of a directory, if it exists: sizes or errors of files; ``None`` for directories.

        If listings are eventually consistent, each of ``files`` is looked up by its name.
        """

    def resolve(self, path: str) -> str:
        """Return the directory of a path, which may be a ``latest`` (:meth:`point`)."""

    def read(self, path: str) -> bytes:
        """Read a small file. Raises ``FileNotFoundError``, and ``UnfitFileError`` if it is not a regular file."""

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        """Read a file, or a range of it, and return the digest; ``flush``: first make the file durable."""

    def holder(self) -> Owner | None:
        """Return the owner of the lock at this moment, or ``None``; neither waits nor locks."""

    def lock(self) -> StoreLock:
        """Lock the root, and create it, until the lock is released. Raises: ``CheckpointError``, ``OSError``."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file that no process reads yet, or whose first half does no harm."""

    def replace(self, name: str, data: bytes) -> None:
        """Write or replace a small file of the root in one step; delete the file if ``data`` is empty."""

    def delete(self, path: str) -> None:
        """Delete a small file, if it exists."""

    def commit(self, written: str, manifest: Manifest) -> str:
        """Write the manifest of ``written``, and make a checkpoint of it in one step; return its path.

        Overwrites nothing: if the plain name of the step is taken, the new name has a token. After an error
        ``written`` is not a checkpoint, as far as that can be undone.
        """

    def point(self, name: str) -> None:
        """Make ``latest`` point to a directory of the root, in one step."""

    def link(self, checkpoint: Checkpoint) -> str:
        """Link a checkpoint under its plain name too, in one step; return that path, empty if the name is taken."""

    def hide(self, each: VerificationResult) -> str:
        """Hide a checkpoint in one step, and return its new path, for :meth:`discard` or :meth:`bring_back`."""

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        """Undo :meth:`hide` of a checkpoint with a manifest, in one step."""

    def discard(self, path: str) -> None:
        """Delete a directory that is not a checkpoint; files that cannot be deleted stay and do no harm."""

    def tidy(self) -> Sequence[str]:
        """Delete the files of killed runs outside of the directories of saves; return full paths. Raises nothing."""
