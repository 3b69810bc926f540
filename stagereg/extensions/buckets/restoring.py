"""Restores that read each byte of a checkpoint only once for all ranks (:mod:`.shared_read`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagereg.checkpoint.extension import RestoreExtension
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.storage.reading import CheckpointFiles, Transfer
from stagereg.extensions.buckets.shared_read import SharedRead, shared_index


class _Once:
    def index(self, checkpoint: Checkpoint, ranks: RankGroup) -> bytes:
        return shared_index(checkpoint, ranks)

    def begin(
        self, checkpoint: Checkpoint, files: CheckpointFiles, transfer: Transfer, ranks: RankGroup, check: bool
    ) -> Callable[[], Mapping[str, str]]:
        return SharedRead(checkpoint, files, transfer, ranks, check).run


class ReadsOnce(RestoreExtension):
    shared_reader = _Once()


EXTENSIONS: tuple[type[RestoreExtension], ...] = (ReadsOnce,)
"""The restore extensions of this package."""
