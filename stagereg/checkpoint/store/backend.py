"""The protocol of storage backends for checkpoints: a local directory, or an extension's backend for a URL.

:class:`.Directory` commits a checkpoint by renaming its directory. Object stores cannot rename, so their backends
commit by writing the manifest last. All other code in this package is the same for all backends.
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

    ``refused``: whether the file system has refused direct I/O, which bypasses the page cache.
    """

    refused: bool

    def write(self, data: memoryview) -> None:
        """Append bytes. Each call, except the last one for the file, writes whole pages."""

    def end(self) -> None:
        """Make the complete file durable. Called after the last write, before :meth:`close`."""

    def close(self, whole: bool) -> None:
        """Close the file. ``whole``: whether all bytes were written; otherwise the file is invalid. Raises nothing."""


class Files(Protocol):
    """Opens and creates the files that a storage reads and writes. Its methods raise ``OSError``. Thread-safe.

    ``remote``: whether the files are in an object store, so that their URLs name the same files on every machine.
    """

    remote: bool

    @property
    def shared(self) -> bool:
        """Whether all machines see the same files, as far as this machine can determine."""

    def attempt(self, doing: str, path: str, act: Callable[[], T]) -> T:
        """Return ``act()``. After a network error, ``act`` is called again. ``doing``: the action, for messages."""

    def in_time(self, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
        """Return ``act()``, or raise ``TimeoutError``. A result after the timeout is passed to ``give_back``."""

    def fetch(self, path: str, part: range) -> bytes:
        """Read the byte range ``part`` of a file in one request."""

    def open(self, path: str) -> RawIOBase | BufferedReader:
        """Open a file for reading, at any offset. Raises ``UnfitFileError`` if it is not a regular file."""

    def make(self, path: str) -> None:
        """Create a directory below the root, unless it exists. Object stores do nothing."""

    def create(self, path: str, direct: bool = False, mode: int = 0o666) -> Sink:
        """Create a file with the permissions ``mode`` minus the umask. ``direct`` requests direct I/O, if supported."""


class Backend(Files, Protocol):
    """The checkpoint directories below one root directory or URL, and their files. Thread-safe.

    Paths are absolute paths or URLs, as strings. A write is durable when the call returns. Methods raise ``OSError``
    unless their docstrings name other errors. Any process may read; only the run that holds the lock may write.

    Attributes:
        root: the checkpoint directory, without a slash at the end.
        in_place: whether a save is written under its final name. A directory that has a token (random suffix) in its
            name, but no manifest, is then an unfinished save or a checkpoint that is being deleted.
    """

    root: str
    in_place: bool

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        """Map each name in a directory to the file size in bytes, to an error message, or to ``None`` for a directory.

        A missing directory has no entries. An eventually consistent backend looks up each of ``files`` by name as well.
        """

    def resolve(self, path: str) -> str:
        """Return ``path``. If ``path`` is the ``latest`` link (:meth:`point`), return the link's target instead."""

    def read(self, path: str) -> bytes:
        """Read a small file. Raises ``FileNotFoundError``, or ``UnfitFileError`` if it is not a regular file."""

    def mark(self, path: str, part: range = WHOLE, flush: bool = False) -> FileDigest:
        """Read a file, or a byte range of it, and return the digest. ``flush`` first makes the file durable."""

    def holder(self) -> Owner | None:
        """Return the owner of the lock, or ``None`` if the root is not locked. Returns immediately, without locking."""

    def lock(self) -> StoreLock:
        """Lock the root directory; create it if missing. Raises ``CheckpointError`` if another run holds the lock."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, not atomically: concurrent readers may see a partly written file."""

    def replace(self, name: str, data: bytes) -> None:
        """Atomically write or replace a small file in the root directory; delete the file if ``data`` is empty."""

    def delete(self, path: str) -> None:
        """Delete a small file, if it exists."""

    def commit(self, written: str, manifest: Manifest) -> str:
        """Write the manifest into the directory ``written``, atomically make it a checkpoint, and return the new path.

        Existing checkpoints are not overwritten: if ``step-N`` exists, the new name has a token (random suffix). After
        an error the commit is undone as far as possible.
        """

    def point(self, name: str) -> None:
        """Atomically make the link ``latest`` point to the directory ``name`` in the root."""

    def link(self, checkpoint: Checkpoint) -> str:
        """Atomically link a checkpoint under its name without token. Return the path, or ``""`` if that is taken."""

    def hide(self, each: VerificationResult) -> str:
        """Atomically rename a checkpoint to a hidden path. Return it, for :meth:`discard` or :meth:`bring_back`."""

    def bring_back(self, each: VerificationResult, hidden: str) -> None:
        """Atomically rename a hidden checkpoint to its former path, which undoes :meth:`hide`."""

    def discard(self, path: str) -> None:
        """Delete a directory that is not a checkpoint. Files that cannot be deleted remain, and readers ignore them."""

    def tidy(self) -> Sequence[str]:
        """Delete temporary files that killed runs left in the root; return the deleted paths. Raises nothing."""
