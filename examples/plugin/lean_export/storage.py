"""``storage=zipped``: each entry of a checkpoint compressed by zlib."""

from __future__ import annotations

import zlib

from stagereg.plugin import ConfigError, PackedStorage

__all__ = ["ZippedStorage"]


class ZippedStorage(PackedStorage):
    """Writes less to the disk, and takes more processor time for it.

    Args:
        path: the directory or URL; torch and the checkpointer name another for each checkpoint.
        level: from 1, the fastest, to 9.
    """

    def __init__(self, path: str | None = None, level: int = 1) -> None:
        if not 1 <= level <= 9:
            raise ConfigError(f"storage.level={level} must be from 1 to 9")
        super().__init__(path)
        self.level = level

    def pack(self, data: memoryview) -> bytes:
        """Return what goes into the file for one entry."""
        return zlib.compress(data, self.level)

    def unpack(self, data: bytes) -> bytes:
        """Return what was packed, whatever the level was: a checkpoint has no options."""
        return zlib.decompress(data)
