"""The local tier as a target of saves: each machine stores the files of its ranks, in the native format.

The index of the state entries is an additional file in the part of rank 0. A step is complete once the parts of all
ranks are complete. A save does not wait for its peer copies; the next save checks their progress.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from stagereg.base.small_files import replace_small
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.targets import SaveTarget, Schedule
from stagereg.extensions.tiers.near import LocalTier
from stagereg.extensions.tiers.part import Part, PartFile, SaveId

_PRIVATE = 0o600  # file mode, independent of the umask


class _TierStorage(DcpStorage):
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return ``plan`` without disk access: an error here would also fail the save to the checkpoint directory."""
        return plan


class TierTarget(SaveTarget):
    required = False

    def __init__(self, near: LocalTier, ranks: RankGroup, schedule: Schedule) -> None:
        self.near, self._files = near, _TierStorage(direct="auto" if near.tier.durable else "never")
        self._files.mode = _PRIVATE
        super().__init__(f"the tier {near.tier.dir}", ranks, self._files, schedule, repeats=True)
        self._save: SaveId | None = None
        self._index = b""  # set on rank 0 only

    def names(self, path: str) -> bool:
        return self.near.names(path)

    def begin(self, step: int) -> tuple[str, bool]:
        self._index, self._save = b"", None  # so that discard() after a failure does not delete the previous save
        self._save = self.near.begin_save(step)
        if self._save is None:
            return f"{self.near.folder.path}/.nowhere", True
        return self.near.folder.directory(self._save), False

    def expect_room(self, nbytes: int) -> None:
        """Create the folder of the save. Raises: ``OSError`` if ``nbytes`` per rank do not fit on this machine."""
        self.near.folder.make(self._save)
        if why := self.near.lacking(nbytes * self.near.ranks_here):
            raise OSError(errno.ENOSPC, why)

    def finish(self, path: str, metadata: Metadata | None, results: list[list[WriteResult]]) -> dict[str, FileDigest]:
        """Do not write torch's metadata file, because only stagereg reads a tier."""
        return {}

    def marks(self, path: str, results: Sequence[WriteResult]) -> dict[str, FileDigest]:
        return dict(self._files.marks)

    def commit(self, step: int, path: str, files: dict[str, FileDigest], index: bytes) -> None:
        replace_small(f"{path}/{INDEX}", index, _PRIVATE, self.near.tier.durable)
        self._index = index

    def complete(self, step: int) -> None:
        assert self._save is not None
        blocks = self._files.blocks
        files = {name: PartFile(mark.bytes, blocks[name]) for name, mark in self._files.marks.items()}
        if self._index:
            files[INDEX] = PartFile.of_bytes(self._index)
        save, self._save = self._save, None
        self.near.end_save(Part(save, self.ranks.rank, files))

    def discard(self, step: int) -> None:
        if self._save is not None:
            self.near.folder.delete([self._save.folder])
            self._save = None
