"""``memory``: files in the shared memory of the machine, which outlive the process and its launcher, not a reboot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from stagereg.base.machine import file_system
from stagereg.base.option_text import choice, option
from stagereg.base.output import size_text
from stagereg.base.sizes import ByteSize
from stagereg.errors import ConfigError
from stagereg.extensions.tiers.tier import Tier, available_memory, made
from stagereg.registry import register

_RESERVE_BYTES = 1 << 29  # that stay for the program


@register("tier", "memory")
class MemoryTier(Tier):
    """Keeps steps in memory, as files of ``/dev/shm``: the fastest to write and to come back from.

    They are there after a crash, a kill and a new launcher on the same machine. A reboot ends them, and where ``dir``
    goes with a container or a Slurm job, its end. A machine needs room for ``keep`` times ``1 + copies`` of its share
    of the state.

    Args:
        dir: a folder in memory; by default one of this user in ``/dev/shm``.
        every: as of :class:`.Tier`, and so are the others.
    """

    durable = False

    def __init__(
        self,
        dir: str | None = None,
        every: int | Literal["auto"] = 10,
        copies: int = 1,
        keep: int = 2,
        domain: str | None = None,
        host_memory: ByteSize | None = None,
    ) -> None:
        own = f"/dev/shm/stagereg-{os.getuid()}"
        super().__init__(own if dir is None else dir, every, copies, keep, domain, host_memory)

    def prepare(self) -> str:
        """Make the folder and return it. Raises: ``ConfigError`` if it is not in memory; ``OSError``."""
        folder = made(self.dir)
        if (kind := file_system(Path(folder))) not in ("tmpfs", "ramfs", ""):
            disk = choice("tier", "disk", dir=folder)
            raise ConfigError(
                f"{option('tier.dir', folder)} is on {kind}, not in memory: choose {disk}, or a folder of a tmpfs."
            )
        return folder

    def lacking(self, nbytes: int) -> str:
        """Return why so many more bytes do not fit, be it into the folder or into memory."""
        if why := super().lacking(nbytes):
            return why
        room = available_memory()
        if nbytes + _RESERVE_BYTES > room:
            return f"this machine has {size_text(max(room, 0))} of memory left, and {size_text(nbytes)} are needed"
        return ""
