"""A storage that fails on purpose, to try what a program does when its disk does.

::

    from stagereg.testing.faults import FaultyStorage

    full = FaultyStorage(fault="ENOSPC", at="writing", after_bytes=10_000, saves=[2])
    checkpointer = stagereg.Checkpointer(folder, storage=full, on_error="warn")

In a config the module is named as a plugin, ``plugins: [stagereg.testing.faults]``, and the storage is called
``faulty``. What goes wrong is an error of the operating system, as it is in earnest; the disk itself is not touched.
The moments are those of the commit protocol (:data:`stagereg.checkpoint.failpoints.POINTS`), in the process where they
come, be it the one that writes.

One at a time in a process: the moments do not show which checkpointer they belong to.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

import stagereg.checkpoint.failpoints as failpoints
import stagereg.registry as registry
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.open_store import is_url
from stagereg.errors import ConfigError, nearest

__all__ = ["FaultyStorage"]

_HANG = "hang"
_LOOK_S = 0.02
_HIDDEN = ("agreed", "writing", "flushed", "written", "marked", "held", "described")
"""Moments at which the directory of the save has its first name still."""
_OUTSIDE = ("locked", "swept", "staged", "ended")
"""Moments that are over when the storage is first called for the save, or come when it has succeeded."""


@registry.register("storage", "faulty")
class FaultyStorage(Storage):
    """Writes through another storage, and fails where it is asked to.

    Checkpoints that it completes are that other storage's, and are read through it.

    Args:
        storage: the name of the storage that writes, or the storage.
        fault: the name of the error, such as ``"EIO"``, ``"ENOSPC"`` or ``"EROFS"``; or ``"hang"``, which is a call
            that does not come back.
        at: the moment before which it comes, by the name of the one that has just passed: ``"writing"`` in the middle
            of a file, ``"flushed"`` behind one; ``"made"``, ``"written"`` and ``"marked"`` between the parts of a save;
            of rank 0 alone ``"held"`` (the manifest cannot be written), ``"described"`` (the directory cannot be
            renamed), ``"renamed"`` (it has been, and cannot be flushed), ``"committed"`` (``latest`` cannot be moved)
            and what comes behind it. An error is raised on all ranks; a call that hangs, on those that wait when it
            takes too long.
        after_bytes: with ``at="writing"``: how many bytes this rank's files take before that,
            in a directory.
        saves: which of this process's saves fail, counted from 1; ``None`` for all.
        ranks: on which ranks; ``None`` for all.
        release: a path; what hangs goes on when there is a file.

    Raises:
        ConfigError: there is no such error or moment.
    """

    def __init__(
        self,
        storage: str | Storage = "dcp",
        fault: str = "EIO",
        at: str = "writing",
        after_bytes: int = 0,
        saves: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        release: str | None = None,
    ) -> None:
        known = [*sorted(errno.errorcode.values()), _HANG]
        if fault not in known:
            raise ConfigError(f"fault={fault!r} is no error of this system and not {_HANG!r}.{nearest(fault, known)}")
        moments = [name for name in failpoints.POINTS if name not in _OUTSIDE]
        if at not in moments:
            raise ConfigError(f"at must be one of {', '.join(moments)}, not {at!r}.{nearest(at, moments)}")
        inner: Storage = registry.build("storage", storage) if isinstance(storage, str) else storage
        self.wraps: Storage = inner  # whose checkpoints these are
        self.fault = fault
        self.at = at
        self.after_bytes = after_bytes
        self.saves = saves
        self.ranks = ranks
        self.release = release
        self._folder: str = ""
        self._rank = 0
        self._count = 0
        self.remote, self.padding = inner.remote, inner.padding

    @property
    def marks(self) -> Mapping[str, FileMark]:
        """As the storage inside."""
        return self.wraps.marks

    def reader(self, path: str | os.PathLike[str]) -> StorageReader:
        """As the storage inside."""
        return self.wraps.reader(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, the next by the count of ``saves``."""
        self.wraps.reset(checkpoint_id)
        self._folder = os.fspath(checkpoint_id or "")
        self._count += 1
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._listen()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write as the storage inside, which may be in another process by now. Raises: ``OSError``."""
        self._listen()
        return self.wraps.write_data(plan, planner)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As the storage inside; the rest says that ranks use collectives, which is the default."""
        self.wraps.set_up_storage_writer(is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As the storage inside."""
        return self.wraps.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the storage inside."""
        return self.wraps.prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the storage inside."""
        self.wraps.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: the storage inside decides, and this is asked before it is known."""
        return True

    def _listen(self) -> None:
        wrong = (self.saves is None or self._count in self.saves) and (self.ranks is None or self._rank in self.ranks)
        failpoints.watch(self._reached if wrong else None)

    def _reached(self, name: str) -> None:
        if name in _HIDDEN and not is_url(self._folder) and not os.path.isdir(self._folder):
            failpoints.watch(None)  # of another save, whoever makes it, since what this one wrote has gone away
            return
        if name != self.at or (name == "writing" and self._written() < self.after_bytes):
            return
        failpoints.watch(None)
        if self.fault != _HANG:
            number: int = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number), self._folder)
        while self.release is None or not os.path.exists(self.release):
            time.sleep(_LOOK_S)

    def _written(self) -> int:
        own = (f"__{self._rank}_*", f"shard-{self._rank + 1:05}-*")  # as torch's writers name them
        return sum(file.stat().st_size for names in own for file in Path(self._folder).glob(names))
