"""The kind ``tier``: where a machine keeps the copies of steps that are nearer than the store, and how many.

A tier is chosen in a config, ``tier=disk tier.dir=/local/t tier.every=10``, or given to the checkpointer. What differs
from one to the next is the medium alone: which folder, whether it outlives a reboot, and what still fits into it. What
is sent, checked and restored is the same for all (:mod:`stagereg.checkpoint.tiers`).
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

from stagereg.base.option_text import constructed, option
from stagereg.base.output import size_text
from stagereg.base.sizes import ByteSize
from stagereg.errors import ConfigError, at_least, one_of


class Tier(ABC):
    """One of them, on this machine. A plugin derives from it, says in :meth:`prepare` where its folder is, in
    ``durable`` what a reboot leaves of it, and in :meth:`lacking`, if it knows more than the file system, what fits.

    A tier promises, and ``stagereg.testing.TierContract`` tries:

    1. *Made without effect.* The constructor takes the options below, hands them on, and touches no disk.
    2. *One folder a machine.* :meth:`prepare` makes the folder, for this user alone, and returns the same full path in
       every process of the machine. It may be called in several at once. What is in the folder stays as it is, and
       outlives the processes that wrote it.
    3. *That folder or none.* Where it cannot be had, :meth:`prepare` raises, and takes no other one.
    4. *Ordinary files.* They can be flushed, locked, mapped, renamed in one step over others, and read meanwhile.
    5. *No surprise.* :meth:`lacking` says before what does not fit, and changes nothing. What does not fit all the same
       is an ``OSError`` of the operating system.
    6. *Durable or not*, as the attribute says.

    Args:
        dir: its folder for all runs; each run has one of its own in it.
        every: steps from one save to the next; ``"auto"``: as often as loses least.
        copies: on how many other machines each machine's parts are copied; 0 keeps them here alone.
        keep: how many steps stay, at least 1: the one before goes when the newer one is copied.
        domain: this machine's failure domain, such as its rack; copies go to others. By default what Slurm's topology
            says, else each machine is one of its own.
        host_memory: bytes that this run's files may take on this machine; ``None`` for what is there.

    Attributes:
        durable: whether what is flushed outlives a reboot of the machine.

    Raises:
        ConfigError: a value is of no use.
    """

    durable: bool = False

    def __init__(
        self,
        dir: str,
        every: int | Literal["auto"] = 10,
        copies: int = 1,
        keep: int = 2,
        domain: str | None = None,
        host_memory: ByteSize | None = None,
    ) -> None:
        constructed("tier")
        if not isinstance(dir, (str, os.PathLike)) or not os.fspath(dir) or "://" in os.fspath(dir):
            raise ConfigError(
                f"{option('tier.dir')} must be a folder of each machine's own disk or memory, not {dir!r}."
            )
        if isinstance(every, str):
            one_of(option("tier.every"), every, ("auto", "a number of steps"))
        self.dir = os.path.abspath(os.path.expanduser(os.fspath(dir)))
        self.every: int | Literal["auto"] = every if every == "auto" else at_least(1, option("tier.every"), every)
        self.copies = at_least(0, option("tier.copies"), copies)
        self.keep = at_least(1, option("tier.keep"), keep)
        slurm = os.environ.get("SLURM_TOPOLOGY_ADDR", "")  # of this node, as rack1.switch2.node3
        self.domain = slurm.rpartition(".")[0] if domain is None else str(domain)
        self.host_memory = None if host_memory is None else ByteSize(host_memory)

    def __str__(self) -> str:
        """What has to be the same on all ranks."""
        return f"{type(self).__name__}(every={self.every}, copies={self.copies}, keep={self.keep})"

    @abstractmethod
    def prepare(self) -> str:
        """Make the folder and return its full path. Raises: ``OSError``; ``ConfigError`` if it is no place for it."""

    def lacking(self, nbytes: int) -> str:
        """Return why so many more bytes do not fit; nothing if they do."""
        free = os.statvfs(self.dir)
        room = free.f_bavail * free.f_frsize
        if nbytes > room:
            return f"{self.dir} has {size_text(room)} left, and {size_text(nbytes)} are needed"
        return ""


def made(path: str) -> str:
    """Make a folder for this user alone, and return it. A link to a folder counts if this user or root has made both.

    Others may write to the folder: the folder of each run in it is this user's (:func:`.folder.make_private`).

    Raises: ``OSError``; ``ConfigError`` if it is another user's.
    """
    with contextlib.suppress(FileExistsError):  # a link that leads nowhere, or no folder
        os.makedirs(path, mode=0o700, exist_ok=True)
    owners = {os.lstat(path).st_uid, os.stat(path).st_uid}
    if owners - {os.geteuid(), 0} or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option('tier.dir', path)} belongs to another user, or cannot be written to; name another folder."
        )
    return os.path.realpath(path)


def available_memory() -> int:
    """Return how many bytes this process's control group, or the machine, still has for it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    room = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 1 << 62)
    try:
        inside = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        for group in (Path("/sys/fs/cgroup"), Path(f"/sys/fs/cgroup/{inside}")):
            most = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            room = room if most == "max" else min(room, int(most) - used)
    except (OSError, ValueError):  # another layout of control groups, or none
        pass
    return room
