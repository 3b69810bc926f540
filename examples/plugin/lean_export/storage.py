"""``storage=zipped``: compresses each entry of a checkpoint with zlib."""

from __future__ import annotations

import zlib

from stagereg.plugin import ConfigError, PackedStorage

__all__ = ["ZippedStorage"]


class ZippedStorage(PackedStorage):
    """Writes fewer bytes, but uses more CPU time.

    Args:
        path: the directory or URL of one checkpoint; torch and the checkpointer set it for each checkpoint.
        level: compression level, from 1, the fastest, to 9.
    """

    def __init__(self, path: str | None = None, level: int = 1) -> None:
        if not 1 <= level <= 9:
            raise ConfigError(f"storage.level must be in 1..9, got {level}.")
        super().__init__(path)
        self.level = level

    def pack(self, data: memoryview) -> bytes:
        """Return the bytes to write to the file for one entry."""
        return zlib.compress(data, self.level)

    def unpack(self, data: bytes) -> bytes:
        """Return the entry's bytes. Does not use ``level``, because a checkpoint does not store options."""
        return zlib.decompress(data)
