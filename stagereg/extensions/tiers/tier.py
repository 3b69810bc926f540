"""The kind ``tier``: a local tier, which stores copies of steps on the machines that train.

Choose a tier in a config, ``tier=disk tier.dir=/local/t tier.every=10``, or pass it to the checkpointer. Tiers differ
in the medium only: the folder, whether files survive a reboot, and the free space. Copying, verification and restore
are the same for all tiers (:mod:`stagereg.extensions.tiers`).
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
    """Base class of local tiers. A plugin sets ``durable`` and overrides :meth:`prepare`, which creates the folder. It
    may override :meth:`lacking` to apply limits in addition to the free space of the file system.

    Requirements for a tier, which ``stagereg.testing.TierContract`` checks:

    1. *Construction has no side effects.* The constructor passes the options below to this class, and accesses no disk.
    2. *One folder per machine.* :meth:`prepare` creates the folder, for this user only, and returns the same full path
       in every process of the machine. Several processes may call :meth:`prepare` concurrently. It does not change
       existing files. Files survive the processes that wrote them.
    3. *This folder or an error.* If :meth:`prepare` cannot use the folder, it raises instead of using another folder.
    4. *Ordinary files.* Files can be flushed, locked, memory-mapped and atomically replaced while processes read them.
    5. *Space is checked first.* :meth:`lacking` reports a lack of space and changes nothing. If files still do not fit,
       the operating system raises ``OSError``.
    6. *Durability as declared.* Flushed files survive a reboot if ``durable`` is true.

    Args:
        dir: the folder of the tier; each run has a subfolder.
        every: steps between saves; ``"auto"`` chooses the interval that loses the least training time.
        copies: number of peer copies of each part, on other machines; 0 makes no copies.
        keep: number of steps to retain, at least 1. An older step is deleted when a newer step is copied.
        domain: the failure domain of this machine, such as its rack; copies go to other domains. The default is the
            domain in Slurm's topology; without Slurm, each machine is a separate domain.
        host_memory: maximum bytes that files of this run use on this machine; ``None``: limited by the free space.

    Attributes:
        durable: whether flushed files survive a reboot of the machine.

    Raises:
        ConfigError: a value is invalid.
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
            text = f"{option('tier.dir')} must be a folder on a local disk or in memory of each machine, got {dir!r}."
            raise ConfigError(text)
        if isinstance(every, str):
            one_of(option("tier.every"), every, ("auto", "a number of steps"))
        self.dir = os.path.abspath(os.path.expanduser(os.fspath(dir)))
        self.every: int | Literal["auto"] = every if every == "auto" else at_least(1, option("tier.every"), every)
        self.copies = at_least(0, option("tier.copies"), copies)
        self.keep = at_least(1, option("tier.keep"), keep)
        slurm = os.environ.get("SLURM_TOPOLOGY_ADDR", "")  # such as rack1.switch2.node3
        self.domain = slurm.rpartition(".")[0] if domain is None else str(domain)
        self.host_memory = None if host_memory is None else ByteSize(host_memory)

    def __str__(self) -> str:
        """Return text with the options that must be identical on all ranks."""
        return f"{type(self).__name__}(every={self.every}, copies={self.copies}, keep={self.keep})"

    @abstractmethod
    def prepare(self) -> str:
        """Create the folder and return its full path. Raises: ``ConfigError`` for an unsuitable folder; ``OSError``."""

    def lacking(self, nbytes: int) -> str:
        """Return why ``nbytes`` more bytes do not fit; empty if they fit."""
        free = os.statvfs(self.dir)
        room = free.f_bavail * free.f_frsize
        if nbytes > room:
            return f"a save needs {size_text(nbytes)}, and {self.dir} has {size_text(room)} of free space"
        return ""


def made(path: str) -> str:
    """Create a folder for this user, and return its real path.

    A link is accepted if this user or root owns both the link and its target. Other users may have write access,
    because each run has a subfolder that only this user may write to (:func:`.folder.make_private`).
    Raises: ``ConfigError`` if another user owns the folder; ``OSError`` if it cannot be created.
    """
    with contextlib.suppress(FileExistsError):  # raised if the path is a dangling link or a file
        os.makedirs(path, mode=0o700, exist_ok=True)
    owners = {os.lstat(path).st_uid, os.stat(path).st_uid}
    if owners - {os.geteuid(), 0} or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{option('tier.dir', path)} belongs to another user or is not writable. Use another folder.")
    return os.path.realpath(path)


def available_memory() -> int:
    """Return the free memory of the control group of this process, or of the machine, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    room = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 1 << 62)
    try:
        inside = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        for group in (Path("/sys/fs/cgroup"), Path(f"/sys/fs/cgroup/{inside}")):
            most = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            room = room if most == "max" else min(room, int(most) - used)
    except (OSError, ValueError):  # the machine has no control groups, or an unknown layout
        pass
    return room
