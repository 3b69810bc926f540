"""A new object in an object store, marked on its way: what :class:`.AlignedFile` is in a directory.

It goes up in parts of the size that fsspec has for that store, so that no more than a part lies in memory, and is given
up where the writing fails, since an upload that is merely closed would leave half a file under its name.
"""

from __future__ import annotations

import contextlib
from typing import Any

from stagereg.checkpoint.checksum import crc32
from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.store.object_store import ObjectStore

__all__ = ["Upload"]

_PIECE_BYTES = 1 << 22


class Upload:
    """A new object at ``url``, written from its beginning to its end; see :class:`.AlignedFile`.

    As a context manager it leaves nothing of what is not finished, if the store can be reached.
    """

    refused = False

    def __init__(self, url: str) -> None:
        store = ObjectStore(url)
        self._file: Any = store.fs.open(store.path(url), "wb")
        self._bytes = self._crc32 = 0
        self.error: Exception | None = None

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.error = None
        if error is not None:
            with contextlib.suppress(Exception):
                self._file.discard()
            with contextlib.suppress(Exception):
                self._file.closed = True  # or else it would send itself when it is let go of

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._bytes

    def flush(self) -> None:
        """Nothing yet: ``torch.save`` asks for it after each tensor, and a part has a least size."""

    def align(self, address: int, nbytes: int) -> None:
        """Nothing: parts have no pages."""

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes; return how many. Raises: what the store has failed with, now or before."""
        if self.error is not None:
            raise self.error
        rest = memoryview(data).cast("B")
        try:
            # A large tensor whole would be a part of its own size, and as much memory once more.
            for at in range(0, len(rest), _PIECE_BYTES):
                self._file.write(rest[at : at + _PIECE_BYTES])
        except Exception as error:
            self.error = error
            raise
        self._bytes += len(rest)
        self._crc32 = crc32(rest, self._crc32)
        failpoint("writing")
        return len(rest)

    write_memory = write

    def finish(self) -> FileMark:
        """Send what is left, and return the mark of the object, which is there, whole."""
        self._file.close()
        failpoint("flushed")
        return FileMark(self._bytes, self._crc32)
