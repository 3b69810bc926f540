"""``tier=local_ssd``: stores steps on a local disk that other programs use too."""

from __future__ import annotations

import os
from typing import Literal

from stagereg.plugin import ByteSize, ConfigError, Tier

__all__ = ["LocalSsdTier"]


class LocalSsdTier(Tier):
    """Stores steps on a disk, and leaves part of the disk free for other programs.

    Args:
        dir: the folder, on a local disk of the machine.
        every: steps between saves, or ``"auto"``.
        copies: number of other machines that get a copy of this machine's shards.
        keep: number of steps to retain.
        domain: the failure domain of this machine, such as its rack.
        host_memory: maximum bytes of the files on this machine.
        free: bytes of the disk to leave free for other programs.
    """

    durable = True  # flushed files survive a reboot

    def __init__(
        self,
        dir: str,
        every: int | Literal["auto"] = 10,
        copies: int = 1,
        keep: int = 2,
        domain: str | None = None,
        host_memory: ByteSize | None = None,
        free: ByteSize = ByteSize("64MiB"),  # noqa: B008
    ) -> None:
        super().__init__(dir, every, copies, keep, domain, host_memory)
        self.free = ByteSize(free)

    def prepare(self) -> str:
        """Create the folder with access for this user only, and return its absolute path."""
        os.makedirs(self.dir, mode=0o700, exist_ok=True)
        if not os.access(self.dir, os.W_OK | os.X_OK):
            raise ConfigError(f"tier.dir={self.dir} is not writable. Choose another folder.")
        return os.path.realpath(self.dir)

    def lacking(self, nbytes: int) -> str:
        """Return why ``nbytes`` more bytes do not fit in addition to the free ones; empty if they fit."""
        return super().lacking(nbytes + self.free) if nbytes else ""
