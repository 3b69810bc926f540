"""The tier as saves are written to it: files of the project's own format, which each machine keeps for its ranks.

The index, which says what is where, is one more file of rank 0's part. A step is complete once every rank's part is.
Nobody waits for its copies: the next save finds out how far they have come.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import FileMark
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.pending_save import Begun, LastSave
from stagereg.checkpoint.save.schedule import Schedule
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.local_files import sync
from stagereg.checkpoint.tiers.near import NearCopies
from stagereg.checkpoint.tiers.part import Part, PartFile, SaveId


class TierTarget:
    """The tier ``near`` of one checkpointer; a :class:`.Target`."""

    optional = True

    def __init__(self, near: NearCopies, ranks: RankGroup, schedule: Schedule) -> None:
        self.near, self.ranks, self.schedule = near, ranks, schedule
        direct = "auto" if near.tier.durable else "never"
        self._files = DcpStorage(direct=direct)
        self.storage: Storage = self._files
        self.last = LastSave(True)
        self._save: SaveId | None = None
        self._index = b""  # on rank 0

    @property
    def where(self) -> str:
        """The tier, and its folder."""
        return f"the tier {self.near.tier.dir}"

    def begin(self, step: int) -> Begun:
        self._index, self._save = b"", None  # what fails from here on is not the save before, which stays
        self._save = self.near.begin_save(step)
        if self._save is None:
            return Begun(self.near.folder.nowhere, passed_over=True)
        return Begun(self.near.folder.directory(self._save))

    def expect_room(self, nbytes: int) -> None:
        """Raise ``OSError`` if this machine has no room for so many bytes of each of its ranks."""
        if why := self.near.lacking(nbytes * self.near.ranks_here):
            raise OSError(errno.ENOSPC, why)

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        return self.storage.write_data(plan, planner).wait()

    def finish(self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]) -> Mapping[str, FileMark]:
        """Leave out torch's metadata: nothing reads a tier but this project."""
        return {}

    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileMark]:
        """Return those that the storage has taken."""
        return dict(self.storage.marks)

    def commit(self, step: int, path: str, files: dict[str, FileMark], index: bytes) -> None:
        """Write the index beside the files of rank 0."""
        place = Path(path, INDEX)
        place.write_bytes(index)
        if self.near.tier.durable:
            sync(place)
        self._index = index

    def complete(self, step: int) -> None:
        """Complete this rank's part, and have it copied."""
        assert self._save is not None
        blocks = self._files.blocks
        files = {name: PartFile(mark.bytes, blocks[name]) for name, mark in self.storage.marks.items()}
        if self._index:
            files[INDEX] = PartFile.of_bytes(self._index)
        save, self._save = self._save, None
        self.near.end_save(Part(save, self.ranks.rank, files))

    def discard(self, step: int) -> None:
        """Delete what this machine has of it."""
        if self._save is not None:
            self.near.folder.delete([self._save.folder])
            self._save = None
