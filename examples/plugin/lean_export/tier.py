"""``tier=local_ssd``: steps on a disk of the machine that other programs use too."""

from __future__ import annotations

import os
from typing import Literal

from stagereg.plugin import ByteSize, ConfigError, Tier

__all__ = ["LocalSsdTier"]


class LocalSsdTier(Tier):
    """Keeps steps on a disk, of which it leaves a part free for others.

    Args:
        dir: the folder, on a disk of the machine's own.
        every: steps from one save to the next, or ``"auto"``.
        copies: on how many other machines each machine's parts are copied.
        keep: how many steps stay.
        domain: what fails together with this machine, such as its rack.
        host_memory: bytes that the files may take on this machine.
        free: bytes of the disk that are left to others.
    """

    durable = True  # a reboot leaves what was flushed

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
        """Make the folder, for this user alone, and return its full path."""
        os.makedirs(self.dir, mode=0o700, exist_ok=True)
        if not os.access(self.dir, os.W_OK | os.X_OK):
            raise ConfigError(f"tier.dir={self.dir} cannot be written to; name another folder.")
        return os.path.realpath(self.dir)

    def lacking(self, nbytes: int) -> str:
        """Return why so many more bytes do not fit beside those that stay free; nothing if they do."""
        return super().lacking(nbytes + self.free) if nbytes else ""
