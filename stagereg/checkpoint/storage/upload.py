"""A new object in an object store: what :class:`.DiskFile` is in a directory.

It goes up in parts of the size that fsspec has for that store, so that no more than a part lies in memory, and is given
up where the writing fails, since an upload that is merely closed would leave half a file under its name.
"""

from __future__ import annotations

import contextlib
from typing import Any

from stagereg.checkpoint.failpoints import failpoint
from stagereg.checkpoint.store.object_store import ObjectStore

__all__ = ["Upload"]

_PIECE_BYTES = 1 << 22


class Upload:
    """A new object at ``url``. Of what is not whole it leaves nothing, if it can reach the store."""

    refused = False

    def __init__(self, url: str) -> None:
        store = ObjectStore(url)
        self._file: Any = store.fs.open(store.path(url), "wb")

    def write(self, data: memoryview, used: int, at: int) -> None:
        """See :class:`.DiskFile`. Raises: what the store has failed with."""
        # A large tensor whole would be a part of its own size, and as much memory once more.
        for begin in range(0, used, _PIECE_BYTES):
            self._file.write(data[begin : min(begin + _PIECE_BYTES, used)])
            failpoint("writing")

    def end(self, nbytes: int) -> None:
        """See :class:`.DiskFile`. Sends what is left."""
        self._file.close()

    def close(self, whole: bool) -> None:
        """See :class:`.DiskFile`."""
        if not whole:
            with contextlib.suppress(Exception):
                self._file.discard()
            with contextlib.suppress(Exception):
                self._file.closed = True  # or else it would send itself when it is let go of
