"""``memory``: a tier in the shared memory of each machine. Its files survive process exits, but not a reboot."""

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

_RESERVE_BYTES = 1 << 29  # memory that saves leave free for the training program


@register("tier", "memory")
class MemoryTier(Tier):
    """Stores steps in memory, as files in ``/dev/shm``: the fastest tier to save to and to restore from.

    The files survive crashed and killed processes, and a restart of the launcher on the same machine. A reboot deletes
    the files, as does the end of a container or Slurm job that owns ``dir``. Each machine needs memory for ``keep * (1
    + copies)`` times the state that its ranks save.

    Args:
        dir: a folder in memory; by default a folder of this user in ``/dev/shm``.
        every: see :class:`.Tier` for this and the other arguments.
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
        """Create the folder and return its path. Raises: ``ConfigError`` if the folder is not in memory."""
        folder = made(self.dir)
        if (kind := file_system(Path(folder))) not in ("tmpfs", "ramfs", ""):
            disk = choice("tier", "disk", dir=folder)
            text = f"{option('tier.dir', folder)} is on {kind}, not in memory. Use {disk}, or a folder on a tmpfs."
            raise ConfigError(text)
        return folder

    def lacking(self, nbytes: int) -> str:
        """Return why ``nbytes`` more bytes do not fit into the folder or into free memory; empty if they fit."""
        if why := super().lacking(nbytes):
            return why
        room = available_memory()
        if nbytes + _RESERVE_BYTES > room:
            return f"a save needs {size_text(nbytes)}, and this machine has {size_text(max(room, 0))} of free memory"
        return ""
