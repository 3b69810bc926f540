"""The protocol of storage backends for checkpoints: a local directory, or an extension's backend for a URL.

:class:`.Directory` commits a save by renaming it. An object store cannot rename, so its manifest is written last.
:class:`.CheckpointStore` and :class:`.Retention` do everything else in the same way for all backends.
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
    """A new file that is written sequentially. Its methods raise ``OSError``.

    Attributes:
        refused: whether the file system has refused direct I/O, which bypasses the page cache.
    """

    refused: bool

    def write(self, data: memoryview) -> None:
        """Write the next bytes: whole pages, except in the last call."""

    def end(self) -> None:
        """Make the complete file durable."""

    def close(self, whole: bool) -> None:
        """Close the file; ``whole`` is False for an incomplete file, which is not used. Raises nothing."""


class Files(Protocol):
    """Opens and creates the files that a storage reads and writes. Its methods raise ``OSError``. Thread-safe.

    Attributes:
        remote: whether the files are accessed by requests to URLs, which name the same files on every machine.
    """

    remote: bool

    @property
    def shared(self) -> bool:
        """Whether all machines see the same files, as far as this machine can determine."""

    def attempt(self, doing: str, path: str, act: Callable[[], T]) -> T:
        """Call ``act`` and return its result; it may be called again if the network loses a request."""

    def in_time(self, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
        """Return the result of ``act``; raise ``TimeoutError`` if it hangs, and pass a late result to ``give_back``."""

    def fetch(self, path: str, part: range) -> bytes:
        """Read a range of a file in one request. Any thread."""

    def open(self, path: str) -> RawIOBase | BufferedReader:
        """Open a file for reading, at any offset. Raises ``UnfitFileError`` if it is not a regular file."""

    def make(self, path: str) -> None:
        """Create a directory below the root, if the backend has directories; it may exist."""

    def create(self, path: str, direct: bool = False, mode: int = 0o666) -> Sink:
        """Create a file, with direct I/O if ``direct`` is set and possible; the umask applies to ``mode``."""


class Backend(Files, Protocol):
    """The directories below one root, and their files. Thread-safe.

    Paths are full paths or URLs, as text. A write is durable when the call returns. Methods raise ``OSError`` unless
    their docstrings name other errors. Any process may read; only the run that holds the lock may write.

    Attributes:
        root: the directory of checkpoints, without a slash at its end.
        in_place: whether a save is written under its final name. A directory with a token in its name and without a
            manifest is then an unfinished save, or a checkpoint that is being deleted.
    """

    root: str
    in_place: bool

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        """List a directory, if it exists: the size of each file, or its error, and ``None`` for each subdirectory.

        If listings are eventually consistent, each of ``files`` is also looked up by its name.
        """

    def resolve(self, path: str) -> str:
        """Return the directory that a path names, after following a ``latest`` (:meth:`point`)."""

    def read(self, path: str) -> bytes:
        """Read a small file. Raises ``FileNotFoundError``, and ``UnfitFileError`` if it is not a regular file."""

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        """Read a file, or a range of it, and return the digest; ``flush`` makes the file durable first."""

    def holder(self) -> Owner | None:
        """Return the current owner of the lock, or ``None``. Does not wait or lock."""

    def lock(self) -> StoreLock:
        """Lock the root, which is created if it does not exist. Raises: ``CheckpointError``, ``OSError``."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file that no process reads yet, or that may be read when it is half written."""

    def replace(self, name: str, data: bytes) -> None:
        """Atomically write or replace a small file of the root; delete the file if ``data`` is empty."""

    def delete(self, path: str) -> None:
        """Delete a small file, if it exists."""

    def commit(self, written: str, manifest: Manifest) -> str:
        """Write the manifest of the save ``written``, atomically make it a checkpoint, and return the new path.

        Nothing is overwritten: if the plain name of the step is taken, the new name has a token. After an error the
        commit is undone as far as possible.
        """

    def point(self, name: str) -> None:
        """Atomically make ``latest`` point to a directory of the root."""

    def link(self, checkpoint: Checkpoint) -> str:
        """Atomically link a checkpoint under its plain name; return that path, or ``""`` if the name is taken."""

    def hide(self, each: VerificationResult) -> str:
        """Atomically hide a checkpoint, and return its new path, for :meth:`discard` or :meth:`bring_back`."""

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        """Atomically undo :meth:`hide` of a checkpoint with a manifest."""

    def discard(self, path: str) -> None:
        """Delete a directory that is not a checkpoint; files that cannot be deleted remain, without harm."""

    def tidy(self) -> Sequence[str]:
        """Delete leftover files of killed runs outside the directories of saves; return full paths. Raises nothing."""
